"""One NCCL communicator for the same ranks on the same GPUs, whoever uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import Communicator
from mpidist.collectives.gpu import nccl as nccl_module
from mpidist.collectives.gpu.nccl import NcclComm, make_nccl
from mpidist.collectives.mpi.waiting import Steps
from mpidist.core.errors import NcclFailure, PeerError
from mpidist.core.options import ReduceOp
from mpidist.experimental import CommunicationOptions
from mpidist.topology import world_topology
from tests.collectives.nccl_ranks import Rank, finished, private_world
from tests.support.fake_cupy import nccl as fake_nccl

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.counts,
    pytest.mark.min_ranks(2),
    pytest.mark.parametrize("fake_gpus", [{"devices": 8}], indirect=True),
]
NCCL = CommunicationOptions(algorithm="nccl")


@pytest.fixture
def cupy(fake_gpus: Any) -> Iterator[Any]:
    """Each rank has a GPU of its own."""
    with fake_gpus.cuda.Device(world_topology().rank):
        yield fake_gpus


def check(cupy: Any, *comms: Communicator) -> None:
    """Reduce on each of these communicators."""
    for number, comm in enumerate(comms):
        value = cupy.full(1000, comm.rank + number, "f4")
        got = comm.all_reduce("SUM", value, options=NCCL)
        assert (got.get() == sum(range(comm.size)) + number * comm.size).all()


def made(world: Any, **kwargs: Any) -> NcclComm:
    comm = finished(make_nccl(world, world.rank, **kwargs))
    assert isinstance(comm, NcclComm), comm
    return comm


def test_communicators_of_the_same_ranks_share_one(cupy: Any) -> None:
    with private_world() as world, Communicator() as one:
        with Communicator() as other, Communicator(world) as third:
            check(cupy, one, other, third, one, other)
            assert len(fake_nccl.open_communicators()) == 1
        check(cupy, one)
        assert len(fake_nccl.open_communicators()) == 1
    assert fake_nccl.open_communicators() == []


def test_the_levels_of_a_hierarchy_share_theirs(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if world_topology().size != 4:
        pytest.skip("two nodes with two ranks each")
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "2")
    hierarchical = CommunicationOptions(algorithm="hierarchical")
    with Communicator() as one, Communicator() as other:
        for comm in (one, other):
            assert (comm.all_reduce("SUM", cupy.ones(1000, "f4"), options=hierarchical).get() == 4).all()
        assert len(fake_nccl.open_communicators()) == 1
    assert fake_nccl.open_communicators() == []


def test_other_orders_and_other_gpus_have_their_own(cupy: Any) -> None:
    with Communicator() as comm:
        check(cupy, comm)
        backwards = comm.split(0, key=-comm.rank)
        assert backwards is not None
        with backwards, Communicator() as elsewhere:
            check(cupy, backwards)
            assert len(fake_nccl.open_communicators()) == 2
            with cupy.cuda.Device(7 if comm.rank == 0 else comm.rank):
                check(cupy, elsewhere)
            assert len(fake_nccl.open_communicators()) == 3
            check(cupy, comm, backwards)
    assert fake_nccl.open_communicators() == []


def test_what_was_aborted_is_not_given_out_again(cupy: Any) -> None:
    with private_world() as world:
        one, other = made(world), made(world)
        one.abort()
        other_rank = Rank(other)
        array = other_rank.array(np.ones(3, "f4"))
        with pytest.raises(NcclFailure, match="INVALID_ARGUMENT"):
            other.all_reduce(array, array, ReduceOp.SUM, other_rank.stream)
        new = Rank(made(world))
        new.comm.all_reduce(array, array, ReduceOp.SUM, new.stream)
        assert (new.seen(array) == world.size).all()
        other.close()
        new.leave()
    assert fake_nccl.open_communicators() == []


def test_after_a_user_gave_up_no_call_meets_one_of_its(cupy: Any) -> None:
    """Rank 0 leaves out a call that the others make: the next one of another user would meet it."""
    given_up: list[int] = []
    with private_world() as world:
        one, other = made(world, has_given_up=lambda: bool(given_up)), made(world)
        rank = Rank(other)
        array = rank.array(np.ones(3, "f4"))
        if world.rank == 0:
            given_up.append(1)
            with pytest.raises(
                RuntimeError, match="Another Communicator of the same ranks was given up.*Create a new Co"
            ):
                other.all_reduce(array, array, ReduceOp.SUM, rank.stream)
        new = Rank(made(world))
        assert len(fake_nccl.open_communicators()) == 2
        new.comm.all_reduce(array, array, ReduceOp.SUM, new.stream)
        assert (new.seen(array) == world.size).all()
        for comm in (new.comm, one, other):
            comm.close()
    assert fake_nccl.open_communicators() == []


def test_a_rank_that_is_out_of_step_tells_the_others_before_they_reduce(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Communicator(world_topology().world) as comm:
        check(cupy, comm)
        with monkeypatch.context() as changed:
            if comm.rank == 0:
                changed.setattr(nccl_module._Shared, "in_step", False)
            with pytest.raises(RuntimeError if comm.rank == 0 else PeerError, match="Create a new Communicator"):
                check(cupy, comm)
        check(cupy, comm)


def test_a_communicator_that_closes_leaves_what_another_is_about_to_share(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    gather = nccl_module.gather_objects

    def late(comm: Any, value: Any) -> Steps[list[Any]]:
        begun.append(1)
        for _ in range(300):
            yield
        return (yield from gather(comm, value))

    with Communicator() as one, Communicator() as other:
        check(cupy, one)
        monkeypatch.setattr(nccl_module, "gather_objects", late)
        work = other.all_reduce_async("SUM", cupy.ones(1000, "f4"), options=NCCL)
        while not begun:
            other._channel.executor.advance()
        one.close()
        assert (work.wait().get() == other.size).all()
    assert fake_nccl.open_communicators() == []


def test_a_strategy_starts_nccl_before_there_is_a_model(fake_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "8")
    with mpidist.MultiWorkerMirroredStrategy(devices=[f"gpu:{world_topology().rank}"]):
        assert len(fake_nccl.open_communicators()) == 1
    assert fake_nccl.open_communicators() == []
