"""A plugin of pytest that writes what became of each test, for the summary of ``python -m tests.checks``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.ranks import jobs


class Results:
    """Writes seconds, outcome and reason of every test, and the second chances that launchers got.

    Args:
        path: The JSON file; its folder is there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, dict[str, object]] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that is skipped as a whole, where it is imported."""
        if report.skipped:
            self._tests[report.nodeid] = {"seconds": 0.0, "outcome": "skipped", "reason": _reason(report)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self._tests.setdefault(report.nodeid, {"seconds": 0.0, "outcome": "passed", "reason": ""})
        found["seconds"] = float(str(found["seconds"])) + report.duration
        if report.failed or (report.skipped and found["outcome"] == "passed"):
            found["outcome"], found["reason"] = report.outcome, _reason(report)

    def pytest_sessionfinish(self) -> None:
        told = {"tests": self._tests, "second_chances": jobs.second_chances}
        self._path.write_text(json.dumps(told))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}"
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
