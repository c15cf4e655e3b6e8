"""The table of faults fits the library, and runs of tests are judged rightly; runs none of them."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.mutations import __main__ as program
from tests.mutations.faults import FACADES, FAULTS, Fault
from tests.mutations.judging import RunError, Sighting, judge
from tests.support.ranks.jobs import ROOT

pytestmark = pytest.mark.one_rank


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_the_library(fault: Fault) -> None:
    healthy = Path(ROOT, fault.file).read_text(encoding="utf-8")
    broken = fault.put_into(healthy)
    if fault.file.endswith(".py"):
        compile(broken, fault.file, "exec")
    assert fault.new != fault.old
    assert fault.tests
    assert all(Path(ROOT, test).is_file() for test in fault.tests)
    assert fault.ranks in (1, 2, 3, 4)
    assert fault.ranks_per_node is None or fault.ranks > fault.ranks_per_node


def test_a_text_that_is_not_there_once_is_named() -> None:
    fault = Fault("wrong", "mpidist/nowhere.py", "a\n", "b\n", ())
    for text in ("c\n", "a\na\n"):
        with pytest.raises(ValueError, match=rf"mpidist/nowhere.py has this text {text.count('a')} times.*'a\\n'"):
            fault.put_into(text)


def test_a_fault_that_no_longer_applies_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mpidist" / "text.py"
    file.parent.mkdir()
    file.write_text("a = 1\n")
    stale = Fault("a is 2", "mpidist/text.py", "a = 3\n", "a = 2\n", (NEST,))
    monkeypatch.setattr(program, "FAULTS", (stale, Fault("a is gone", "mpidist/gone.py", "a", "b", (NEST,))))
    monkeypatch.setattr(program, "worktree", lambda commit: nullcontext(tmp_path))
    monkeypatch.setattr(program, "run_tests", lambda fault, tree: pytest.fail("no test is to be run"))
    for name in ("_git", "_check_what_is_imported", "_build_native_core"):
        monkeypatch.setattr(program, name, lambda *_: "0123456789abcdef")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert program.main([]) == 2
    printed = capsys.readouterr().out
    assert "a is 2: ERROR: mpidist/text.py has this text 0 times, expected once" in printed
    assert "a is gone: ERROR: " in printed
    assert "0 of 2 faults were seen" in printed
    assert file.read_text() == "a = 1\n"


def test_names_differ() -> None:
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []


def test_every_room_has_three() -> None:
    layers = {path.parent.name for path in Path(ROOT, "mpidist").glob("*/__init__.py")}
    rooms = (layers - {"v1", "experimental"}) | {FACADES}
    counts = Counter(fault.room for fault in FAULTS)
    assert counts.keys() == rooms
    assert min(counts.values()) >= 3


NEST = "tests/core/test_nest.py"
JOBS = "tests/support/ranks/sessions.py"
FAILURE = f"FAILED {NEST}::test_map[a - b] - AssertionError: 1 != 2\n1 failed in 0.1s\n"


@pytest.mark.parametrize(
    ("status", "output", "sighting"),
    [
        (0, "3 passed in 0.1s\n", Sighting(False)),
        (1, FAILURE, Sighting(True, "failed", f"{NEST}::test_map[a - b]", "AssertionError: 1 != 2")),
        (1, f"ERROR {NEST}::test_map\n", Sighting(True, "failed", f"{NEST}::test_map")),
        (None, f'File "/tree/{NEST}", line 3', Sighting(True, "hang", NEST, "ended at the time limit")),
        (
            3,
            f"rank [0] never finished {NEST}::test_a",
            Sighting(True, "hang", f"{NEST}::test_a", "ended with status 3"),
        ),
        (-11, f'File "/tree/{NEST}", line 3', Sighting(True, "crash", NEST, "ended with status -11")),
        # Around the test is what runs it.
        (139, f'File "/tree/{NEST}"\nFile "/tree/{JOBS}"', Sighting(True, "crash", NEST, "ended with status 139")),
    ],
)
def test_runs_are_judged(status: int | None, output: str, sighting: Sighting) -> None:
    assert judge(status, output) == sighting


@pytest.mark.parametrize(
    ("status", "output"),
    [
        (2, f"ERROR {NEST} - ImportError\n"),
        (4, f"ERROR: file or directory not found: {NEST}\n"),
        (5, "no tests ran in 0.01s\n"),
        (3, f"INTERNALERROR> in {NEST}\n"),
        (1, "mpirun: not enough slots\n"),
        (None, ""),
    ],
)
def test_a_run_without_tests_is_no_sighting(status: int | None, output: str) -> None:
    with pytest.raises(RunError, match=f"status {status}"):
        judge(status, output)
