"""The benchmarks between nodes look first whether all hosts see the folder of the results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.suite import cluster_jobs

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

# A launcher for one host of its own, and others that have another file system.
LAUNCHER = """#!/bin/sh
case "$*" in
  *"sh -c"*) while [ "$1" != sh ]; do shift; done; "$@"; {others};;
  *) echo a job was started; exit 3;;
esac
"""


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ("echo cannot-see node3; echo cannot-see node2", r"^node2, node3 cannot see \S*/results, .*BENCH_OUT=DIR"),
        ("echo no such host; exit 1", r"(?s)^no program starts on a, b, c, d: status 1\n.*no such host"),
        (":", "(?s)^no job has left results:.*a job was started"),
    ],
)
def test_a_folder_that_hosts_do_not_see_is_said_before_the_first_job(
    others: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    launcher = tmp_path / "mpirun"
    launcher.write_text(LAUNCHER.format(others=others))
    launcher.chmod(0o755)
    monkeypatch.setenv("MPIRUN", str(launcher))
    with pytest.raises(SystemExit, match=says):
        cluster_jobs.main(["--hosts", "a,b,c,d", "--out", str(tmp_path / "results")])
    assert ("# job 0" in capfd.readouterr().out) == (others == ":")
