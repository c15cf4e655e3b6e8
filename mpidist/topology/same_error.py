"""Ranks of one node that end with the same error: the first prints it, and names those that come meanwhile.

They meet at a Unix socket whose name, a digest of the error, is in no file system and goes with its process. So nothing
stays behind, and no rank waits for one that is gone. A rank that nobody answers prints the error itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterable

from mpidist.topology.real_stderr import STDERR, lasting_descriptor, write_last

_LISTEN_SECONDS = 0.2
# More than that: the first rank prints before it listens.
_ANSWER_SECONDS = 0.5
_RETRY_SECONDS = 0.005
_MOST_WAITING = 1024
_HEARD = b"!"
_RANK = struct.Struct("q")
_CREDENTIALS = struct.Struct("3i")


def print_once(text: str, key: str, rank: int, name_of: Callable[[Iterable[int]], str]) -> None:
    """Print an error under the name of this rank, unless another rank of this node prints the same and names it.

    Takes 0.2 s, or until the other rank has done so; 0.5 s more at most where that one does not come to it.

    Args:
        text: The error.
        key: What is the same on ranks with the same error.
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
    """Return the name at which ranks meet that have an error to print in the same place.

    Ranks of a node are children of one process of the launcher, those of another job of another one. Where each has a
    file of its own for what it prints, each file is to hold the error.
    """
    descriptor = lasting_descriptor(sys.stderr)
    place = ""
    with contextlib.suppress(OSError):  # where there is none, nothing is printed there
        status = os.fstat(STDERR if descriptor is None else descriptor)
        if descriptor not in (None, STDERR) or stat.S_ISREG(status.st_mode):
            place = f"{status.st_dev}:{status.st_ino}"
    job = f"{os.getuid()}:{os.getppid()}:{os.environ.get('PMIX_NAMESPACE')}"
    return b"\0mpidist-" + hashlib.sha256(f"{job}\n{place}\n{key}".encode(errors="replace")).hexdigest().encode()


def _listen(address: bytes) -> socket.socket | None:
    """Return a socket of that name; None if another rank has it, or there can be none."""
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
    """Yield the ranks that come, and put what they wait at into ``connections``."""
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
    """Whether the rank that has this name prints the error and names this rank; comes back when it has.

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
    """Whether the process at the other end is; the names are open to all users of a machine."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(packed)[1]
    return user == os.getuid()
