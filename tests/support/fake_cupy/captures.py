"""Captures of CUDA graphs on the pretended GPUs: what a stream is given is recorded, and not done.

As CUDA has it (cuThreadExchangeStreamCaptureMode): while a capture was begun in the global mode, calls that may be
unsafe of any thread that has not asked for another mode fail, and spoil the capture.
"""

from __future__ import annotations

import threading

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
UNSUPPORTED, INVALIDATED, IMPLICIT, CAPTURED_EVENT = 900, 901, 906, 907


class _Thread(threading.local):
    """What a thread has asked for, which outlives the GPUs of one test."""

    mode = GLOBAL


_thread = _Thread()


class _Capture:
    def __init__(self, mode: int) -> None:
        self.mode = mode
        self.thread = threading.get_ident()
        self.is_spoiled = False


class Captures:
    """The captures that are under way, by the handle of their stream."""

    def __init__(self) -> None:
        self._captures: dict[int, _Capture] = {}

    def begin(self, stream: int, mode: int) -> None:
        """``cudaStreamBeginCapture``."""
        self._captures[stream] = _Capture(mode)

    def end(self, stream: int) -> int:
        """``cudaStreamEndCapture``: return a status."""
        return INVALIDATED if self._captures.pop(stream).is_spoiled else 0

    def has(self, stream: int) -> bool:
        """Whether a stream is capturing."""
        return stream in self._captures

    def exchange_mode(self, mode: int) -> int:
        """Set the mode of this thread, and return the one before."""
        before, _thread.mode = _thread.mode, mode
        return before

    def try_unsafe(self) -> int:
        """Return the status of a call that may be unsafe, such as cudaMalloc or cudaEventQuery."""
        mode, me = _thread.mode, threading.get_ident()
        hindering = [
            capture
            for capture in list(self._captures.values())
            if (capture.thread == me and capture.mode != RELAXED and mode != RELAXED)
            or (capture.thread != me and capture.mode == GLOBAL and mode == GLOBAL)
        ]
        for capture in hindering:
            capture.is_spoiled = True
        return UNSUPPORTED if hindering else 0
