"""Judging: whether a run of pytest has seen a fault, from its exit status and its output."""

from __future__ import annotations

import re
from dataclasses import dataclass

PASSED, FAILED = 0, 1
# The exit statuses with which pytest says that it did not come to run the tests, or not all of them.
_NO_TESTS = {
    2: "pytest was interrupted, or could not import the tests",
    4: "pytest was started with wrong arguments",
    5: "pytest found no tests",
}
_FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::\w+)*(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)
# What tests.support.ranks.sessions and faulthandler say where a rank does not come to the end of its test.
_HANG = re.compile(r"never finished tests/|^Timeout \(\d+:\d\d:\d\d", re.MULTILINE)
_ANY_TEST = re.compile(r"tests/(?:\w+/)*test_\w+\.py(?:::\w+(?:\[[^\]\s]*\])?)?")


class RunError(Exception):
    """A run says nothing of its fault: the tests were not run, or took too long."""


@dataclass(frozen=True)
class Sighting:
    """The judgement of one run: whether and how (failed, hang or crash) tests saw the fault, and which one."""

    seen: bool
    how: str = ""
    test: str = ""


def judge(status: int | None, output: str) -> Sighting:
    """Judge a run by its exit status (None at the time limit) and its output.

    Raises:
        RunError: No test was run, or the tests took too long without a sign of a hang.
    """
    if status == PASSED:
        return Sighting(False)
    if status in _NO_TESTS or "INTERNALERROR>" in output:
        what = _NO_TESTS.get(status or 0, "pytest itself failed")
        raise RunError(f"{what} (status {status}):\n{output[-2000:]}")
    failure = _FIRST_FAILURE.search(output)
    if status == FAILED and failure is not None:
        return Sighting(True, "failed", failure[1])
    # pytest could not print a summary: it hung, or a rank was ended and the others with it.
    named = _ANY_TEST.findall(output)
    if not named:
        what = "no test failed within the time limit" if status is None else "no test was run"
        raise RunError(f"{what} (status {status}):\n{output[-2000:]}")
    if status is None:
        return Sighting(True, "hang", named[-1])
    return Sighting(True, "hang" if _HANG.search(output) else "crash", named[-1])
