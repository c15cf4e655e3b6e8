"""The checks themselves: a run of parts with its summary, and the choice of parts by commit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.checks import library_parts, long, parts
from tests.checks.__main__ import alone_in
from tests.checks.parts import Part
from tests.checks.runner import run_parts
from tests.checks.summary import end_of_log, line_of, summary
from tests.support.ranks.jobs import ROOT

pytestmark = pytest.mark.one_rank

TOY = """
import pytest
def test_wrong(): assert 0, 'no good'
@pytest.mark.skip(reason='no GPU')
@pytest.mark.parametrize('x', [1, 2])
def test_skipped(x): pass
"""
HANGS = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])"


@pytest.mark.jobs
def test_parts_run_and_are_summarized(tmp_path: Path) -> None:
    (tmp_path / "test_toy.py").write_text(TOY)
    options = ["-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest"]
    missing = [sys.executable, "-m", "tests.checks.wheels", "no-such-wheel==0", "false"]
    chosen = [
        parts.one_rank("toy", [str(tmp_path)], *options),
        Part("fails", [sys.executable, "-c", "print('why'); raise SystemExit(3)"], is_pytest=False),
        Part("hangs", [sys.executable, "-c", f"{HANGS}; time.sleep(100)"], is_pytest=False, seconds=1.0),
        Part("no wheel", missing, environment={"PIP_NO_INDEX": "1"}, is_pytest=False),
    ]
    with alone_in(tmp_path / "out") as folder:
        with pytest.raises(SystemExit, match="other checks are running"), alone_in(folder):
            pass
        done = {each.part.name: each for each in run_parts(chosen, folder, lambda done: None)}
    assert [done[part.name].status for part in chosen] == [1, 3, None, 0]
    assert "FAILED (3)" in line_of(done["fails"])
    assert "why" in end_of_log(done["fails"])
    assert "TOO LATE" in line_of(done["hangs"])
    assert "not tested: pip has no wheels of no-such-wheel==0 for Python 3." in line_of(done["no wheel"])
    assert "no good" in end_of_log(done["toy"])
    text = summary([done["toy"]], 12.0)
    assert "    2  no GPU" in text
    assert text.endswith("tests: 0 passed, 1 failed, 2 skipped")


def test_each_part_is_in_one_share() -> None:
    grouped = [path for paths in parts.GROUPS.values() for path in paths]
    assert len(set(grouped)) == len(grouped)
    assert [path for path in grouped if not (ROOT / path).exists()] == []
    assert sorted(name for share in long.SHARES for name in share) == sorted(part.name for part in long.everything())
    assert [long.share_of(f"{number:040x}") for number in range(len(long.SHARES))] == long.SHARES
    for library, found in library_parts.LIBRARIES.items():
        shares = [share.names for share in library_parts.SHARES if share.library == library]
        assert sorted(name for share in shares for name in share) == sorted(part.name for part in found())
