"""Patience: how a thread that polls for messages gives the core away while none comes."""

from __future__ import annotations

import time

from mpidist.collectives.mpi.waiting import patience_of_process, relax

# A server that nobody asks for so long is not about to be asked; a nap costs the next request half of it.
_IDLE_SECONDS = 0.5
_LONG_NAP_SECONDS = 1e-3
_LOOKS_BETWEEN_CLOCK_READS = 256


class Patience:
    """Naps, the longer the longer nothing happens."""

    def __init__(self) -> None:
        self._looks = 0
        self._since: float | None = None
        self._is_idle = False
        self._patience = patience_of_process()

    def reset(self) -> None:
        """Something has happened."""
        self._looks = 0
        self._since = None
        self._is_idle = False

    def wait(self, is_busy: bool) -> None:
        """Nothing has happened; ``is_busy`` says that something is under way."""
        self._looks += 1
        if self._is_idle and not is_busy:
            time.sleep(_LONG_NAP_SECONDS)
            return
        relax(self._looks, self._patience)
        if self._looks % _LOOKS_BETWEEN_CLOCK_READS == 0:
            now = time.monotonic()
            self._since = self._since or now
            self._is_idle = now - self._since > _IDLE_SECONDS
