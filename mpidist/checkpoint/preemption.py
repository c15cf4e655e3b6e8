"""Save on all ranks after the same step when the job is about to end."""

from __future__ import annotations

import contextlib
import logging
import numbers
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from mpidist.checkpoint.checkpoint import Checkpoint, tracked_by
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.core.context import StrategyLike, get_strategy, outside
from mpidist.topology.exit import SIGNALS_TO_SAVE
from mpidist.topology.topology import has_world, world_topology

_log = logging.getLogger("mpidist")
P = ParamSpec("P")
T = TypeVar("T")

_SAVE, _FINAL = "save", "final"
# Start the final save this many average step times before the grace period ends.
_STEPS_BEFORE_END = 6
# Exit code that asks the scheduler to start this job again.
EXIT_CODE = 42
_POLL_SECONDS = 1.0
# Time that the end of the program waits for a termination_watcher_fn to return.
_CLOSE_SECONDS = 2.0


class TerminationConfig:
    """How PreemptionCheckpointHandler detects that the job must end, and ends it.

    Args:
        termination_watcher_fn: Called once a second, in a thread, on every rank. It returns at once, True if the job
            must end. By default signals are watched.
        exit_fn: Called on all ranks after the last save. By default ``sys.exit(42)``.
        grace_period: Seconds between the notice and the end. With it the job saves at once, trains on, and saves again
            shortly before the end. With None or 0 it saves and exits.
        save_fn: Called instead of ``save`` of the checkpoint manager, on all ranks.
        signals: Signals that give the notice: SIGTERM, and SIGUSR1, which Slurm sends with ``--signal=USR1@120``.
            Extension.

    Raises:
        TypeError: An argument is no function, no number of seconds, or no sequence of signal numbers.
        ValueError: A negative grace period, no signals, or a signal that a program cannot handle.

    Source: ``tf.distribute.experimental.TerminationConfig``.

    >>> TerminationConfig(grace_period=60.0).grace_period
    60.0
    """

    def __init__(
        self,
        termination_watcher_fn: Callable[[], bool] | None = None,
        exit_fn: Callable[[], object] | None = None,
        grace_period: float | None = None,
        save_fn: Callable[..., object] | None = None,
        *,
        signals: Sequence[int] = SIGNALS_TO_SAVE,
    ) -> None:
        functions = {"termination_watcher_fn": termination_watcher_fn, "exit_fn": exit_fn, "save_fn": save_fn}
        for name, function in functions.items():
            if function is not None and not callable(function):
                raise TypeError(f"{name} is {function!r}; expected a function or None")
        _check_grace_period(grace_period)
        _check_signals(signals)
        if termination_watcher_fn is None and not signals:
            raise ValueError("signals is empty, and there is no termination_watcher_fn; expected signal numbers")
        self.termination_watcher_fn = termination_watcher_fn
        self.exit_fn = exit_fn or _exit
        self.grace_period = grace_period or 0.0
        self.save_fn = save_fn
        self.signals = tuple(signals)

    def __repr__(self) -> str:
        asked = self.signals if self.termination_watcher_fn is None else self.termination_watcher_fn
        return f"<TerminationConfig: {asked!r}, {self.grace_period:g} s of grace>"


def _check_grace_period(seconds: object) -> None:
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real):
        raise TypeError(f"grace_period is {seconds!r}; expected a number of seconds, or None")
    if not float(seconds) >= 0:
        raise ValueError(f"grace_period is {seconds}; expected seconds, 0 or more")


def _check_signals(signals: object) -> None:
    expected = "expected signal numbers, such as signals=[signal.SIGUSR1]"
    if isinstance(signals, (str, bytes)) or not isinstance(signals, Iterable):
        raise TypeError(f"signals is {signals!r}; {expected}")
    for number in signals:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"signals has {number!r}; {expected}")
        if number not in signal.valid_signals() or number in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"signals has {number!r}, which no program can take; {expected}")


def _exit() -> None:
    sys.exit(EXIT_CODE)


class TerminationWatch:
    """A thread that calls ``on_notice`` with the notice, also during calls that Python cannot interrupt."""

    def __init__(self, config: TerminationConfig, on_notice: Callable[[str], None]) -> None:
        self._on_notice = on_notice
        self._ask = config.termination_watcher_fn
        self._name = getattr(self._ask, "__qualname__", "termination_watcher_fn")
        self._is_closed = False
        self._signals = () if self._ask is not None else config.signals
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # Raised by termination_watcher_fn.
        self.error: Exception | None = None
        self._previous_handlers: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._previous_fd = -1
        try:
            if self._signals:
                self._take_signals()
        except BaseException:
            os.close(self._reader)
            os.close(self._writer)
            raise
        self._thread = threading.Thread(target=self._run, name="mpidist-termination", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching, and restore the signal handlers. A hanging function is left behind."""
        self._is_closed = True
        if self._signals:
            self._restore_signals()
        os.close(self._writer)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            _log.warning(
                "mpidist: %s() has not returned for %.0f s, and the program goes on without it; expected a "
                "termination_watcher_fn that returns at once, True or False",
                self._name,
                _CLOSE_SECONDS,
            )

    def _take_signals(self) -> None:
        try:
            # Python writes the number of each signal there at once. Its handlers wait for the main thread.
            self._previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        except ValueError as error:
            raise ValueError(
                "signals can only be watched by the main thread; make PreemptionCheckpointHandler there, or give "
                "TerminationConfig a termination_watcher_fn"
            ) from error
        try:
            for number in self._signals:
                self._previous_handlers[number] = signal.signal(number, _do_nothing)
        except BaseException:
            self._restore_signals()
            raise

    def _restore_signals(self) -> None:
        signal.set_wakeup_fd(self._previous_fd, warn_on_full_buffer=False)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _run(self) -> None:
        timeout = None if self._ask is None else _POLL_SECONDS
        try:
            while True:
                readable, _, _ = select.select([self._reader], [], [], timeout)
                received = os.read(self._reader, 256) if readable else b""
                if readable and not received:  # closed
                    return
                if self._previous_fd >= 0:
                    os.write(self._previous_fd, received)
                reason = self._notice(received)
                if reason is not None and not self._is_closed:
                    self._on_notice(reason)
        finally:
            # Closed by its only reader, however late it ends.
            os.close(self._reader)

    def _notice(self, received: bytes) -> str | None:
        for number in received:
            if number in self._signals:
                return f"signal {signal.Signals(number).name}"
        if self._ask is None:
            return None
        try:
            return f"{self._name}()" if self._ask() else None
        except Exception as error:  # raised in the program, at the end of its step
            self.error = error
            self._ask = None
            return None


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal: the thread has received its number."""


class PreemptionCheckpointHandler:
    """Saves after the same step on all ranks when the job must end.

    It then exits with code 42, and resumes in the next run. Create it on every rank, in the main thread, in the same
    order (collective). It restores the newest checkpoint. Any rank may receive the notice: a signal by default, see
    ``TerminationConfig``. Steps send no messages: the ranks agree in threads, so a rank receives the notice also
    during a call that Python cannot interrupt.

    Args:
        cluster_resolver: As in TensorFlow. It is not used, so None is fine.
        checkpoint_or_checkpoint_manager: Objects to save.
        checkpoint_dir: Directory, for a Checkpoint. A manager has its own.
        termination_config: A TerminationConfig. Signals by default.

    Raises:
        TypeError: The second argument is no Checkpoint and no CheckpointManager.
        ValueError: A Checkpoint without ``checkpoint_dir``, a manager with one, or not in the main thread.
        RuntimeError: MPI was started without threads, or several ranks share no strategy.

    Source: ``tf.distribute.experimental.PreemptionCheckpointHandler``.

    >>> import tempfile
    >>> from mpidist import Checkpoint
    >>> checkpoint = Checkpoint(step=0)
    >>> def train_step():
    ...     checkpoint.step += 1
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with PreemptionCheckpointHandler(None, checkpoint, directory) as handler:
    ...         while checkpoint.step < 10:  # after a restart it begins where it was saved
    ...             handler.run(train_step)
    >>> handler.total_run_calls
    10
    """

    def __init__(
        self,
        cluster_resolver: object,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        del cluster_resolver
        self._config = termination_config or TerminationConfig()
        if not isinstance(self._config, TerminationConfig):
            raise TypeError(f"termination_config is {termination_config!r}; expected a TerminationConfig or None")
        self._manager = _manager_of(checkpoint_or_checkpoint_manager, checkpoint_dir)
        self._tracked = tracked_by(self._manager.checkpoint)
        strategy = self._tracked.strategy("PreemptionCheckpointHandler()")
        _check_joins_ranks(strategy)
        self._is_chief = bool(strategy.extended.should_checkpoint)
        self._manager.restore_or_initialize()
        self._agreement = strategy.extended.step_agreement()
        self._reason: str | None = None
        self._timer: threading.Timer | None = None
        self._began = time.monotonic()
        self._is_closed = False
        self._watch: TerminationWatch | None = TerminationWatch(self._config, self._on_notice)

    def __repr__(self) -> str:
        return f"<PreemptionCheckpointHandler of {self._manager!r}>"

    def run(self, distributed_train_function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a training step; save and exit after it if the ranks agreed to.

        Call it on every rank, equally often. An exception of the step is raised unchanged, and the step does not count.

        Args:
            distributed_train_function: Function to call, which usually calls ``strategy.run``.
            args, kwargs: Arguments of the function.

        Returns:
            The result of the function.

        Raises:
            SystemExit: The job has saved and must end (code 42), by default.
            CollectiveTimeoutError: The ranks could not agree on a step.
        """
        self._check_open()
        result = distributed_train_function(*args, **kwargs)
        self._tracked.run_calls += 1
        self._end_step((), {})
        return result

    def save_checkpoint_if_preempted(self, *args: object, **kwargs: object) -> None:
        """Count a step; save and exit if the ranks agreed to. For loops without :meth:`run`.

        Call it on every rank after each step, inside :meth:`watch_preemption_scope`.

        Args:
            args, kwargs: Arguments of ``save``, or of ``save_fn``.
        """
        self._check_open()
        self._tracked.run_calls += 1
        self._end_step(args, kwargs)

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Return the block around a loop that calls :meth:`save_checkpoint_if_preempted`.

        At its end it handles a notice that arrived in the last step. An exception is raised unchanged.
        """
        self._check_open()
        yield
        self._end_step((), {})

    @property
    def total_run_calls(self) -> int:
        """Number of steps so far, those before a restart included.

        Deprecated in TensorFlow: keep a step in the checkpoint.
        """
        return self._tracked.run_calls

    def close(self) -> None:
        """Stop watching. Collective: call it on every rank, before the strategy is closed. Further calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop_watching()
        self._agreement.close()

    def __enter__(self) -> PreemptionCheckpointHandler:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            # Other ranks may be anywhere, so nothing collective is done here.
            self._stop_watching()

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this PreemptionCheckpointHandler has been closed; make another one")

    def _on_notice(self, reason: str) -> None:
        """Ask all ranks to save; in the thread that watches."""
        if self._reason is None:
            self._reason = reason
            received = time.monotonic()
            self._agreement.ask_for(_SAVE)
            if self._config.grace_period:
                steps = max(1, self._agreement.steps)
                mean = (received - self._began) / steps
                wait = max(0.0, self._config.grace_period - _STEPS_BEFORE_END * mean)
                self._timer = threading.Timer(wait, self._agreement.ask_for, (_FINAL,))
                self._timer.daemon = True
                self._timer.start()

    def _end_step(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self._watch is not None and self._watch.error is not None:
            raise self._watch.error
        due = self._agreement.step_done()
        if not due:
            return
        path = (self._config.save_fn or self._save)(*args, **kwargs)
        ends = not self._config.grace_period or _FINAL in due
        if self._is_chief:
            what = "and this job ends, to be started again" if ends else "and trains on until its grace period ends"
            _log.warning("mpidist: preempted: saved %s after step %d, %s", path, self.total_run_calls, what)
        if ends:
            self._manager.wait()
            self._config.exit_fn()

    def _save(self, *args: Any, **kwargs: Any) -> str | None:
        kwargs.setdefault("check_interval", False)
        return self._manager.save(*args, **kwargs)


def _check_joins_ranks(strategy: StrategyLike) -> None:
    with outside():
        is_default = strategy is get_strategy()
    if is_default and has_world() and world_topology().size > 1:
        raise RuntimeError(
            f"PreemptionCheckpointHandler would act on this rank alone, one of {world_topology().size}: its checkpoint "
            "has no variables of a strategy, and none is in scope; make it inside `with strategy.scope():`"
        )


def _manager_of(given: Checkpoint | CheckpointManager, directory: str | os.PathLike[str] | None) -> CheckpointManager:
    if isinstance(given, CheckpointManager):
        if directory is not None:
            raise ValueError(
                f"checkpoint_dir is {os.fspath(directory)!r}, and the CheckpointManager saves to {given.directory!r}; "
                "leave checkpoint_dir out"
            )
        return given
    if not isinstance(given, Checkpoint):
        raise TypeError(
            f"checkpoint_or_checkpoint_manager is {given!r} of type {type(given).__name__}; expected a "
            "mpidist.Checkpoint or a mpidist.CheckpointManager"
        )
    if directory is None:
        raise ValueError(
            "checkpoint_dir is None, and a Checkpoint does not say where to save; expected "
            "PreemptionCheckpointHandler(None, checkpoint, 'out'), or a CheckpointManager"
        )
    return CheckpointManager(given, directory, max_to_keep=1)
