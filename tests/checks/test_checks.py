"""The checks themselves: parts beside each other, time limits, leftovers, the summary, and the share of a commit."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.checks import library_parts, long, parts
from tests.checks.__main__ import alone_in, announcement
from tests.checks.parts import Part
from tests.checks.runner import Done, run_parts
from tests.checks.summary import end_of_log, line_of, summary
from tests.support import speed
from tests.support.ranks.jobs import ROOT
from tests.support.speed import scaled

pytestmark = pytest.mark.one_rank
CORES = sorted(os.sched_getaffinity(0))


def program(name: str, source: str, seconds: float = 60.0, takes_all_cores: bool = False) -> Part:
    return Part(name, [sys.executable, "-c", source], takes_all_cores, is_pytest=False, seconds=seconds)


def run(folder: Path, *chosen: Part) -> dict[str, Done]:
    return {done.part.name: done for done in run_parts(chosen, folder, lambda done: None)}


@pytest.mark.jobs
def test_parts_have_a_core_each_or_all(tmp_path: Path) -> None:
    show = "import os; print(sorted(os.sched_getaffinity(0)))"
    found = run(tmp_path, program("one", show), program("other", show), program("whole", show, takes_all_cores=True))
    shown = {name: json.loads(done.log.read_text()) for name, done in found.items()}
    assert shown["whole"] == CORES
    assert len(shown["one"]) == 1
    assert shown["one"] != shown["other"] or len(CORES) == 1


@pytest.mark.jobs
def test_what_fails_and_what_takes_too_long(tmp_path: Path) -> None:
    begin = time.monotonic()
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])"
    found = run(
        tmp_path,
        program("fails", "print('why'); raise SystemExit(3)"),
        program("hangs", f"{child}; import time; print('began', flush=True); time.sleep(100)", seconds=1.0),
    )
    assert time.monotonic() - begin < scaled(30)
    assert (found["fails"].status, found["hangs"].status) == (3, None)
    assert all(done.has_failed for done in found.values())
    assert "FAILED (3)" in line_of(found["fails"])
    assert "TOO LATE" in line_of(found["hangs"])
    assert "why" in end_of_log(found["fails"])
    assert found["hangs"].log.read_text() == "began\n"


@pytest.mark.jobs
def test_limits_grow_with_the_slowness_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(speed.VARIABLE, "100")
    assert not run(tmp_path, program("slow", "import time; time.sleep(0.5)", seconds=0.1))["slow"].has_failed
    assert speed.deadlines(2, 1) == {"MPIDIST_TIMEOUT": "200", "MPIDIST_WARN_AFTER": "1"}
    assert announcement("test").endswith("; expect about 1100 minutes")


@pytest.mark.jobs
def test_processor_time_of_children_counts(tmp_path: Path) -> None:
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    found = run(tmp_path, program("busy", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"))
    assert found["busy"].cpu_seconds > 0.5


@pytest.mark.jobs
def test_the_summary_of_a_session(tmp_path: Path) -> None:
    (tmp_path / "test_toy.py").write_text(
        "import time, pytest\n"
        "def test_slow(): time.sleep(0.3)\n"
        "def test_wrong(): assert 0, 'no good'\n"
        "@pytest.mark.skip(reason='no GPU')\n@pytest.mark.parametrize('x', [1, 2])\ndef test_skipped(x): pass\n"
    )
    options = ["-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest", "-p", "no:cacheprovider"]
    (done,) = run_parts([parts.one_rank("toy", [str(tmp_path)], *options)], tmp_path / "out", lambda done: None)
    text = summary([done], 12.0)
    slowest = text.partition("Slowest tests")[2].splitlines()[1]
    assert "test_slow" in slowest
    assert slowest.endswith("(toy)")
    assert "    2  no GPU" in text
    assert text.endswith("tests: 1 passed, 1 failed, 2 skipped")
    assert "no good" in end_of_log(done)


def test_every_test_file_is_in_one_part() -> None:
    grouped = [path for paths in parts.GROUPS.values() for path in paths]
    assert len(set(grouped)) == len(grouped)
    for path in grouped:
        assert (ROOT / path).exists(), path


def test_a_share_is_decided_by_the_hash_and_each_long_part_is_in_one() -> None:
    names = [part.name for part in long.everything()]
    assert sorted(name for share in long.SHARES for name in share) == sorted(names)
    commits = [f"{number:040x}" for number in range(len(long.SHARES))]
    assert [long.share_of(commit) for commit in commits] == long.SHARES


@pytest.mark.parametrize("library", library_parts.LIBRARIES)
def test_each_part_with_a_library_is_in_one_share(library: str) -> None:
    names = [part.name for part in library_parts.LIBRARIES[library]()]
    shares = [share.names for share in library_parts.SHARES if share.library == library]
    assert sorted(name for share in shares for name in share) == sorted(names)


def test_a_share_of_those_with_a_library_is_in_that_of_every_commit() -> None:
    assert len({part.name for part in long.share()} & library_parts.LIBRARIES.keys()) == 1


@pytest.mark.jobs
def test_a_library_is_left_out_with_a_reason_where_pip_has_no_wheel(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.checks.wheels", "no-such-wheel==0", sys.executable, "-c", "print('ran')"]
    part = Part("torch", command, environment={"PIP_NO_INDEX": "1"}, is_pytest=False)
    (done,) = run_parts([part], tmp_path, lambda done: None)
    assert not done.has_failed
    assert "not tested: pip has no wheels of no-such-wheel==0 for Python 3." in line_of(done)
    assert "ran" not in done.log.read_text().split()


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    with alone_in(folder), pytest.raises(SystemExit, match="other checks are running"), alone_in(folder):
        pass
    with alone_in(folder):
        assert folder.is_dir()
