"""Handles of other processes on this node. A pidfd refers to its process even after the pid is reused."""

from __future__ import annotations

import os
import select
import signal

_KILL_SECONDS = 10.0


class Process:
    """A running process on this node."""

    def __init__(self, pid: int) -> None:
        self._pid, self._pidfd = pid, os.pidfd_open(pid)

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Wait up to ``seconds``. Return True if the process has ended."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1e3))

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return
        if not self.has_ended(_KILL_SECONDS):
            raise RuntimeError(
                f"process {self._pid} is still running {_KILL_SECONDS:.0f} s after SIGKILL. Kill it and restart the job"
            )

    def close(self) -> None:
        """Close the handle."""
        os.close(self._pidfd)
