"""Signals that ask a job to save and end, which launchers send to all ranks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# SIGUSR1 is what Slurm sends with --signal=USR1@120.
SIGNALS_TO_SAVE = (signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def signals_left_to_others() -> Iterator[None]:
    """Ignore signals that ask for a save in the block. This process has nothing to save; the others have.

    Handlers of the program stay. In a thread other than the main one nothing can be done, and nothing is.

    >>> with signals_left_to_others():
    ...     signal.raise_signal(signal.SIGUSR1)
    """
    is_main = threading.current_thread() is threading.main_thread()
    taken = [number for number in SIGNALS_TO_SAVE if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _ignore)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _ignore(number: int, frame: object) -> None:
    """Handle a signal; not SIG_IGN, which programs that are started in the block would inherit."""
