"""Tries a fault: a folder, a seed, and whatever goes wrong told as an outcome."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.chaos.faults import FAULTS
from tests.chaos.job import NotReachedError
from tests.chaos.report import FAILED, Outcome
from tests.chaos.trial import FailedError, Reference, Trial


def try_fault(name: str, seed: int, reference: Reference, folder: Path, is_short: bool) -> Outcome:
    """Try fault ``name`` once; what it wrote stays in ``folder`` where it failed."""
    fault = FAULTS[name]
    own = folder / f"{name}-{seed}"
    own.mkdir()
    try:
        found = fault.inject(Trial(own, seed, name, reference, fault.ranks, is_short))
    except (FailedError, NotReachedError) as error:
        return Outcome(name, seed, FAILED, f"{error}\n(its files: {own})")
    shutil.rmtree(own)
    return Outcome(name, seed, found.outcome, found.detail, found.lost, found.seconds)
