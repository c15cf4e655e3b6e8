"""The public calls and extension points of CrossDeviceOps, alone and under a strategy."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import CrossDeviceOps, HierarchicalCopyAllReduce, NcclAllReduce, ReduceOp, ReductionToOneDevice
from mpidist.experimental import CommunicationOptions
from mpidist.values import PerReplica
from tests.acceptance.checks import check_each, replica_id, same
from tests.support.ranks.layouts import per_replica

pytestmark = pytest.mark.counts

REFUSED = (ValueError, TypeError)
MAKERS = {
    "base": CrossDeviceOps,
    "one_device": ReductionToOneDevice,
    "one_device_named": lambda: ReductionToOneDevice(reduce_to_device="cpu:0"),
    "hierarchical": HierarchicalCopyAllReduce,
    "hierarchical_0": lambda: HierarchicalCopyAllReduce(num_packs=0),
    "hierarchical_3": lambda: HierarchicalCopyAllReduce(num_packs=3),
    "nccl": NcclAllReduce,
    "nccl_2": lambda: NcclAllReduce(num_packs=2),
}
EACH = pytest.mark.parametrize("maker", MAKERS)


@contextmanager
def quiet() -> Iterator[None]:
    """A strategy of CPUs warns of NcclAllReduce."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@EACH
def test_reduce_by_itself(maker: str) -> None:
    ops = MAKERS[maker]()
    value = PerReplica([np.array([1.0, 2.0]), np.array([3.0, 5.0])])
    with quiet():
        for op, expected in (("SUM", [4.0, 7.0]), (ReduceOp.MEAN, [2.0, 3.5]), ("max", [3.0, 5.0])):
            same(np.asarray(ops.reduce(op, value, "cpu:0")), expected)
            placed = ops.reduce(op, value, value)
            assert [part.tolist() for part in placed.values] == [expected, expected]
        same(np.asarray(ops.reduce("MEAN", 5.0, "cpu:0")), 5.0)
        same(np.asarray(ops.reduce("SUM", np.ones(2), "cpu:0")), np.ones(2))
        results = ops.batch_reduce("SUM", [(value, "cpu:0"), (PerReplica([1, 2]), value)])
        same(np.asarray(results[0]), [4.0, 7.0])
        same(np.asarray(results[1]), 3)
        assert ops.batch_reduce("SUM", []) == []
    broadcast = ops.broadcast(np.ones(2), value)
    assert len(broadcast.values) == 2
    same(np.asarray(broadcast), np.ones(2))


@EACH
def test_a_result_is_no_array_of_the_caller(maker: str) -> None:
    ops, given = MAKERS[maker](), np.ones(2)
    with quiet():
        for value in (given, PerReplica([given]), PerReplica([given, np.ones(2)])):
            for op in ("SUM", "MEAN", "MAX"):
                assert not np.shares_memory(ops.reduce(op, value, "cpu:0"), given)
                assert not np.shares_memory(ops.batch_reduce(op, [(value, given)])[0], given)


@EACH
def test_refused_arguments(maker: str) -> None:
    ops = MAKERS[maker]()
    value = PerReplica([np.ones(2), np.ones(2)])
    for destinations in (None, [], (), ["cpu:0"]):
        with pytest.raises(REFUSED, match="destinations"):
            ops.reduce("SUM", value, destinations)
    with pytest.raises(ValueError, match="destinations"):
        ops.broadcast(np.ones(2), [])
    for pairs in (value, [value], [(value,)], [(value, "cpu:0", 1)], "ab"):
        with pytest.raises(ValueError, match="pairs"):
            ops.batch_reduce("SUM", pairs)
    with pytest.raises(ValueError):
        ops.batch_reduce("SUM", [(value, "cpu:0"), (PerReplica([1.0, 2.0, 3.0]), "cpu:0")])
    with pytest.raises(ValueError, match="SOME"):
        ops.reduce("SOME", value, "cpu:0")
    with pytest.raises(TypeError):
        ops.reduce(mpidist.VariableAggregation.SUM, value, "cpu:0")
    with pytest.raises(ValueError):
        ops.reduce("SUM", PerReplica([np.ones(2), np.ones(3)]), "cpu:0")
    with pytest.raises(TypeError):
        ops.reduce("SUM", PerReplica([np.array([True]), np.array([False])]), "cpu:0")


def test_refused_constructor_arguments() -> None:
    for cls in (HierarchicalCopyAllReduce, NcclAllReduce):
        with pytest.raises(ValueError, match="-1"):
            cls(num_packs=-1)
    from mpidist.cross_device_ops import CollectiveAllReduce

    with pytest.raises(ValueError, match="group_size"):
        CollectiveAllReduce(["cpu:0", "cpu:1"], group_size=3)


@EACH
@pytest.mark.parametrize("local", [1, 2, 3])
def test_under_a_mirrored_strategy(maker: str, local: int) -> None:
    """The same program and numbers whichever class reduces; on all ranks of the node."""
    from mpi4py import MPI

    from tests.support.ranks.layouts import _node_communicator

    node = _node_communicator(MPI.COMM_WORLD)
    devices = [f"cpu:{k}" for k in range(local)]
    with quiet():
        strategy = mpidist.MirroredStrategy(devices, cross_device_ops=MAKERS[maker](), communicator=node)
    with strategy:
        n = strategy.num_replicas_in_sync
        value = per_replica(strategy, lambda i: np.arange(5.0) * (i + 1))
        same(strategy.reduce("SUM", value, axis=None), np.arange(5.0) * sum(range(1, n + 1)))
        same(strategy.reduce("MEAN", value, axis=0), 2.0 * sum(range(1, n + 1)) / n)
        nest = {"a": np.ones(3, np.float32), "b": [np.array(2), np.zeros((0, 2))], "c": np.full((2, 2), 1j)}

        def replica() -> Any:
            return mpidist.get_replica_context().all_reduce("SUM", nest)

        expected = {"a": np.full(3, n), "b": [np.array(2 * n), np.zeros((0, 2))], "c": np.full((2, 2), 1j * n)}
        check_each(strategy, strategy.run(replica), lambda _: expected)
        slices = strategy.run(lambda: mpidist.IndexedSlices(np.full((1, 2), replica_id() + 1.0), np.array([0]), (2, 2)))
        dense = strategy.extended.reduce_to("SUM", slices, "cpu:0").to_dense()
        same(dense, [[sum(range(1, n + 1))] * 2, [0.0, 0.0]])
    node.Free()


@pytest.mark.min_ranks(2)
def test_nccl_for_several_cpus_warns() -> None:
    with pytest.warns(UserWarning, match="cannot reduce arrays in host memory"):
        strategy = mpidist.MirroredStrategy(["cpu:0"], NcclAllReduce())
    strategy.close()


def test_mixed_dense_and_sparse_batches_keep_their_order(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    dense = per_replica(strategy, lambda i: float(i))
    sparse = strategy.run(lambda: mpidist.IndexedSlices(np.ones((1, 1)), np.array([1]), (2, 1)))
    results = strategy.extended.batch_reduce_to("SUM", [(dense, "cpu:0"), (sparse, "cpu:0"), (dense, "cpu:0")])
    same(np.asarray(results[0]), float(sum(range(n))))
    same(results[1].to_dense(), [[0.0], [float(n)]])
    same(np.asarray(results[2]), float(sum(range(n))))


def test_accumulation_fn_is_honoured() -> None:
    calls: list[int] = []

    def add(values: Any) -> Any:
        calls.append(len(values))
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total

    strategy = mpidist.MirroredStrategy(
        ["cpu:0", "cpu:1"], ReductionToOneDevice(accumulation_fn=add), communicator=_self()
    )
    with strategy:
        value = per_replica(strategy, lambda i: np.array([i + 1.0]))
        same(strategy.reduce("SUM", value, axis=None), [3.0])
        same(strategy.reduce("MEAN", value, axis=None), [1.5])
    assert calls == [2, 2]


def _self() -> Any:
    from mpi4py import MPI

    return MPI.COMM_SELF


def test_a_class_of_ones_own() -> None:
    """The extension points are what the public calls and the strategy go through."""
    calls: list[str] = []

    class Recorded(CrossDeviceOps):
        def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
            calls.append(f"reduce {reduce_op.name}")
            return super().reduce_implementation(reduce_op, per_replica_value, destinations, options)

        def batch_reduce_implementation(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
            calls.append(f"batch {reduce_op.name}")
            return super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)

    strategy = mpidist.MirroredStrategy(["cpu:0", "cpu:1"], Recorded(), communicator=_self())
    with strategy:
        value = per_replica(strategy, lambda i: i + 1.0)
        same(strategy.reduce("SUM", value, axis=None), 3.0)
        assert calls
        calls.clear()
        same(np.asarray(strategy.extended.batch_reduce_to("MEAN", [(value, "cpu:0")])[0]), 1.5)
        assert calls
        calls.clear()
        strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", 1.0))
        assert calls


def _world_size() -> int:
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.size)


class Clipped(CrossDeviceOps):
    """Clips what each replica gives; on ranks, it doubles the total."""

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
        clipped = PerReplica([np.clip(value, -1.0, 1.0) for value in per_replica_value.values])
        return super().reduce_implementation(reduce_op, clipped, destinations, options)


class ClippedOnRanks(Clipped):
    def between_ranks_implementation(
        self, reduce_op: Any, arrays: Any, divisor: int, options: Any, structure: str = ""
    ) -> Any:
        totals = super().between_ranks_implementation(reduce_op, arrays, divisor, options, structure)
        return [2 * total for total in totals]


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
@pytest.mark.parametrize("base", [CrossDeviceOps, mpidist.HierarchicalCopyAllReduce, mpidist.ReductionToOneDevice])
def test_a_class_of_ones_own_is_used_between_ranks(devices: list[str], base: type) -> None:
    """Whether a rank has one replica or several, and in every way to an all-reduce."""
    kind = ClippedOnRanks if base is CrossDeviceOps else type("Mixed", (ClippedOnRanks, base), {})
    with mpidist.MirroredStrategy(devices, kind()) as strategy:
        n = strategy.num_replicas_in_sync
        value = per_replica(strategy, lambda i: np.array([i + 0.5]))
        clipped = 0.5 + (n - 1)
        expected = clipped if strategy.extended.communicator is None else 2 * clipped
        context = mpidist.get_replica_context
        ways = [
            lambda: strategy.reduce("SUM", value, axis=None),
            lambda: strategy.run(lambda own: context().all_reduce("SUM", own), args=(value,)),
            lambda: strategy.run(lambda own: context().all_reduce_async("SUM", own).wait(), args=(value,)),
            lambda: strategy.extended.batch_reduce_to("SUM", [(value, "cpu:0")])[0],
        ]
        for way in ways if n > 1 else []:
            for part in strategy.experimental_local_results(way()):
                same(part, [expected])


def test_a_class_that_says_nothing_of_other_ranks_is_an_error_with_them() -> None:
    if _world_size() == 1:
        mpidist.MirroredStrategy(["cpu:0"], Clipped()).close()
        return
    with pytest.raises(TypeError, match="Clipped overrides reduce_implementation, .* between_ranks_implementation"):
        mpidist.MirroredStrategy(["cpu:0"], Clipped())
    with mpidist.Communicator() as comm, pytest.raises(TypeError, match="between_ranks_implementation"):
        Clipped(comm)


def test_bytes_per_pack_changes_nothing_but_the_packing(strategy: Any) -> None:
    """Whatever the packs, the same numbers in the same order."""
    n = strategy.num_replicas_in_sync
    nest = [np.full(4, k + 1, np.float32) for k in range(4)] + [np.full(3, 7.0), np.array(2), np.zeros(0)]

    def replica(size: int) -> Any:
        return mpidist.get_replica_context().all_reduce("SUM", nest, CommunicationOptions(bytes_per_pack=size))

    for size in (0, 1, 15, 16, 20, 1 << 30):
        result = strategy.run(replica, args=(size,))
        for part in strategy.experimental_local_results(result):
            for leaf, start in zip(part, nest, strict=True):
                assert np.asarray(leaf).dtype == start.dtype
                same(leaf, n * start)
