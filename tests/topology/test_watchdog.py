"""The watchdog: its outputs when a stage takes too long, and when the process ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.ranks.jobs import ROOT, child_environment
from tests.support.speed import scaled

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

WATCHED = """
import os, signal, time
from mpidist.topology.watchdog import Stage, Watchdog
with Watchdog() as watch:
    watch.begin([Stage(0.1, ("", "slow\\n")), Stage({seconds}, ("late\\n", "too late\\n"))], ("end\\n", "ended\\n"))
    {then}
print("continued")
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("seconds", "then", "expected"),
    [
        (0.2, "time.sleep(50)", (-9, "late\n", "slow\ntoo late\n")),
        (50, f"time.sleep(0.5); {KILL}", (-9, "end\n", "slow\nended\n")),
        # A launcher's signals go to the whole group of a rank.
        (50, "time.sleep(0.5); os.kill(0, signal.SIGTERM)", (-15, "end\n", "slow\nended\n")),
        (50, "watch.begin([])", (0, "continued\n", "")),
        (50, "watch.begin([], ('idle\\n', '')); time.sleep(0.5)", (0, "continued\nidle\n", "")),
        (50, f"watch.begin([]); {KILL}", (-9, "", "")),
    ],
    ids=["too long", "killed", "terminated", "idle", "idle with an output", "killed while idle"],
)
def test_outputs_of_the_watchdog(seconds: float, then: str, expected: tuple[int, str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED.format(seconds=seconds, then=then)],
        env=child_environment({"PYTHONPATH": str(ROOT)}),
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
        start_new_session=True,
    )
    lines = "".join(sorted(done.stdout.splitlines(keepends=True)))
    assert (done.returncode, lines, done.stderr) == expected
