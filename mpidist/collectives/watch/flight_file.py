"""Flight file: the last collectives of one rank, kept in a file that survives whatever ends the process.

The file is mapped into memory and used as a ring: writing an entry is a copy, and what was written is there after
kill -9 too. ``python -m mpidist flight DIR`` reads the files of all ranks.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpidist.collectives.channel.observers import Observer
from mpidist.collectives.channel.operation import Operation
from mpidist.core.callsite import user_call_site
from mpidist.core.files import folder_to_write, replacing
from mpidist.core.settings import FLIGHT_RECORD

ENTRIES = 1000
RUNNING, DONE, FAILED = range(3)
_HEAD_BYTES = 512
# Serial number (0: nothing yet), number on the communicator, wall clock at begin and end, state, lengths of the texts.
_ENTRY = struct.Struct("<QQddBHHH")
_TEXTS = (80, 280, 100)
_ENTRY_BYTES = _ENTRY.size + sum(_TEXTS)
_FORMAT = "mpidist flight record 1"


@dataclass(frozen=True)
class Entry:
    """One collective of one rank.

    Args:
        serial: Counts all collectives of the rank.
        number: Counts those of the communicator, in the order in which they are carried out.
        begin: Seconds of the wall clock of the host.
        end: The same; 0 if it had not ended.
        state: ``RUNNING``, ``DONE`` or ``FAILED``.
        communicator: Its name.
        text: What it is.
        call_site: Line of the program that issued it.
    """

    serial: int
    number: int
    begin: float
    end: float
    state: int
    communicator: str
    text: str
    call_site: str


@dataclass(frozen=True)
class Flight:
    """What the file of one rank holds.

    Args:
        rank: Of the world.
        ranks: How many there are.
        host, process: Of the rank.
        entries: In the order in which they were begun.
    """

    rank: int
    ranks: int
    host: str
    process: int
    entries: list[Entry]


class FlightFile:
    """The file of this process, which it writes.

    Args:
        folder: Where it goes; made if need be. What an earlier job left there under this name is replaced.
        rank, ranks: Of the world.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int, ranks: int) -> None:
        path = path_of(folder, rank)
        head = {"format": _FORMAT, "rank": rank, "ranks": ranks, "host": socket.gethostname(), "process": os.getpid()}
        size = _HEAD_BYTES + ENTRIES * _ENTRY_BYTES
        with folder_to_write(folder, FLIGHT_RECORD.name), replacing(path) as descriptor:
            # Room that is not there now would end the process by SIGBUS later.
            os.posix_fallocate(descriptor, 0, size)
            self._memory = mmap.mmap(descriptor, size)
            self._memory[:_HEAD_BYTES] = json.dumps(head).encode().ljust(_HEAD_BYTES)
        self._serial = 0

    def begin(self, communicator: str, number: int, text: str, call_site: str) -> int:
        """Write down that a collective begins, and return its serial number."""
        self._serial = serial = self._serial + 1
        texts = [_cut(communicator, _TEXTS[0]), _cut(text, _TEXTS[1]), _cut(call_site, _TEXTS[2], keep_end=True)]
        packed = _ENTRY.pack(serial, number, time.time(), 0.0, RUNNING, *map(len, texts)) + b"".join(texts)
        at = self._at(serial)
        self._memory[at : at + len(packed)] = packed
        return serial

    def end(self, serial: int, failed: bool) -> None:
        """Write down that it has ended."""
        at = self._at(serial)
        found: tuple[Any, ...] = _ENTRY.unpack_from(self._memory, at)
        if found[0] == serial:
            _ENTRY.pack_into(self._memory, at, *found[:3], time.time(), FAILED if failed else DONE, *found[5:])

    def _at(self, serial: int) -> int:
        return _HEAD_BYTES + (serial - 1) % ENTRIES * _ENTRY_BYTES


class FlightObserver(Observer):
    """Writes down the collectives of one channel.

    Args:
        file: Of this process.
        name: Of the communicator, the same on all its ranks and no other's.
    """

    def __init__(self, file: FlightFile, name: str) -> None:
        self._file = file
        self._name = name
        self._number = self._serial = 0

    def issued(self, operation: Operation[Any]) -> None:
        """See ``Observer``."""
        if operation.call_site is None:
            operation.call_site = user_call_site()

    def began(self, operation: Operation[Any]) -> None:
        """See ``Observer``."""
        self._number += 1
        self._serial = self._file.begin(self._name, self._number, operation.text, operation.call_site or "")

    def ended(self, operation: Operation[Any]) -> None:
        """See ``Observer``."""
        self._file.end(self._serial, failed=operation.error is not None)


def path_of(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of a rank's file.

    >>> path_of("out", 3).name
    'flight-rank-0003.bin'
    """
    return Path(folder, f"flight-rank-{rank:04d}.bin")


def read_flight(path: Path) -> Flight:
    """Return what a file holds.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no flight file.
    """
    content = path.read_bytes()
    try:
        head = json.loads(content[:_HEAD_BYTES])
        known = head["format"] == _FORMAT and len(content) == _HEAD_BYTES + ENTRIES * _ENTRY_BYTES
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise ValueError(
            f"{path} is no flight record of this version of mpidist; expected what MPIDIST_FLIGHT_RECORD wrote"
        )
    entries = []
    for at in range(_HEAD_BYTES, len(content), _ENTRY_BYTES):
        serial, number, begin, end, state, *lengths = _ENTRY.unpack_from(content, at)
        if serial == 0:
            continue
        texts, place = [], at + _ENTRY.size
        for length in lengths:
            texts.append(content[place : place + length].decode(errors="replace"))
            place += length
        entries.append(Entry(serial, number, begin, end, state, *texts))
    entries.sort(key=lambda entry: entry.serial)
    return Flight(head["rank"], head["ranks"], head["host"], head["process"], entries)


def _cut(text: str, size: int, keep_end: bool = False) -> bytes:
    data = text.encode()
    return data[-size:] if keep_end else data[:size]
