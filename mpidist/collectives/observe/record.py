"""Record: rings of fixed-size entries, one for each operation, and the files of a rank.

The flight record is a mapped file. Its entries survive the process. A trace has its ring in private memory and drains
it into JSON. A status file is only a head.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from mpidist.core.concurrency import DaemonThread, wait_at_most
from mpidist.core.files import folder_to_write, open_regular, replacing
from mpidist.core.settings import FLIGHT_RECORD
from mpidist.core.text import names_text, tell_user

T = TypeVar("T")
FORMAT = "mpidist record 3"
HEAD_BYTES = 4096
CALLS, MESSAGES = 1000, 200
"""How many collectives and messages a flight record holds."""
NOTE_BYTES, NAME_BYTES, TEXT_BYTES, LINE_BYTES = 40, 80, 280, 100
# The fields of Entry. The native core has the same layout.
_ENTRY = struct.Struct(f"=5q{NOTE_BYTES}sBBH{NAME_BYTES}s{TEXT_BYTES}s{LINE_BYTES}s")
ENTRY_BYTES = _ENTRY.size
_SERIAL = struct.Struct("=q")
# end, note and state
_END, _END_AT = struct.Struct(f"=q{NOTE_BYTES}sB"), struct.calcsize("=4q")
# How long the program waits for the thread at its end.
END_SECONDS, _POLL_SECONDS = 2.0, 1e-3
clock = time.perf_counter_ns
State = IntEnum("State", ["RUNNING", "DONE", "FAILED"], start=0)
Kind = IntEnum("Kind", ["COLLECTIVE", "MESSAGE", "PHASE", "CHUNK", "WAIT", "QUEUE"], start=0)


class Entry(NamedTuple):
    """One operation, or a part of one."""

    serial: int  # in the ring, from 1
    number: int  # of the collective on its communicator, or of the chunk, or 0
    nbytes: int  # flight records have none
    begin: float  # nanoseconds of ``clock``, in a flight record seconds of the wall clock
    end: float  # 0 while it runs
    note: str  # algorithms, or the type of the error
    state: int
    kind: int
    track: int  # of the trace
    communicator: str
    text: str
    call_site: str


class EntryRing:
    """A ring of entries. A new entry replaces the oldest, or with ``keeps_running`` the oldest that has ended."""

    def __init__(self, memory: memoryview, *, keeps_running: bool = False) -> None:
        self.memory = memory
        self.slots = len(memory) // ENTRY_BYTES
        # Serial number of the newest entry.
        self.serial = 0
        # Reentrant, because a signal handler may call a collective of another communicator.
        self.lock = threading.RLock()
        # Slots of running entries by serial number.
        self._running: dict[int, int] | None = {} if keeps_running else None

    def begin(
        self,
        kind: int,
        number: int,
        communicator: str,
        text: str,
        call_site: str = "",
        *,
        nbytes: int = 0,
        track: int = 0,
        begin: int | None = None,
        end: int = 0,
    ) -> int:
        """Add an entry and return its serial number. Without an end, the entry is running."""
        state = State.DONE if end else State.RUNNING
        began = clock() if begin is None else begin
        name = communicator.encode()
        line = call_site.encode(errors="replace")[-LINE_BYTES:] if call_site else b""
        with self.lock:
            serial = self.serial = self.serial + 1
            slot = (serial - 1) % self.slots
            if self._running is not None:
                busy = set(self._running.values())
                others = ((slot + more) % self.slots for more in range(self.slots))
                slot = next((each for each in others if each not in busy), slot)
                self._running[serial] = slot
            at = slot * ENTRY_BYTES
            fields = serial, number, nbytes, began, end, b"", state, kind, track, name, text.encode(), line
            _ENTRY.pack_into(self.memory, at, *fields)
        return serial

    def finish(self, serial: int, state: int = State.DONE, note: str = "") -> None:
        """Mark an entry as done or failed, unless a newer one has its slot."""
        with self.lock:
            slot = (serial - 1) % self.slots if self._running is None else self._running.pop(serial)
            at = slot * ENTRY_BYTES
            if _SERIAL.unpack_from(self.memory, at)[0] == serial:
                _END.pack_into(self.memory, at + _END_AT, clock(), note.encode(), state)

    def entry(self, serial: int) -> Entry | None:
        """Return an entry, or None if a newer one has its slot. Not for rings with ``keeps_running``."""
        found = _entry_at(self.memory, (serial - 1) % self.slots * ENTRY_BYTES)
        return found if found.serial == serial else None


def _entry_at(memory: bytes | memoryview, at: int) -> Entry:
    *numbers, note, state, kind, track, name, text, call_site = _ENTRY.unpack_from(memory, at)
    return Entry._make([*numbers, _text(note), state, kind, track, _text(name), _text(text), _text(call_site)])


@lru_cache
def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


# Files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """The head of a file."""

    rank: int
    ranks: int
    host: str
    process: int

    def text(self) -> bytes:
        """Return the head as JSON, with the version of the format."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}).encode()


@dataclass(frozen=True)
class FlightHead(Head):
    """The head of a flight record."""

    clock_began: int  # nanoseconds of the wall clock when ``clock`` was 0


class Flight(NamedTuple):
    """The flight record of one rank, with its entries in order of their beginning."""

    head: FlightHead
    entries: list[Entry]


class FlightFile:
    """The flight record of this process, which replaces the file of an earlier job."""

    def __init__(self, folder: str | os.PathLike[str], rank: int, ranks: int) -> None:
        head = FlightHead(rank, ranks, os.uname().nodename, os.getpid(), time.time_ns() - clock())
        nbytes = HEAD_BYTES + (CALLS + MESSAGES) * ENTRY_BYTES
        with folder_to_write(folder, FLIGHT_RECORD.name), replacing(flight_path(folder, rank)) as descriptor:
            if hasattr(os, "posix_fallocate"):
                # A full disk would raise SIGBUS later.
                os.posix_fallocate(descriptor, 0, nbytes)
            else:  # macOS
                os.ftruncate(descriptor, nbytes)
            memory = mmap.mmap(descriptor, nbytes)
            memory[:HEAD_BYTES] = head.text().ljust(HEAD_BYTES)
        entries = memoryview(memory)[HEAD_BYTES:]
        self.calls = EntryRing(entries[: CALLS * ENTRY_BYTES])
        self.messages = EntryRing(entries[CALLS * ENTRY_BYTES :], keeps_running=True)


def flight_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of a rank's file.

    >>> flight_path("out", 3).name
    'flight-rank-0003.bin'
    """
    return Path(folder, f"flight-rank-{rank:04d}.bin")


def read_flight(path: Path) -> Flight:
    """Return the content of a file."""
    head, rings = read_head(path, FlightHead)
    if len(rings) != (CALLS + MESSAGES) * ENTRY_BYTES:
        raise ValueError(f"{path} is incomplete. Copy the whole file")
    entries = []
    for at in range(0, len(rings), ENTRY_BYTES):
        entry = _entry_at(rings, at)
        if entry.serial:
            end = entry.end and (head.clock_began + entry.end) / 1e9
            entries.append(entry._replace(begin=(head.clock_began + entry.begin) / 1e9, end=end))
    entries.sort(key=lambda entry: entry.begin)
    return Flight(head, entries)


def read_flights(folder: str, problems: list[str]) -> Iterator[Flight]:
    """Yield the records of all ranks (see ``read_folder``)."""
    return read_folder(folder, "flight-rank-*.bin", FLIGHT_RECORD.name, read_flight, problems)


def read_head(path: Path, kind: type[T], most_bytes: int = HEAD_BYTES) -> tuple[T, bytes]:
    """Return the head and the rest of a record of this version."""
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        text, rest = file.read(most_bytes), file.read()
    try:
        document = json.loads(text)
        if document["format"] == FORMAT:
            head: T = _checked(document, kind)
            return head, rest
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{path} is not a file of this kind. Name the folder that the job wrote to") from None
    found = f"{document['format']!r}, not {FORMAT!r}"
    raise ValueError(f"{path} has the format {found}. Read it with the mpidist version of the job")


def _checked(value: object, kind: Any) -> Any:
    """Return a dataclass, number or text. Text cannot control the terminal."""
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        fields = {name: _checked(value[name], each) for name, each in get_type_hints(kind).items()}
        return kind(**fields)  # type: ignore[operator]
    if not isinstance(value, (int, float) if kind is float else kind):
        raise TypeError
    return "".join(each if each.isprintable() else "?" for each in value) if isinstance(value, str) else value


def read_folder(
    folder: str | os.PathLike[str], names: str, variable: str, read: Callable[[Path], T], problems: list[str]
) -> Iterator[T]:
    """Yield the files that match ``names`` in rank order, and collect ``problems``.

    Each file is read on demand. Without files, the error names the variable that makes a job write them.
    """
    paths = sorted(Path(folder).glob(names), key=lambda path: (len(path.name), path.name))
    if not paths:
        name = os.fspath(folder)
        raise FileNotFoundError(f"{name} has no {names}. Start the job with {variable}={name}")
    for path in paths:
        try:
            found = read(path)
        except (OSError, ValueError) as error:
            problems.append(str(error))
        else:
            yield found
    if len(problems) == len(paths):
        raise ValueError(names_text(problems))


# Writing in a thread ----------------------------------------------------------------------------------------------


class RankFile:
    """A file of this rank that a thread writes periodically.

    If the file system hangs, only this thread waits, and neither the program nor the service thread.
    """

    def __init__(self, title: str, every: float) -> None:
        self._title = title
        self.every = every  # seconds between two writes
        # Numbers of the last save that was asked for, and of the last one done.
        self._asked = self._done = 0
        self._is_last = self._has_failed = False

    def write(self, is_saving: bool) -> None:
        """Write the file. The program may end after saving.

        Raises:
            OSError: The file cannot be written. The thread prints this once, and retries.
        """
        raise NotImplementedError

    def write_in_thread(self) -> bool:
        """Call ``write``. Return whether it was the last time."""
        asked, is_last = self._asked, self._is_last
        is_saving = asked != self._done
        try:
            self.write(is_saving)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                tell_user(f"{self._title} cannot be written, and the program continues without it: {error}")
        self._done = asked
        return is_saving and is_last

    def save(self, is_last: bool = False) -> bool:
        """Have the thread write now. Return whether that worked in time."""
        self._is_last = is_last
        self._asked += 1
        record_thread.wake()
        wait_at_most(END_SECONDS, lambda: self._done == self._asked, _POLL_SECONDS)
        return self._done == self._asked and not self._has_failed


class RecordThread(DaemonThread[RankFile]):
    """The thread, which runs until all files have been written for the last time."""

    def __init__(self) -> None:
        super().__init__("record")

    def look(self) -> float | None:
        """Write all files."""
        for file in list(self.watched):
            if file.write_in_thread():
                self.forget(file)
        return min((file.every for file in self.watched), default=None)


record_thread = RecordThread()
