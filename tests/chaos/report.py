"""What came of the trials: a line for each, a table, and JSON."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.measuring.machine import cpu_model
from mpidist.topology import import_mpi

FAILED = "FAILED"


@dataclass(frozen=True)
class Outcome:
    """One trial.

    Attributes:
        fault: Its name.
        seed: With which it can be repeated.
        outcome: As in ``Found``, or FAILED.
        detail: What was done; of one that failed, why and what was printed.
        lost: Steps done again.
        seconds: To the first step afterwards.
    """

    fault: str
    seed: int
    outcome: str
    detail: str
    lost: int | None = None
    seconds: float | None = None

    @property
    def line(self) -> str:
        """What is printed of it."""
        lost = "" if self.lost is None else f", {self.lost} steps again"
        seconds = "" if self.seconds is None else f", next step after {self.seconds:.2f} s"
        return f"{self.fault} --seed {self.seed}: {self.outcome}{lost}{seconds} ({self.detail})"


HEAD = ("fault", "tried", "went on", "resumed", "refused", "failed", "steps again", "median s", "worst s")


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Return a row for each fault: how often, how it ended, steps done again at most, and the time to go on."""
    found = []
    for fault in dict.fromkeys(outcome.fault for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.fault == fault]
        lost = [outcome.lost for outcome in own if outcome.lost is not None]
        seconds = [outcome.seconds for outcome in own if outcome.seconds is not None]
        counts = [sum(outcome.outcome == kind for outcome in own) for kind in ("went on", "resumed", "refused", FAILED)]
        found.append(
            (
                fault,
                str(len(own)),
                *map(str, counts),
                str(max(lost)) if lost else "-",
                f"{statistics.median(seconds):.2f}" if seconds else "-",
                f"{max(seconds):.2f}" if seconds else "-",
            )
        )
    return found


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the rows as a table of Markdown."""
    lines = [HEAD, ("---", *["---:"] * (len(HEAD) - 1)), *rows(outcomes)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(path: Path, outcomes: Sequence[Outcome], seed: int, skipped: dict[str, str]) -> None:
    """Write all of it as JSON."""
    described: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "mpi": import_mpi().Get_library_version().splitlines()[0].strip(" \0").split(", package")[0],
        "seed": seed,
        "skipped": skipped,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**described, "trials": [asdict(outcome) for outcome in outcomes]}, indent=1) + "\n")
