"""Equal bits everywhere, dtypes, zero sizes, two strategies at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.experimental import CommunicationOptions
from tests.acceptance.checks import check_each, replica_id, same
from tests.support.ranks.layouts import layouts, per_replica

pytestmark = [pytest.mark.nodes, pytest.mark.counts]

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
ALGORITHMS = ("multi_worker-*", "mirrored_node-*", "mirrored-[134]local")


def context() -> Any:
    return mpidist.get_replica_context()


def noise(i: int, dtype: Any, size: int = 1013) -> Any:
    values = np.random.default_rng([3, i]).standard_normal(size) * 10.0 ** (np.arange(size) % 5)
    return values.astype(dtype)


def bits(result: Any) -> list[bytes]:
    return [np.ascontiguousarray(leaf).tobytes() for leaf in result]


def reductions() -> Any:
    """Every way to a full reduction, as a list of arrays."""
    i = replica_id()
    single, double, half = noise(i, np.float32), noise(i, np.float64), noise(i, np.float16, 7)
    ctx = context()
    results = [ctx.all_reduce(op, value) for op in ("SUM", "MEAN", "PROD") for value in (single, double)]
    results += ctx.all_reduce("MEAN", [half, single, double])
    results += [ctx.all_reduce("SUM", single, CommunicationOptions(bytes_per_pack=1))]
    results += [ctx.merge_call(lambda s, v: s.reduce("SUM", v, axis=None), args=(double,))]
    results += [ctx.merge_call(lambda s, v: s.reduce("MEAN", v, axis=0), args=(single,))]
    return [*results, ctx.all_reduce("SUM", noise(i, np.float32, 70_001))]


@pytest.mark.parametrize("strategy", layouts(*ALGORITHMS), indirect=True)
def test_all_replicas_on_all_ranks_hold_the_same_bits(strategy: Any) -> None:
    variable = None
    with strategy.scope():
        variable = mpidist.Variable(noise(0, np.float32), aggregation=mpidist.VariableAggregation.MEAN)

    def replica() -> Any:
        variable.assign_add(noise(replica_id(), np.float32))
        return reductions()

    parts = strategy.experimental_local_results(strategy.run(replica))
    mine = [bits(part) for part in parts] + [bits([c.numpy()]) for c in variable.values]
    with mpidist.Communicator() as comm:
        every = comm.all_gather_object(mine)
    first = every[0]
    assert all(row == first[0] for ranks in every for row in ranks[: len(parts)])
    assert all(row == first[-1] for ranks in every for row in ranks[len(parts) :])


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, *COMPLEX])
def test_dtypes(strategy: Any, dtype: str) -> None:
    n = strategy.num_replicas_in_sync

    def value(i: int) -> Any:
        return np.array([i + 1, 2, 3], dtype)

    def replica() -> Any:
        mine = value(replica_id())
        total, mean = context().all_reduce("SUM", mine), context().all_reduce("MEAN", mine)
        assert total.dtype == dtype
        if n > 1:
            assert mean.dtype == (np.float64 if dtype in INTEGERS else dtype)
        results = [total, mean]
        if dtype not in COMPLEX:
            results += [context().all_reduce(op, mine) for op in ("MIN", "MAX")]
            assert all(result.dtype == dtype for result in results[2:])
        gathered = context().all_gather(mine, axis=0)
        assert gathered.dtype == dtype
        return [*results, gathered]

    every = np.array([value(i) for i in range(n)])
    wide = every.astype(np.complex128 if dtype in COMPLEX else np.float64)
    for result in strategy.experimental_local_results(strategy.run(replica)):
        same(result[0], wide.sum(0).astype(dtype))
        np.testing.assert_allclose(
            result[1].astype(wide.dtype), wide.mean(0), rtol=2e-3 if dtype == "float16" else 1e-6
        )
        same(result[-1], every.ravel())
        if dtype not in COMPLEX:
            same(result[2], every.min(0))
            same(result[3], every.max(0))


def test_bfloat16(strategy: Any) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes: pip install '.[half]'")
    n = strategy.num_replicas_in_sync
    parts = [np.array([256.0 if i == 0 else 1.0, 0.5], ml_dtypes.bfloat16) for i in range(n)]
    total = np.sum([part.astype(np.float32) for part in parts], axis=0, dtype=np.float32).astype(ml_dtypes.bfloat16)

    def replica() -> Any:
        result = context().all_reduce("SUM", parts[replica_id()])
        assert result.dtype == ml_dtypes.bfloat16
        return result

    for result in strategy.experimental_local_results(strategy.run(replica)):
        same(result.astype(np.float32), total.astype(np.float32))
    gathered = strategy.gather(per_replica(strategy, parts), axis=0)
    assert gathered.dtype == ml_dtypes.bfloat16


def test_large_integers_are_exact(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    value = strategy.run(lambda: context().all_reduce("SUM", np.array([2**53 + 1, -(2**57) - 1])))
    check_each(strategy, value, lambda _: np.array([n * (2**53 + 1), -n * (2**57 + 1)]))
    check_each(strategy, strategy.run(lambda: context().all_reduce("MAX", 2**63 - 1)), lambda _: 2**63 - 1)


@pytest.mark.parametrize(
    "strategy", layouts("mirrored-[234]local", "mirrored_node-2local", "multi_worker-2local"), indirect=True
)
def test_dtypes_that_cannot_be_reduced(strategy: Any) -> None:
    values = {
        "bool": np.array([True]),
        "object": np.array([1], object),
        "text": np.array(["a"]),
        "bytes": np.array([b"a"]),
        "date": np.array(["2020-01-01"], "datetime64[D]"),
        "big-endian": np.array([1.0], ">f8"),
        "structured": np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    }
    for name, value in values.items():
        for op in ("SUM", "MEAN", "MAX"):
            with pytest.raises((TypeError, mpidist.PeerError), match=r"expected|cast|astype") as info:
                strategy.run(lambda v=value, o=op: context().all_reduce(o, v))
            assert isinstance(info.value, TypeError), name
            with pytest.raises(TypeError):
                strategy.reduce(op, per_replica(strategy, lambda i, v=value: v), axis=None)
    for name in ("object", "big-endian", "structured"):
        with pytest.raises(TypeError):
            strategy.run(lambda v=values[name]: context().all_gather(v, axis=0))
    same(strategy.reduce("SUM", per_replica(strategy, lambda i: 1), axis=None), strategy.num_replicas_in_sync)


def test_empty_scalar_and_strided_arrays(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    base = np.arange(24.0).reshape(2, 3, 4)
    frozen = np.arange(4.0)
    frozen.flags.writeable = False
    values = [
        np.zeros((0, 3)),
        np.zeros((2, 0)),
        np.array(3.0),
        base[:, ::2, ::-1],
        base.transpose(2, 0, 1),
        np.asfortranarray(base[0]),
        frozen,
        np.broadcast_to(np.array([1.0, 2.0]), (3, 2)),
    ]

    def replica() -> Any:
        return [context().all_reduce("SUM", value) for value in values], context().all_reduce("SUM", values)

    expected = [n * value for value in values]
    check_each(strategy, strategy.run(replica), lambda _: (expected, expected))
    same(base, np.arange(24.0).reshape(2, 3, 4))


def test_two_strategies_alive_at_once(strategy: Any) -> None:
    other = mpidist.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])
    with other:
        one, two = strategy.num_replicas_in_sync, other.num_replicas_in_sync
        with strategy.scope():
            a = mpidist.Variable(0.0, aggregation=mpidist.VariableAggregation.SUM)
        with other.scope():
            b = mpidist.Variable(0.0, aggregation=mpidist.VariableAggregation.SUM)
        for step in range(3):
            strategy.run(lambda: a.assign_add(1.0))
            other.run(lambda s=step: b.assign_add(float(s)))
            same(strategy.reduce("SUM", strategy.run(lambda: 1.0), axis=None), float(one))
            same(other.reduce("SUM", other.run(lambda: 1.0), axis=None), float(two))
        same(a.numpy(), 3.0 * one)
        same(b.numpy(), 3.0 * two)
    same(strategy.reduce("SUM", strategy.run(lambda: 1.0), axis=None), float(one))


def test_messages_of_the_user_do_not_mix_with_ours(strategy: Any) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    mine = np.full(4, world.rank)
    theirs = np.empty(4, mine.dtype)
    request = world.Irecv(theirs, (world.rank - 1) % world.size, MPI.ANY_TAG)
    n = strategy.num_replicas_in_sync
    check_each(strategy, strategy.run(lambda: context().all_reduce("SUM", 1)), lambda _: n)
    world.Send(mine, (world.rank + 1) % world.size, 0)
    request.Wait()
    same(theirs, np.full(4, (world.rank - 1) % world.size))
