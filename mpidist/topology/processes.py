"""Handles of other processes on this node (pidfd).

A later process with the same number cannot take over a handle.
"""

from __future__ import annotations

import os
import select
import signal

_KILL_SECONDS = 10.0


class Process:
    """A running process on this node.

    Args:
        pid: Number of the process.
    """

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Return whether the process ends within some seconds."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1e3))

    def kill(self) -> None:
        """Kill the process and wait for its end.

        Raises:
            RuntimeError: The process does not end.
        """
        try:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        except ProcessLookupError:
            return
        if not self.has_ended(_KILL_SECONDS):
            raise RuntimeError(f"a process did not end within {_KILL_SECONDS:.0f} s after SIGKILL. Restart the job")

    def close(self) -> None:
        """Close the handle."""
        os.close(self._descriptor)
