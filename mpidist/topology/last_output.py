"""The last output of a process: folded tracebacks, text that survives it, equal errors once.

Nothing that others have buffered is flushed any more. Of ranks of a node with the same error the first prints it, and
names those that come meanwhile. They meet at a Unix socket whose name, a digest of the error, is in no file system and
goes with its process. So nothing stays behind, and no rank waits for one that is gone. A rank that nobody answers
prints the error itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import socket
import stat
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, TextIO

from mpidist.core import settings
from mpidist.core.callsite import is_of_package, is_of_program, path_in_package

_SHOWS = "; MPIDIST_FULL_TRACEBACK=1 shows them\n"
STDERR = 2
_LISTEN_SECONDS = 0.2
# More than that: the first rank prints before it listens.
_ANSWER_SECONDS = 0.5
_RETRY_SECONDS = 0.005
_MOST_WAITING = 1024
_HEARD = b"!"
_RANK = struct.Struct("q")
_CREDENTIALS = struct.Struct("3i")


def traceback_text(error: BaseException) -> str:
    """Return an uncaught exception as Python prints it, with mpidist's frames folded.

    Each run of frames inside mpidist is one line.

    All frames are there where ``MPIDIST_FULL_TRACEBACK=1``, and where none is of the user's program.
    """
    found = traceback.TracebackException.from_exception(error, compact=True)
    full, wrong = read_setting()
    chain = list(_chain(found))
    if not full and any(is_of_program(frame.filename) for one in chain for frame in one.stack):
        for one in chain:
            one.stack = _FoldedStack(one.stack)
    return "".join(found.format()) + wrong


def without_folds(text: str) -> str:
    """Return a traceback without the lines for mpidist's frames, which may differ among ranks."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.endswith(_SHOWS))


def read_setting() -> tuple[bool, str]:
    """Return whether to print all frames on every rank, and the setting's error. A wrong setting asks for all frames.

    An error in place of the one that is to be printed would hide it.
    """
    try:
        return settings.FULL_TRACEBACK.read(), ""
    except ValueError as problem:
        return True, f"mpidist: {problem}\n"


def _chain(first: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield an exception with its causes and contexts, and those of a group."""
    left = [first]
    while left:
        one = left.pop()
        yield one
        # Python 3.10 knows no groups.
        others = (one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ()))
        left += [other for other in others if other is not None]


class _FoldedStack(traceback.StackSummary):
    """Frames of a traceback, printed without those of mpidist."""

    def format(self, **options: bool) -> list[str]:
        lines: list[str] = []
        for inside, run in groupby(self, lambda frame: is_of_package(frame.filename)):
            frames = list(run)
            if inside:
                count = "1 frame" if len(frames) == 1 else f"{len(frames)} frames"
                last = f"{path_in_package(frames[-1].filename)}:{frames[-1].lineno}"
                lines.append(f"  ... {count} inside mpidist, to {last}{_SHOWS}")
            else:
                lines += traceback.StackSummary.from_list(frames).format(**options)
        return lines


def lasting_descriptor(stream: TextIO) -> int | None:
    """Return the descriptor of a stream whose text outlives this process, or None.

    None stands for a buffer, and for a stream that is closed.

    PyTorch, while it prints an uncaught exception, has an ``io.StringIO`` in ``sys.stderr``; others have a temporary
    file without a name.
    """
    try:
        descriptor = stream.fileno()
        return descriptor if os.fstat(descriptor).st_nlink else None
    except (AttributeError, TypeError, ValueError, OSError):
        return None


def write_last(text: str) -> None:
    """Write ``text`` on ``sys.stderr``, and where it would be lost, on file descriptor 2.

    A stream without a descriptor may hand its text on, as one does that keeps a copy of all output. Text that has come
    to ``sys.__stderr__`` in this way is not printed once more.

    Raises:
        OSError: File descriptor 2 cannot be written to, either.
    """
    _write(text, sys.stderr)


def _write(text: str, stream: TextIO) -> None:
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
    """Make text that a function prints on ``sys.stderr`` in the block outlive this process."""
    if lasting_descriptor(sys.stderr) is not None:
        yield
        return
    with contextlib.redirect_stderr(_Lasting(sys.stderr)):
        yield


class _Lasting(io.TextIOBase):
    """A stream that writes at once, so that the text outlives this process."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        _write(text, self._stream)
        return len(text)


@contextlib.contextmanager
def _writes_of_real_stderr() -> Iterator[list[str]]:
    """Yield a list of all text written on ``sys.__stderr__`` in the block."""
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
    """Flush this process's output. A stream that cannot be flushed does not keep the others from it."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]


def print_once(text: str, key: str, rank: int, name_of: Callable[[Iterable[int]], str]) -> None:
    """Print an error, unless another rank of this node prints the same.

    It is printed under the name of this rank; the other rank would name this one. Takes 0.2 s, or until the other rank
    has done so; 0.5 s more at most where that one does not come to it.

    Args:
        text: The error.
        key: Text that is the same on ranks with the same error.
        rank: This one.
        name_of: Gives ranks as text.
    """
    address = _address(key)
    end = time.monotonic() + _ANSWER_SECONDS
    while (listening := _listen(address)) is None:
        is_named = _another_prints(address, rank)
        if is_named is None and time.monotonic() < end:
            time.sleep(_RETRY_SECONDS)
            continue
        if not is_named:
            write_last(f"{name_of([rank])}:\n{text}")
        return
    connections: list[socket.socket] = []
    with listening:
        write_last(f"{name_of([rank])}:\n{text}")
        others = sorted(_hear(listening, connections))
        if others:
            write_last(f"{name_of(others)}: the same error\n")
    # The end of its connection tells a rank that it has been named.
    for connection in connections:
        connection.close()


def _address(key: str) -> bytes:
    """Return the socket name at which ranks with the same error and output meet.

    Ranks of a node are children of one process of the launcher, those of another job of another one.
    """
    job = f"{os.getuid()}:{os.getppid()}:{os.environ.get('PMIX_NAMESPACE')}\n{own_file()}"
    return b"\0mpidist-" + hashlib.sha256(f"{job}\n{key}".encode(errors="replace")).hexdigest().encode()


def own_file() -> str:
    """Return the file of its own that this rank prints errors to, or nothing."""
    descriptor = lasting_descriptor(sys.stderr)
    with contextlib.suppress(OSError):  # where there is none, nothing is printed there
        status = os.fstat(STDERR if descriptor is None else descriptor)
        if descriptor not in (None, STDERR) or stat.S_ISREG(status.st_mode):
            return f"{status.st_dev}:{status.st_ino}"
    return ""


def _listen(address: bytes) -> socket.socket | None:
    """Return a socket of that name, or None. None if another rank has it, or there can be none."""
    try:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        return None
    try:
        listening.bind(address)
        listening.listen(_MOST_WAITING)
    except OSError:
        listening.close()
        return None
    return listening


def _hear(listening: socket.socket, connections: list[socket.socket]) -> Iterable[int]:
    """Yield the ranks that come, and put their sockets into ``connections``."""
    end = time.monotonic() + _LISTEN_SECONDS
    while (left := end - time.monotonic()) > 0:
        try:
            listening.settimeout(left)
            connection = listening.accept()[0]
        except OSError:  # the time is over, or there is no descriptor left
            return
        connections.append(connection)
        try:
            connection.settimeout(left)
            if _is_of_this_user(connection):
                (rank,) = _RANK.unpack(connection.recv(_RANK.size))
                connection.send(_HEARD)
                yield rank
        except (OSError, struct.error):  # it is gone, or gave up
            continue


def _another_prints(address: bytes, rank: int) -> bool | None:
    """Return whether the rank that has this name prints the error and names this rank. Returns when it has.

    None where it does not listen yet, or not any more.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            connection.connect(address)
            if not _is_of_this_user(connection):
                return False
            connection.send(_RANK.pack(rank))
            heard = connection.recv(1) == _HEARD
            return heard and connection.recv(1) == b""
    except ConnectionRefusedError:
        return None
    except OSError:
        return False


def _is_of_this_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end is this user's. The names are open to all users of a machine."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(packed)[1]
    return user == os.getuid()
