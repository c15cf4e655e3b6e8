"""The flight record: each rank's last collectives, in a file that survives the process.

The file is mapped into memory and used as a ring: writing an entry is a copy, and entries survive kill -9 too.
``python -m mpidist flight DIR`` reads the files of all ranks, and shows how far each has come, and where they went
apart.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpidist.collectives.channel.observers import Observer
from mpidist.collectives.channel.operation import Operation
from mpidist.collectives.node.core import Core
from mpidist.core.files import folder_to_write, replacing
from mpidist.core.settings import FLIGHT_RECORD
from mpidist.core.text import names_text, user_call_site

ENTRIES = 1000
# Of messages, behind those of collectives.
MESSAGES = 200
CALL_RUNNING, CALL_DONE, CALL_FAILED = range(3)
# In place of a number on the communicator: messages come beside the collectives.
MESSAGE = 0
_HEAD_BYTES = 512
# Serial number (0: nothing yet), number on the communicator, wall clock at begin and end, state, lengths of the texts.
_ENTRY = struct.Struct("<QQddBHHH")
_TEXTS = (80, 280, 100)
_ENTRY_BYTES = _ENTRY.size + sum(_TEXTS)
_FILE_BYTES = _HEAD_BYTES + (ENTRIES + MESSAGES) * _ENTRY_BYTES
_FLIGHT_FORMAT = "mpidist flight record 2"


@dataclass(frozen=True)
class FlightEntry:
    """One collective of one rank, or a message.

    Args:
        serial: Counts all collectives of the rank, or all messages.
        number: Counts the collectives of the communicator, in the order in which they are carried out; ``MESSAGE`` for
            a message.
        begin: Seconds of the wall clock of the host.
        end: The same; 0 if it had not ended.
        state: ``CALL_RUNNING``, ``CALL_DONE`` or ``CALL_FAILED``.
        communicator: Its name.
        text: Description of the collective.
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
    """The content of one rank's file.

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
    entries: list[FlightEntry]


class FlightFile:
    """The file of this process, which it writes.

    Args:
        folder: Where it goes; made if need be. A file that an earlier job left there under this name is replaced.
        rank, ranks: Of the world.

    Attributes:
        memory: Of the file.
        serial: The serial number of the last entry.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int, ranks: int) -> None:
        path = flight_path(folder, rank)
        head = {
            "format": _FLIGHT_FORMAT,
            "rank": rank,
            "ranks": ranks,
            "host": socket.gethostname(),
            "process": os.getpid(),
        }
        with folder_to_write(folder, FLIGHT_RECORD.name), replacing(path) as descriptor:
            if hasattr(os, "posix_fallocate"):
                # Room that is not there now would end the process by SIGBUS later.
                os.posix_fallocate(descriptor, 0, _FILE_BYTES)
            else:  # macOS cannot reserve it
                os.ftruncate(descriptor, _FILE_BYTES)
            self.memory = mmap.mmap(descriptor, _FILE_BYTES)
            self.memory[:_HEAD_BYTES] = json.dumps(head).encode().ljust(_HEAD_BYTES)
        self.serial = array("q", [0])
        # Of the last message; the slots of those that are on their way; messages begin in any thread.
        self._messages, self._under_way, self._lock = 0, set[int](), threading.Lock()

    def begin(self, communicator: str, number: int, text: str, call_site: str) -> int:
        """Write down that a collective begins, and return its serial number."""
        self.serial[0] += 1
        serial = self.serial[0]
        self._write((serial - 1) % ENTRIES, serial, number, (communicator, text, call_site))
        return serial

    def end(self, serial: int, failed: bool) -> None:
        """Write down that it has ended."""
        self._end((serial - 1) % ENTRIES, serial, failed)

    def begin_message(self, communicator: str, text: str, call_site: str) -> tuple[int, int]:
        """Write down that a message begins; return its slot and number.

        Messages that are on their way keep theirs, unless there are too many.
        """
        with self._lock:
            serial = self._messages = self._messages + 1
            slots = (ENTRIES + (serial + more) % MESSAGES for more in range(MESSAGES))
            slot = next((slot for slot in slots if slot not in self._under_way), ENTRIES + serial % MESSAGES)
            self._under_way.add(slot)
            self._write(slot, serial, MESSAGE, (communicator, text, call_site))
        return slot, serial

    def end_message(self, slot: int, serial: int, failed: bool) -> None:
        """Write down that it has gone or come, or has failed."""
        with self._lock:
            if self._end(slot, serial, failed):
                self._under_way.discard(slot)

    def _write(self, slot: int, serial: int, number: int, texts: tuple[str, str, str]) -> None:
        communicator, text, call_site = texts
        cut = [_cut(communicator, _TEXTS[0]), _cut(text, _TEXTS[1]), _cut(call_site, _TEXTS[2], keep_end=True)]
        packed = _ENTRY.pack(serial, number, time.time(), 0.0, CALL_RUNNING, *map(len, cut)) + b"".join(cut)
        self.memory[_place(slot) : _place(slot) + len(packed)] = packed

    def _end(self, slot: int, serial: int, failed: bool) -> bool:
        """Write down an end; return whether the slot still has this serial number."""
        found: tuple[float, ...] = _ENTRY.unpack_from(self.memory, _place(slot))
        if found[0] != serial:
            return False
        state = CALL_FAILED if failed else CALL_DONE
        _ENTRY.pack_into(self.memory, _place(slot), *found[:3], time.time(), state, *found[5:])
        return True


def _place(slot: int) -> int:
    return _HEAD_BYTES + slot * _ENTRY_BYTES


class FlightObserver(Observer):
    """Writes the collectives of one channel into the flight record.

    The core writes those that take the short way.

    Args:
        file: Of this process.
        name: Of the communicator, the same on all its ranks and no other's.
        core: Of its node; None where no call takes the short way.
    """

    def __init__(self, file: FlightFile, name: str, core: Core | None) -> None:
        self._file = file
        self._name = name
        # Number on the communicator and serial number of the last collective.
        self._last = array("q", [0, 0])
        # Of messages on their way.
        self._slots: dict[Operation[object], tuple[int, int]] = {}
        if core is not None:
            core.keep_flight(
                memoryview(file.memory)[: _place(ENTRIES)],
                file.serial,
                self._last,
                _cut(name, _TEXTS[0]),
                user_call_site,
            )

    def issued(self, operation: Operation[object]) -> None:
        """See ``Observer``."""
        if operation.call_site is None:
            operation.call_site = user_call_site()

    def began(self, operation: Operation[object]) -> None:
        """See ``Observer``."""
        if operation.is_rest:
            return  # the core has written that down
        self._last[0] += 1
        self._last[1] = self._file.begin(self._name, self._last[0], operation.text, operation.call_site or "")

    def ended(self, operation: Operation[object]) -> None:
        """See ``Observer``."""
        self._file.end(self._last[1], failed=operation.error is not None)

    def message_began(self, operation: Operation[object]) -> None:
        """See ``Observer``."""
        where = operation.call_site or ""
        self._slots[operation] = self._file.begin_message(self._name, operation.text, where)

    def message_ended(self, operation: Operation[object]) -> None:
        """See ``Observer``."""
        self._file.end_message(*self._slots.pop(operation), failed=operation.error is not None)


def flight_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of a rank's file.

    >>> flight_path("out", 3).name
    'flight-rank-0003.bin'
    """
    return Path(folder, f"flight-rank-{rank:04d}.bin")


def read_flight(path: Path) -> Flight:
    """Return the content of a file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no flight file.
    """
    content = path.read_bytes()
    try:
        head = json.loads(content[:_HEAD_BYTES])
        known = head["format"] == _FLIGHT_FORMAT and len(content) == _FILE_BYTES
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
        entries.append(FlightEntry(serial, number, begin, end, state, *texts))
    entries.sort(key=lambda entry: entry.serial)
    return Flight(head["rank"], head["ranks"], head["host"], head["process"], entries)


def _cut(text: str, size: int, keep_end: bool = False) -> bytes:
    data = text.encode()
    return data[-size:] if keep_end else data[:size]


def read_folder(folder: str, left_out: list[str]) -> Iterator[Flight]:
    """Yield the flights in rank order; each is read when its turn comes.

    Args:
        folder: Of the files.
        left_out: Gets the errors of files that cannot be read.

    Raises:
        FileNotFoundError: There are none.
        ValueError: None can be read.
    """
    paths = sorted(Path(folder).glob("flight-rank-*.bin"), key=lambda path: (len(path.name), path.name))
    if not paths:
        raise FileNotFoundError(
            f"{folder} holds no flight-rank-*.bin; run the job with MPIDIST_FLIGHT_RECORD={folder} first"
        )
    for path in paths:
        try:
            flight = read_flight(path)
        except (OSError, ValueError) as error:
            left_out.append(str(error))
        else:
            yield flight
    if len(left_out) == len(paths):
        raise ValueError(names_text(left_out))
