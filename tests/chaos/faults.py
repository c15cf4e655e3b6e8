"""The faults that are tried, how often, and what they need."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mpidist.topology import import_mpi
from tests.chaos import file_faults, rank_faults
from tests.chaos.trial import Found, Trial


@dataclass(frozen=True)
class Fault:
    """A fault, and how often it is tried.

    Attributes:
        inject: Starts jobs, harms them, and judges how they end.
        times: In the long form.
        short_times: In the short form.
        ranks: Of its jobs.
        missing: Returns why it cannot be tried here; None where it can.
    """

    inject: Callable[[Trial], Found]
    times: int
    short_times: int
    ranks: int = 4
    missing: Callable[[], str | None] = lambda: None


def _no_ulfm() -> str | None:
    found = re.search(r"Open MPI v(\d+)", import_mpi().Get_library_version())
    if found is not None and int(found[1]) >= 5:
        return None
    return "a job goes on without lost ranks with Open MPI 5 only"


def _no_small_disk() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        return file_faults.no_small_disk(Path(folder, "disk"))


FAULTS = {
    "kill": Fault(rank_faults.kill, 100, 2, missing=_no_ulfm),
    "kill_two": Fault(rank_faults.kill_two, 10, 1, missing=_no_ulfm),
    "kill_at_start": Fault(rank_faults.kill_at_start, 10, 1, missing=_no_ulfm),
    "kill_and_resume": Fault(rank_faults.kill_and_resume, 5, 0),
    "stop": Fault(rank_faults.stop, 5, 1, ranks=3),
    "ask_to_end": Fault(rank_faults.ask_to_end, 10, 1, ranks=3),
    "interrupt": Fault(rank_faults.interrupt, 5, 0, ranks=3),
    "fill_disk": Fault(file_faults.fill_disk, 5, 1, ranks=2, missing=_no_small_disk),
    "damage": Fault(file_faults.damage, 15, 1, ranks=2),
    "use_up_descriptors": Fault(file_faults.use_up_descriptors, 15, 1, ranks=2),
}
