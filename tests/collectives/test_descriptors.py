"""Without file descriptors a communicator raises on all ranks, and MPI does not crash."""

from __future__ import annotations

import os

import pytest

from tests.support.ranks.pool import run

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]


def make_with_few_descriptors(left: int) -> list[str]:
    """Run on each rank: make a Communicator while rank 1 has ``left`` descriptors, and one after that."""
    import resource

    import mpidist
    from mpidist.topology import import_mpi

    rank = import_mpi().COMM_WORLD.rank
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = []
    if rank == 1:
        taken = set(map(int, os.listdir("/proc/self/fd")))
        free = [number for number in range(limits[0]) if number not in taken]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[left], limits[1]))
    try:
        with mpidist.Communicator() as comm:
            comm.barrier()
        seen.append("made")
    except (OSError, mpidist.PeerError) as error:
        seen.append(f"{type(error).__name__}: {error}")
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with mpidist.Communicator() as comm:
        seen.append(str(comm.all_reduce("SUM", 1)))
    return seen


@pytest.mark.parametrize("left", [0, 1, 6])
def test_an_error_on_all_ranks_and_it_goes_on(left: int) -> None:
    found = run(make_with_few_descriptors, 3, left)
    text = "rank 1 has fewer than 8 file descriptors left, too few to make a communicator. Run: ulimit -n 4096"
    assert found[1] == [f"OSError: [Errno 24] Too many open files: {text}", "3"]
    assert found[0] == found[2] == [f"PeerError: {text}", "3"]


def test_enough_are_enough() -> None:
    assert run(make_with_few_descriptors, 3, 16) == [["made", "3"]] * 3
