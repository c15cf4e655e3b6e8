"""Pytest plugins: a last resort against hangs, and one outcome of every test on all ranks."""

from __future__ import annotations

import faulthandler
import itertools
import os
import sys
import time
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from _pytest.runner import runtestprotocol

from tests.support.ranks.agreement import Agreement

if TYPE_CHECKING:
    from mpi4py import MPI

# When a test has used up its time T (pytest-timeout), which interrupts Python code but no blocked MPI call:
# at T + REPORT the ranks that wait name those that do not come, at T + EXIT a rank that is still in its test
# dumps its stacks and exits, which ends the job, at T + ABORT a rank that still waits ends it.
REPORT, EXIT, ABORT = 1.0, 2.5, 5.0


def test_seconds(item: pytest.Item) -> float:
    """Return how long pytest-timeout lets ``item`` run, its own rule without the environment variable."""
    marker = item.get_closest_marker("timeout")
    if marker is not None and (marker.args or "timeout" in marker.kwargs):
        return float(marker.args[0] if marker.args else marker.kwargs["timeout"])
    given = item.config.getoption("timeout")
    return float(given if given is not None else item.config.getini("timeout") or 120.0)


class LastResort:
    """Dumps all stacks and ends the process when a test overstays by far, blocked MPI calls included.

    Build it while pytest is not capturing; it keeps the real stderr.
    """

    def __init__(self) -> None:
        self.stderr = os.fdopen(os.dup(2), "w", buffering=1)

    def say(self, line: str) -> None:
        """Print a line on the real stderr."""
        self.stderr.write(f"\n{line}\n")
        self.stderr.flush()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        faulthandler.dump_traceback_later(test_seconds(item) + EXIT, exit=True, file=self.stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()


class OneOutcome:
    """Makes the ranks agree on every test: what fails on one rank fails on all, and rank 0 shows it.

    Args:
        world: All ranks of the session.
        last_resort: Where to print.
    """

    def __init__(self, world: MPI.Comm, last_resort: LastResort) -> None:
        self._last_resort = last_resort
        self._agreement = Agreement(world, last_resort.say)
        self._collect_errors: list[str] = []

    def quiet(self, config: pytest.Config) -> None:
        """Let only rank 0 print; the others' failures reach it through the agreement."""
        if self._agreement.rank != 0:
            config.pluginmanager.unregister(name="terminalreporter")
            # Open until the process ends: pytest writes to it after the last hook.
            nowhere = open(os.devnull, "w")  # noqa: SIM115
            config.pluginmanager.register(pytest.TerminalReporter(config, nowhere), "terminalreporter")

    def _exchange(self, name: str, text: str, seconds: float) -> dict[int, str]:
        """Return the texts of the ranks that have one to tell."""
        limit = time.monotonic() + seconds
        tag = zlib.crc32(name.encode())
        texts = self._agreement.exchange(tag, text, name, limit + REPORT, limit + ABORT)
        return {rank: told for rank, told in enumerate(texts) if told}

    def pytest_report_header(self) -> str:
        return f"ranks: {self._agreement.size}; a test passes where it passes on all of them"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._collect_errors.append(report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Check that all ranks are about to run the same tests in the same order."""
        names = "\n".join(item.nodeid for item in session.items)
        errors = "\n".join(self._collect_errors)
        digest = f"{zlib.crc32(names.encode())} {bool(errors)}"
        if len(set(self._exchange("the end of collection", digest, 60.0).values())) > 1:
            self._stop_at_different(self._exchange("the comparison", f"{names}\n{errors}", 60.0))

    def _stop_at_different(self, told: dict[int, str]) -> None:
        lines = {rank: text.splitlines() for rank, text in told.items()}
        common = set.intersection(*map(set, lines.values()))
        rows = (f"rank {rank}: {line}" for rank in lines for line in lines[rank] if line not in common)
        listing = "\n".join(itertools.islice(rows, 40)) or "the same ones in another order"
        pytest.exit(f"the ranks collected different tests\n{listing}", returncode=2)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        started = time.monotonic()
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        # What follows is not the test any more, and has a deadline of its own.
        item.config.hook.pytest_timeout_cancel_timer(item=item)
        faulthandler.cancel_dump_traceback_later()
        left = started + test_seconds(item) - time.monotonic()
        failures = self._exchange(item.nodeid, _failure_text(reports), max(left, 0.0))
        failures.pop(self._agreement.rank, None)
        if failures:
            self._merge(reports, failures)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _merge(self, reports: list[pytest.TestReport], failures: dict[int, str]) -> None:
        """Write the failures of other ranks into the report that stands for the test."""
        body = [report for report in reports if report.when != "teardown"][-1]
        target = next((report for report in reports if report.failed), body)
        size = self._agreement.size
        if not target.failed:
            here = f"{target.outcome} on rank {self._agreement.rank}"
            target.outcome = "failed"
            target.longrepr = f"{here}, failed on rank {sorted(failures)} of {size}"
            if hasattr(target, "wasxfail"):
                del target.wasxfail
        target.sections.extend((f"the same test on rank {rank}", text) for rank, text in failures.items())

    @pytest.hookimpl(trylast=True)
    def pytest_internalerror(self, excrepr: object) -> None:
        self._agreement.abort(f"rank {self._agreement.rank}: pytest failed\n{excrepr}")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        # The other two are pytest's own ways to stop, which all ranks take alike.
        if not isinstance(excinfo.value, (pytest.exit.Exception, pytest.Session.Interrupted)):
            self._agreement.abort(f"rank {self._agreement.rank}: interrupted")

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Leave together: a rank that exits with an error earlier would cut off what rank 0 still prints."""
        sys.stdout.flush()
        self._exchange("the session", "", 30.0)
        self._agreement.close()


def _failure_text(reports: list[pytest.TestReport]) -> str:
    """Return what a human needs of the failures among ``reports``, empty where there is none."""
    parts = []
    for report in reports:
        if report.failed:
            parts.append(f"{report.when}: {report.longreprtext}")
            parts.extend(f"--- {title} ---\n{content}" for title, content in report.sections)
    return "\n".join(parts)
