"""Components of the MPI are found by name, and asking for them changes nothing else."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from benchmarks.measuring import components

pytestmark = pytest.mark.one_rank


def test_one_that_is_not_there() -> None:
    level = MPI.Query_thread()
    assert not components.is_there("no_such")
    assert MPI.Query_thread() == level


@pytest.mark.skipif("Open MPI" not in MPI.Get_library_version(), reason="needs Open MPI, which has components")
def test_a_communicator_prefers_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "NAMES", ("no_such", "tuned"))
    found = components.communicators(MPI.COMM_WORLD)
    assert list(found) == ["tuned"]
    assert found["tuned"].allreduce(1) == MPI.COMM_WORLD.size
    found["tuned"].Free()
