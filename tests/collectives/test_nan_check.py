"""MPIDIST_CHECK_NAN=1: the ranks whose contributions have NaN or infinity are named on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from mpidist.collectives import Communicator
from mpidist.errors import NonFiniteError

Reduce = Callable[[Communicator, np.ndarray], object]


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Communicator]:
    monkeypatch.setenv("MPIDIST_CHECK_NAN", "1")
    with Communicator() as made:
        yield made


@pytest.mark.parametrize(
    "reduce",
    [
        lambda comm, array: comm.all_reduce("sum", array),
        lambda comm, array: comm.all_reduce("mean", [np.ones(3), array])[1],
        lambda comm, array: comm.all_reduce("sum", array, out=array),
        lambda comm, array: comm.all_reduce_async("sum", array).wait(),
        lambda comm, array: comm.reduce("sum", array, root=comm.size - 1),
        lambda comm, array: comm.reduce_scatter("sum", array),
    ],
    ids=["all_reduce", "list", "out", "async", "reduce", "reduce_scatter"],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_the_rank_is_named(comm: Communicator, reduce: Reduce, value: float, dtype: type) -> None:
    bad = comm.size - 1
    array = np.ones(2 * comm.size, dtype)
    reduce(comm, array.copy())
    if comm.rank == bad:
        array[1] = value
    with pytest.raises(NonFiniteError, match=f"rank {bad}: array") as caught:
        reduce(comm, array)
    assert list(caught.value.contributions) == [bad]
    assert "test_nan_check.py" in caught.value.call_sites[bad]
    assert comm.all_reduce("sum", 1.0) == comm.size


@pytest.mark.min_ranks(2)
def test_an_overflow_is_told_apart(comm: Communicator) -> None:
    with pytest.raises(NonFiniteError, match="All contributions are finite, so it overflowed"):
        comm.all_reduce("prod", np.full(3, 1e200))


def test_integers_and_results_without_nan_pass(comm: Communicator) -> None:
    assert comm.all_reduce("sum", np.ones(2, np.int64)).tolist() == [comm.size] * 2
    assert np.isfinite(comm.all_reduce("min", np.array([1.0, np.inf if comm.rank else 2.0]))).all()


def test_keys_are_named(comm: Communicator) -> None:
    value = {"kernel": np.ones(2), "bias": np.full(2, np.nan if comm.rank == 0 else 1.0)}
    with pytest.raises(NonFiniteError, match=r"rank 0: bias, at .*test_nan_check\.py"):
        comm.all_reduce("sum", value)
