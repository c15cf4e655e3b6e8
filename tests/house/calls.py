"""What calls of users cross in the library, counted on two ranks."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.support.ranks.jobs import run_script

_RANK = Path(__file__).with_name("rank.py")
# The data path has rooms of its own, in which a call may cross what it needs.
DATA_PATH = ("node", "channel")


def crossings(checkout: Path) -> dict[str, dict[str, Any]]:
    """Return for ``all_reduce`` of 1 MiB, ``apply_gradients`` in ``run`` and ``save`` of a variable what rank 0 counts.

    Each has ``files``, ``functions``, ``calls`` and ``collectives``.

    Args:
        checkout: Whose ``mpidist`` is counted.
    """
    with tempfile.TemporaryDirectory(prefix="mpidist-house-") as folder:
        # No PYTHONPATH of this checkout: the other one's package comes first.
        done = run_script(_RANK, 2, folder, env={"PYTHONPATH": str(checkout.resolve())}, timeout=120)
        if done.returncode:
            raise RuntimeError(f"the ranks that count ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
        found: dict[str, dict[str, Any]] = json.loads(Path(folder, "found.json").read_text())
    return found


def outside_data_path(files: list[str]) -> list[str]:
    """Return those of ``files`` that lie in no folder of :data:`DATA_PATH`."""
    return [file for file in files if not set(Path(file).parts[:-1]) & set(DATA_PATH)]


def figures(checkout: Path) -> dict[str, int]:
    """Return the numbers of :func:`crossings` as lines of the table."""
    told = {}
    for name, found in crossings(checkout).items():
        if name == "all_reduce":
            told["all_reduce: files outside node/, channel/"] = len(outside_data_path(found["files"]))
        told[f"{name}: files"] = len(found["files"])
        told.update({f"{name}: {kind}": found[kind] for kind in ("functions", "calls", "collectives")})
    return told
