"""Status files: where each rank of a running job is, for ``python -m mpidist top``.

Each rank has one small file of JSON, which is replaced as a whole about once a second.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpidist.core.files import open_regular, replacing
from mpidist.core.text import names_text

RUNNING, ENDED, FAILED = "running", "ended", "failed"
"""The states of a program."""
WAITING, UNDER_WAY, COMPUTING = "waiting", "under way", "computing"
"""The kinds of activity: in an operation; beside one that was started; neither."""
_STATUS_FORMAT = "mpidist status 1"
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Activity:
    """The activity of a rank.

    Args:
        kind: ``WAITING``, ``UNDER_WAY`` or ``COMPUTING``.
        operation: The text of the operation; of the last one where it computes, empty where there was none.
        number: Of that collective on its communicator; 0 for a message.
        communicator: Its name.
        seconds: Since when it is in the operation, or has begun the last one.
        call_site: Line of the program, now.
    """

    kind: str
    operation: str
    number: int
    communicator: str
    seconds: float
    call_site: str


@dataclass(frozen=True)
class Rates:
    """Work per second, of the last seconds.

    Args:
        steps: Calls of ``strategy.run``.
        collectives: Of all communicators.
        nbytes: Of the values that the rank passed into them, and of messages.
    """

    steps: float
    collectives: float
    nbytes: float


@dataclass(frozen=True)
class RankTotals:
    """Work since the program began to communicate; see ``Rates``."""

    steps: int
    collectives: int
    nbytes: int


@dataclass(frozen=True)
class RankReport:
    """The content of one rank's file.

    Args:
        rank, ranks: Of the job.
        job: The same in all files of a job; empty before all ranks have met.
        host, process: Where it runs.
        born: When the process was started, in the kernel's clock ticks; it tells processes of one number apart.
        program: How it was started.
        started, written: Seconds of the wall clock of the host: when the file was begun, and when this was written.
        every: Seconds between two writings.
        state: ``RUNNING``, ``ENDED`` or ``FAILED``.
        error: Of a program that has failed.
        activity, totals, rates: See there.
    """

    rank: int
    ranks: int
    job: str
    host: str
    process: int
    born: int
    program: str
    started: float
    written: float
    every: float
    state: str
    error: str
    activity: Activity
    totals: RankTotals
    rates: Rates


def status_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of a rank's file.

    >>> status_path("status", 3).name
    'status-rank-0003.json'
    """
    return Path(folder, f"status-rank-{rank:04d}.json")


def write_report(folder: str | os.PathLike[str], report: RankReport) -> None:
    """Replace the file of a rank, which its user alone may read.

    Raises:
        OSError: It cannot be written, or is a symbolic link.
    """
    document = {"format": _STATUS_FORMAT, **dataclasses.asdict(report)}
    with (
        replacing(status_path(folder, report.rank), mode=0o600) as descriptor,
        open(descriptor, "wb", closefd=False) as file,
    ):
        file.write(json.dumps(document).encode())


def read_report(path: Path) -> RankReport:
    """Return the content of a file.

    Raises:
        OSError: It cannot be read, or is a symbolic link.
        ValueError: It is no status file.
    """
    descriptor = open_regular(path, os.O_RDONLY)
    with open(descriptor, "rb") as file:
        content = file.read(_MOST_BYTES)
    try:
        document = json.loads(content)
        if document["format"] != _STATUS_FORMAT:
            raise ValueError
        return RankReport(
            **{
                **_fields_of(RankReport, document),
                "activity": Activity(**_fields_of(Activity, document["activity"])),
                "totals": RankTotals(**_fields_of(RankTotals, document["totals"])),
                "rates": Rates(**_fields_of(Rates, document["rates"])),
            }
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(
            f"{path} is no status file of this version of mpidist; expected what MPIDIST_STATUS wrote"
        ) from None


_FIELD_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}


def _fields_of(kind: type, document: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a dataclass, of which numbers and texts are looked at."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        value = document[field.name]
        if field.type in _FIELD_TYPES and not isinstance(value, _FIELD_TYPES[field.type]):
            raise ValueError
        found[field.name] = _printable(value) if isinstance(value, str) else value
    return found


def _printable(text: str) -> str:
    """Return a text that does nothing to a terminal but to be shown.

    >>> _printable("\\x1b[2Jtrain.py")
    '?[2Jtrain.py'
    """
    return "".join(each if each.isprintable() else "?" for each in text)


@dataclass(frozen=True)
class StatusFolder:
    """The files of a folder.

    Args:
        reports: Of the latest job there, in rank order.
        others: How many files are of other jobs.
        problems: Of files that cannot be read.
    """

    reports: list[RankReport]
    others: int
    problems: list[str]


def read_status_folder(folder: str | os.PathLike[str]) -> StatusFolder:
    """Return the reports of the latest job in a folder.

    Raises:
        FileNotFoundError: There is nothing.
        ValueError: Nothing can be read.
    """
    found, problems = [], []
    for path in Path(folder).glob("status-rank-*.json"):
        try:
            found.append(read_report(path))
        except (OSError, ValueError) as error:
            problems.append(str(error))
    if not found and not problems:
        raise FileNotFoundError(
            f"{os.fspath(folder)} holds no status-rank-*.json; start the job with MPIDIST_STATUS={os.fspath(folder)}"
        )
    if not found:
        raise ValueError(names_text(problems))
    latest = max((report for report in found if report.job), key=lambda each: each.started, default=found[0])
    reports = [each for each in found if each.job in (latest.job, "") and each.ranks == latest.ranks]
    reports.sort(key=lambda report: report.rank)
    return StatusFolder(reports, len(found) - len(reports), problems)
