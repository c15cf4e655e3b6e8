"""The summary of a run: time per part, slowest tests, second chances, and reasons of skips."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.checks.runner import Done
from tests.support.ranks import jobs

_SLOWEST = 15
_LINES_OF_A_FAILURE = 200


def line_of(done: Done) -> str:
    """Return a line about a part that has ended."""
    state = "TOO LATE" if done.status is None else f"FAILED ({done.status})" if done.has_failed else "ok"
    if ran_nothing(done):
        state = "NOT TESTED"
    took = f"{done.wall_seconds:6.1f} s {done.cpu_seconds:6.1f} CPU s"
    return f"{done.part.name:<20} {state:<12} {took}   {last_line(done)}"


def ran_nothing(done: Done) -> bool:
    """Whether all tests of a part were skipped."""
    if not done.part.is_pytest or done.has_failed or not done.results.exists():
        return False
    tests = json.loads(done.results.read_text())["tests"].values()
    return all(found["outcome"] == "skipped" for found in tests)


def last_line(done: Done) -> str:
    """Return the last non-empty line of a part's log, or the line with the counts of tests."""
    lines = [line.strip(" =") for line in done.log.read_text(errors="replace").splitlines() if line.strip(" =-")]
    counted = [line for line in lines if " passed" in line or " failed" in line]
    return (counted or lines or [""])[-1]


def end_of_log(done: Done) -> str:
    """Return the end of a failed part's log."""
    lines = done.log.read_text(errors="replace").splitlines()
    left_out = len(lines) - _LINES_OF_A_FAILURE
    head = [f"... {left_out} lines before these are in {done.log}"] if left_out > 0 else []
    return "\n".join([f"--- {done.part.name} ---", *head, *lines[-_LINES_OF_A_FAILURE:]])


def summary(all_done: Sequence[Done], seconds: float) -> str:
    """Return the summary of a run that took some seconds."""
    told = {done.part.name: json.loads(done.results.read_text()) for done in all_done if done.results.exists()}
    tests = [(name, test, found) for name, part in told.items() for test, found in part["tests"].items()]
    outcomes = Counter(found["outcome"] for _, _, found in tests)
    counts = ", ".join(f"{outcomes[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
    cpu = sum(done.cpu_seconds for done in all_done)
    parts = [
        ("Parts", [line_of(done) for done in sorted(all_done, key=lambda done: -done.wall_seconds)]),
        ("Slowest tests", _slowest(tests)),
        ("Second chances, for launchers that crashed by themselves", [*_second_chances(told), *jobs.second_chances]),
        ("Skipped", _skipped(tests)),
    ]
    text = [f"\n{title}\n" + "\n".join(f"  {line}" for line in lines or ["none"]) for title, lines in parts]
    left_out = [f"!! NOT TESTED: {done.part.name}" for done in all_done if ran_nothing(done)]
    return "\n".join([*text, "", f"{seconds:.0f} s, {cpu:.0f} CPU s", f"tests: {counts}", *left_out])


def _slowest(tests: list[tuple[str, str, Any]]) -> list[str]:
    slowest = sorted(tests, key=lambda test: -test[2]["seconds"])[:_SLOWEST]
    return [f"{found['seconds']:6.1f} s  {test}   ({part})" for part, test, found in slowest]


def _second_chances(told: dict[str, Any]) -> list[str]:
    return [f"{chance}   ({name})" for name, part in told.items() for chance in part["second_chances"]]


def _skipped(tests: list[tuple[str, str, Any]]) -> list[str]:
    skipped = [found["reason"] for _, _, found in tests if found["outcome"] == "skipped"]
    reasons = Counter(reason.removeprefix("Skipped: ") for reason in skipped)
    return [f"{count:5d}  {reason}" for reason, count in reasons.most_common()]
