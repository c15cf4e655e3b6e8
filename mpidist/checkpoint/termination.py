"""Configure how a job learns of its end, and watch for that in a thread."""

from __future__ import annotations

import logging
import numbers
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FrameType

from mpidist.topology.signals import SIGNALS_TO_SAVE

# What a scheduler takes as: start this job again.
EXIT_CODE = 42
_LOOK_SECONDS = 1.0
# How long the end of the program waits for a termination_watcher_fn to return.
_CLOSE_SECONDS = 2.0

_log = logging.getLogger("mpidist")


class TerminationConfig:
    """The way PreemptionCheckpointHandler learns that the job is to end, and ends it.

    Args:
        termination_watcher_fn: Asked once a second, in a thread, on every rank; returns at once, True when the job is
            to end. By default signals say so.
        exit_fn: Called on all ranks after the last save; by default ``sys.exit(42)``.
        grace_period: Seconds between the notice and the end. With it the job saves at once, trains on, and saves again
            shortly before the end. None and 0: it saves and exits.
        save_fn: Called instead of ``save`` of the checkpoint manager, on all ranks.
        signals: Those taken as the notice: SIGTERM, and SIGUSR1, which Slurm sends with ``--signal=USR1@120``.
            Extension.

    Raises:
        TypeError: Something is no function, no number of seconds, or no sequence of signal numbers.
        ValueError: A negative grace period, no signals, or one that a program cannot take.

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
    """A thread that waits for the notice, also inside calls that Python cannot interrupt.

    Args:
        config: The notices to watch for.
        on_notice: Called in the thread, once, with the notice as text.

    Raises:
        ValueError: Signals are to be watched, and this is not the main thread.
    """

    def __init__(self, config: TerminationConfig, on_notice: Callable[[str], None]) -> None:
        self._on_notice = on_notice
        self._ask = config.termination_watcher_fn
        self._name = getattr(self._ask, "__qualname__", "termination_watcher_fn")
        self._is_closed = False
        self._signals = () if self._ask is not None else config.signals
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self.error: Exception | None = None
        """The error of ``termination_watcher_fn``."""
        self._previous_handlers: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._previous_fd = -1
        if self._signals:
            self._take_signals()
        self._thread = threading.Thread(target=self._run, name="mpidist-termination", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no more, and give the signals back; a function that hangs is left behind."""
        self._is_closed = True
        if self._signals:
            self._give_signals_back()
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
            # Python itself writes the number of each signal there at once; its handlers wait for the main thread.
            self._previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        except ValueError as error:
            self._close_pipe()
            raise ValueError(
                "signals can only be watched by the main thread; make PreemptionCheckpointHandler there, or give "
                "TerminationConfig a termination_watcher_fn"
            ) from error
        try:
            for number in self._signals:
                self._previous_handlers[number] = signal.signal(number, _nothing)
        except BaseException:
            self._give_signals_back()
            self._close_pipe()
            raise

    def _give_signals_back(self) -> None:
        signal.set_wakeup_fd(self._previous_fd, warn_on_full_buffer=False)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _close_pipe(self) -> None:
        os.close(self._reader)
        os.close(self._writer)

    def _run(self) -> None:
        try:
            self._watch()
        finally:
            # Here, where nothing reads from it any more, however late that is.
            os.close(self._reader)

    def _watch(self) -> None:
        while True:
            readable, _, _ = select.select([self._reader], [], [], None if self._ask is None else _LOOK_SECONDS)
            numbers = os.read(self._reader, 256) if readable else b""
            if readable and not numbers:  # closed
                return
            if self._previous_fd >= 0:
                os.write(self._previous_fd, numbers)
            reason = self._notice(numbers)
            if reason is not None and not self._is_closed:
                self._on_notice(reason)

    def _notice(self, numbers: bytes) -> str | None:
        for number in numbers:
            if number in self._signals:
                return f"signal {signal.Signals(number).name}"
        if self._ask is None:
            return None
        try:
            return f"{self._name}()" if self._ask() else None
        except Exception as error:  # for the program, at the end of its step
            self.error = error
            self._ask = None
            return None


def _nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal: the thread has been told already."""
