"""Arrays that are not aligned as their dtype asks, as inputs and as ``out``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import Communicator

pytestmark = [pytest.mark.counts, pytest.mark.nodes]

SIZES = (1, 7, 40_000, 200_000)
DTYPES = (np.float32, np.int64, np.float16, np.complex128)


def shifted(array: Any) -> Any:
    """Return a copy that begins at an odd address."""
    array = np.asarray(array)
    copy = np.frombuffer(bytearray(array.nbytes + 1), array.dtype, array.size, offset=1).reshape(array.shape)
    copy[...] = array
    assert not copy.flags.aligned
    return copy


def field(array: Any) -> Any:
    """Return a copy that is a field of a packed record, neither aligned nor contiguous."""
    array = np.asarray(array)
    records = np.zeros(array.shape, np.dtype([("tag", "u1"), ("value", array.dtype)]))
    records["value"] = array
    return records["value"]


@pytest.mark.parametrize("place", [shifted, field])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_unaligned_arrays(comm: Communicator, dtype: Any, size: int, place: Callable[[Any], Any]) -> None:
    n, rank = comm.size, comm.rank
    mine = (np.arange(size * n) % 4 + rank).astype(dtype)
    total = sum((np.arange(size * n) % 4 + i).astype(dtype) for i in range(n))
    whole = np.concatenate([(np.arange(size * n) % 4 + i).astype(dtype) for i in range(n)])
    part = slice(rank * size, rank * size + size)
    calls: list[tuple[Callable[..., Any], Any]] = [
        (lambda **out: comm.all_reduce("SUM", place(mine), **out), total),
        (lambda **out: comm.all_reduce_async("SUM", place(mine), **out).wait(), total),
        (lambda **out: comm.reduce_scatter("SUM", place(mine), **out), total[part]),
        (lambda **out: comm.all_gather(place(mine), **out), whole),
        (lambda **out: comm.broadcast(place(mine), n - 1, **out), whole[-mine.size :]),
        (lambda **out: comm.all_to_all(place(mine), **out), np.concatenate([mine[part] + i - rank for i in range(n)])),
    ]
    for call, expected in calls:
        # Twice: calls of a known signature take another path.
        for _ in range(2):
            np.testing.assert_array_equal(call(), expected)
            out = place(np.zeros_like(expected))
            assert call(out=out) is out
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("place", [shifted, field])
def test_unaligned_lists(comm: Communicator, place: Callable[[Any], Any]) -> None:
    sizes = (1, 3, 50_000, 200_000)
    given = [place(np.full(size, comm.rank + 1.0)) for size in sizes]
    out = [place(np.zeros(size)) for size in sizes]
    comm.all_reduce("MEAN", given, out=out)
    for array in out:
        np.testing.assert_array_equal(array, (comm.size + 1) / 2)


@pytest.mark.parametrize("place", [shifted, field])
def test_unaligned_messages(comm: Communicator, place: Callable[[Any], Any]) -> None:
    if comm.size == 1:
        return
    out = place(np.zeros(1000))
    if comm.rank == 0:
        comm.send(place(np.arange(1000.0)), 1)
    elif comm.rank == 1:
        comm.recv(out, 0)
        np.testing.assert_array_equal(out, np.arange(1000.0))


def test_unaligned_arrays_under_a_strategy() -> None:
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        out = shifted(np.zeros(100))

        def step() -> None:
            context = mpidist.get_replica_context()
            assert context is not None
            context.all_reduce("SUM", shifted(np.ones(100)), out=out)

        strategy.run(step)
        np.testing.assert_array_equal(out, strategy.num_replicas_in_sync)
