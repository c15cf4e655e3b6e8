"""What a test must not leave behind: living threads and open communicators."""

from __future__ import annotations

import threading
import time

from mpidist.collectives.channel.channel import open_channels
from tests.support.speed import scaled

# A thread that was told to stop may need a moment to do so.
_STOPPING_SECONDS = scaled(1.0)
# tqdm keeps one monitor thread for the life of the process.
_KEPT = ("TMonitor",)
# They serve all communicators that are open, those that tests share, too.
_OF_COMMUNICATORS = ("mpidist-progress", "mpidist-service")
# They live as long as a strategy, which several tests may share, and end where it is collected.
_OF_STRATEGIES = "mpidist-replica-"


class Inventory:
    """The threads and communicators at one moment.

    Communicators are compared by identity, so the inventory keeps them.
    """

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._communicators = list(open_channels)

    def leaked(self) -> list[str]:
        """Return a line for each thread and communicator that came since and is still there."""
        limit = time.monotonic() + _STOPPING_SECONDS
        for thread in self._new_threads():
            thread.join(max(0.0, limit - time.monotonic()))
        lines = [f"thread {thread.name!r} is still alive" for thread in self._new_threads()]
        before = {id(communicator) for communicator in self._communicators}
        lines += [
            f"{communicator!r} is still open; close() the strategy or communicator"
            for communicator in open_channels
            if id(communicator) not in before
        ]
        return lines

    def _new_threads(self) -> list[threading.Thread]:
        return [
            thread
            for thread in threading.enumerate()
            if thread not in self._threads
            and type(thread).__name__ not in _KEPT
            and not (open_channels and thread.name in _OF_COMMUNICATORS)
            and not thread.name.startswith(_OF_STRATEGIES)
            and thread.is_alive()
        ]
