"""Save on all ranks after the same step when the job is about to end."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from mpidist.checkpoint.checkpoint import Checkpoint, tracked_by
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.checkpoint.termination import TerminationConfig, TerminationWatch
from mpidist.core.context import get_strategy, outside
from mpidist.core.protocols import StrategyLike
from mpidist.topology.topology import has_world, world_topology

_log = logging.getLogger("mpidist")
P = ParamSpec("P")
T = TypeVar("T")

_SAVE, _FINAL = "save", "final"
# The last save begins so many mean steps before the end of the grace period.
_STEPS_BEFORE_END = 6


class PreemptionCheckpointHandler:
    """Saves after the same step on all ranks when the job is to end.

    It then exits with code 42, and goes on in the next run. Make it on every rank, in the main thread, in the same
    order (collective); it restores the newest checkpoint. The notice may reach any rank: a signal by default, see
    ``TerminationConfig``. No message travels with the steps: ranks agree in threads of their own, so a rank gets the
    notice inside a call that Python cannot interrupt, too.

    Args:
        cluster_resolver: As in TensorFlow; not needed here, None will do.
        checkpoint_or_checkpoint_manager: The objects to save.
        checkpoint_dir: Where, for a Checkpoint; a manager has its own directory.
        termination_config: A TerminationConfig; signals by default.

    Raises:
        TypeError: Neither a Checkpoint nor a CheckpointManager.
        ValueError: A Checkpoint without ``checkpoint_dir``, or a manager with one; not in the main thread.
        RuntimeError: MPI was started without threads, or there are several ranks, and no strategy that they share.

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

        Call it on every rank, equally often. An exception of the step goes through; the step then does not count.

        Args:
            distributed_train_function: Called with the other arguments; most often it calls ``strategy.run``.
            args, kwargs: Of the function.

        Returns:
            The result of the function.

        Raises:
            SystemExit: The job has saved and is to end (code 42), by default.
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
            args, kwargs: For ``save``, or for ``save_fn``.
        """
        self._check_open()
        self._tracked.run_calls += 1
        self._end_step(args, kwargs)

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Return the block around a loop that calls :meth:`save_checkpoint_if_preempted`.

        At its end a notice that came in the last step is acted on. An exception goes through.
        """
        self._check_open()
        yield
        self._end_step((), {})

    @property
    def total_run_calls(self) -> int:
        """Number of steps counted so far, those before a restart included.

        Deprecated in TensorFlow: keep a step in the checkpoint.
        """
        return self._tracked.run_calls

    def close(self) -> None:
        """Watch no more; once. Collective: call it on every rank, before the strategy is closed."""
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
            # Other ranks may be anywhere: what takes all of them is left to the end of the program.
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
        """Take the notice; in the thread that watches."""
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
