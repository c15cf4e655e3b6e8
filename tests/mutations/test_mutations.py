"""The table of faults fits the library, and runs of tests are judged correctly. Runs no fault."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutations.faults import FACADES, FAULTS, Fault
from tests.mutations.judging import RunError, judge
from tests.support.ranks.jobs import ROOT

pytestmark = pytest.mark.one_rank


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_the_library(fault: Fault) -> None:
    broken = fault.put_into(Path(ROOT, fault.file).read_text(encoding="utf-8"))
    if fault.file.endswith(".py"):
        compile(broken, fault.file, "exec")
    assert fault.new != fault.old
    assert fault.tests
    assert all(Path(ROOT, test.split("::")[0]).is_file() for test in fault.tests)
    assert fault.ranks in (1, 2, 3, 4)
    assert fault.ranks_per_node is None or fault.ranks > fault.ranks_per_node


def test_names_differ_and_every_room_has_three() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    layers = {path.parent.name for path in Path(ROOT, "mpidist").glob("*/__init__.py")}
    counts = Counter(fault.room for fault in FAULTS)
    assert counts.keys() == (layers - {"v1", "experimental"}) | {FACADES, "elastic"}
    assert min(counts.values()) >= 3


NEST = "tests/core/test_nest.py"


@pytest.mark.parametrize(
    ("status", "output", "how", "test"),
    [
        (0, "3 passed in 0.1s\n", "", ""),
        (1, f"FAILED {NEST}::test_map[a - b] - Error: 1 != 2\n", "failed", f"{NEST}::test_map[a - b]"),
        (None, f'File "/tree/{NEST}", line 3', "hang", NEST),
        (3, f"rank [0] never finished {NEST}::test_a", "hang", f"{NEST}::test_a"),
        (-11, f'File "/tree/{NEST}"\nFile "/tree/tests/support/ranks/sessions.py"', "crash", NEST),
    ],
)
def test_runs_are_judged(status: int | None, output: str, how: str, test: str) -> None:
    sighting = judge(status, output)
    assert (sighting.seen, sighting.how, sighting.test) == (how != "", how, test)


@pytest.mark.parametrize(
    ("status", "output"), [(2, f"ERROR {NEST} - ImportError\n"), (1, "mpirun: not enough slots\n"), (None, "")]
)
def test_a_run_without_tests_is_an_error(status: int | None, output: str) -> None:
    with pytest.raises(RunError, match=f"status {status}"):
        judge(status, output)
