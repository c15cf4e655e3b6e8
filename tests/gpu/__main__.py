"""Runs the parts of tests/gpu one by one, each under a time limit: ``python -m tests.gpu [--out FOLDER] [PART ...]``.

Prints a table at the end, and writes it with the machine's description as JSON, after each part. The status is 1 if a
part failed, ran out of time or ran nothing without a reason, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.measuring.machine import describe_gpu
from tests.gpu import machine
from tests.support.ranks.jobs import mpirun_command

ROOT = Path(__file__).resolve().parents[2]
# Part -> seconds; with the jobs of `make bench-gpu` half an hour. Ranks that share a GPU take it in turns: milliseconds
# for each call of NCCL.
PARTS = {"kernels": 240, "cupy_ops": 60, "nccl": 270, "collectives": 390, "training": 200, "torch": 100}
_NEXT = 'next: make bench-gpu   (docs/gpu.md, "The first hour on a GPU")'
_GRACE_SECONDS = 10.0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; all by default")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder of tests.json (out/gpu)")
    parser.add_argument("--seconds", type=float, help="limit of each part; by default as the parts need")
    given = parser.parse_args(arguments)
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown parts {', '.join(unknown)}; expected some of {', '.join(PARTS)}")
    problem = machine.problem() or _launcher_problem()
    if problem is not None:
        print(f"make test-gpu: nothing was run: {problem}", file=sys.stderr)
        return 2
    described = describe()
    print(json.dumps(described, indent=1), flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    for part in given.parts or PARTS:
        results.append(run_part(part, given.seconds or PARTS[part], given.out))
        (given.out / "tests.json").write_text(json.dumps({"machine": described, "parts": results}, indent=1) + "\n")
    print(table(results))
    print(f"written: {given.out / 'tests.json'}")
    print(verdict(results))
    return int(any(result["outcome"] not in ("passed", "skipped") for result in results))


def verdict(results: list[dict[str, Any]]) -> str:
    """Return the last lines.

    >>> print(verdict([{"part": "torch", "outcome": "skipped", "skipped": 4}]))
    make test-gpu: passed but for what was skipped, see above; nothing was run of: torch
    next: make bench-gpu   (docs/gpu.md, "The first hour on a GPU")
    """
    failed = [result["part"] for result in results if result["outcome"] not in ("passed", "skipped")]
    nothing = [result["part"] for result in results if result["outcome"] == "skipped"]
    if failed:
        return f'make test-gpu: FAILED: {", ".join(failed)}; docs/gpu.md, "The first hour on a GPU", says what to do'
    skips = any(result["skipped"] for result in results)
    what = "passed but for what was skipped, see above" if skips else "everything passed"
    return f"make test-gpu: {what}{'; nothing was run of: ' if nothing else ''}{', '.join(nothing)}\n{_NEXT}"


def _launcher_problem() -> str | None:
    try:
        mpirun_command()
    except FileNotFoundError as error:
        return str(error)
    return None


def describe() -> dict[str, Any]:
    """Return what the results depend on."""
    from mpi4py import MPI

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **describe_gpu(),
        "mpi": MPI.Get_library_version().splitlines()[0].strip(" \0"),
        "python": sys.version.split()[0],
        "stand_in": machine.is_stand_in(),
    }


def run_part(part: str, seconds: float, out: Path) -> dict[str, Any]:
    """Run one part as a pytest of its own; what it starts ends with it."""
    report = out / f"{part}.xml"
    report.unlink(missing_ok=True)
    file = Path("tests", "gpu", f"test_{part}.py")
    print(f"\n--- {part}: {file}, at most {seconds:.0f} s", flush=True)
    # Warnings of the GPU's own software are no errors of these tests.
    options = ["-q", "-ra", "-W", "default", "-p", "no:cacheprovider", f"--junitxml={report}", str(file)]
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options], cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        status: int | None = process.wait(seconds)
    except subprocess.TimeoutExpired:
        status = None
        _end(process)
    counts = _counts(report)
    if status is None:
        outcome = "out of time"
    elif status not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        outcome = "failed"
    elif counts["passed"]:
        outcome = "passed"
    else:
        outcome = "skipped" if counts["skipped"] else "ran nothing"
    return {"part": part, "outcome": outcome, "seconds": round(time.monotonic() - start, 1), **counts}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a pytest: first so that it ends its jobs."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_GRACE_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


def _counts(report: Path) -> dict[str, Any]:
    """Return how many tests passed, failed and were skipped, and why the latter."""
    if not report.exists():
        return {"passed": 0, "failed": 0, "skipped": 0, "reasons": []}
    cases = list(ElementTree.parse(report).iter("testcase"))
    skipped = [case.find("skipped") for case in cases if case.find("skipped") is not None]
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    reasons = sorted({str(skip.get("message")) for skip in skipped if skip is not None})
    return {
        "passed": len(cases) - failed - len(skipped),
        "failed": failed,
        "skipped": len(skipped),
        "reasons": reasons,
    }


def table(results: list[dict[str, Any]]) -> str:
    """Return the results as text.

    >>> print(table([{"part": "nccl", "outcome": "passed", "passed": 6, "failed": 0, "skipped": 1, "seconds": 31.0,
    ...               "reasons": ["needs two GPUs"]}]))
    <BLANKLINE>
    part         outcome      passed  failed  skipped  seconds
    nccl         passed            6       0        1     31.0
      skipped: needs two GPUs
    """
    lines = ["", f"{'part':<12} {'outcome':<12} {'passed':>6} {'failed':>7} {'skipped':>8} {'seconds':>8}"]
    for result in results:
        counts = f"{result['passed']:>6} {result['failed']:>7} {result['skipped']:>8} {result['seconds']:>8}"
        lines.append(f"{result['part']:<12} {result['outcome']:<12} {counts}")
        lines += [f"  skipped: {reason}" for reason in result["reasons"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
