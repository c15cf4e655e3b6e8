"""Printing what a process ends with: where it stays, although nothing that others have buffered is flushed any more."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

STDERR = 2


def lasting_descriptor(stream: Any) -> int | None:
    """Return the descriptor of a stream whose text outlives this process; None for a buffer, or where it is closed.

    PyTorch, while it prints an uncaught exception, has an ``io.StringIO`` in ``sys.stderr``; others have a temporary
    file without a name.
    """
    try:
        descriptor: int = stream.fileno()
        return descriptor if os.fstat(descriptor).st_nlink else None
    except (AttributeError, TypeError, ValueError, OSError):
        return None


def write_last(text: str) -> None:
    """Write ``text`` on ``sys.stderr``; if it would not outlive this process there, on file descriptor 2, too.

    A stream without a descriptor may hand on what it gets, as one does that keeps a copy of all output. What has come
    to ``sys.__stderr__`` in this way is not printed once more.

    Raises:
        OSError: File descriptor 2 cannot be written to, either.
    """
    _write(text, sys.stderr)


def _write(text: str, stream: Any) -> None:
    lasts = False
    # Whatever is wrong with a stream of the program's own, the text is printed below.
    with contextlib.suppress(Exception), _writes_of_real_stderr() as written:
        stream.write(text)
        stream.flush()
        lasts = bool(written) or lasting_descriptor(stream) is not None
    if not lasts:
        rest = text.encode(errors="backslashreplace")
        while rest:
            rest = rest[os.write(STDERR, rest) :]


@contextlib.contextmanager
def lasting_stderr() -> Iterator[None]:
    """Let what a function prints on ``sys.stderr`` in the block outlive this process."""
    if lasting_descriptor(sys.stderr) is not None:
        yield
        return
    with contextlib.redirect_stderr(_Lasting(sys.stderr)):
        yield


class _Lasting(io.TextIOBase):
    """Writes at once on a stream, and where it lasts."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        _write(text, self._stream)
        return len(text)


@contextlib.contextmanager
def _writes_of_real_stderr() -> Iterator[list[str]]:
    """Give a list that gets what is written on ``sys.__stderr__`` in the block."""
    real: Any = sys.__stderr__
    written: list[str] = []
    if real is None:
        yield written
        return
    write = real.write

    def see(text: str) -> int:
        written.append(text)
        count: int = write(text)
        return count

    real.write = see
    try:
        yield written
    finally:
        real.write = write


def flush_output() -> None:
    """Flush what this process has printed; a stream that cannot be flushed does not keep the others from it."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]
