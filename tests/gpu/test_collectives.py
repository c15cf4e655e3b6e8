"""Collectives and strategies on CuPy arrays against NumPy, on ranks that share a GPU, on one node and several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gpu import machine
from tests.support.ranks.jobs import run_alone

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank, pytest.mark.timeout(300)]

LIMIT_SECONDS = 150.0
# Ranks, and ranks per virtual node.
LAYOUTS = [pytest.param(2, None, id="1x2"), pytest.param(2, 1, id="2x1"), pytest.param(4, 2, id="2x2")]
NAMES = ["float32", "float16", "float64", "int16", "int64", "complex64"]
SIZES = [1, 0, 3, 1000, 70_001]


def _values(rank: int, name: str, sizes: list[int]) -> list[np.ndarray[Any, Any]]:
    from mpidist.arrays.dtypes import as_dtype

    rng = np.random.default_rng([rank, 7])
    return [rng.integers(0, 5, size).astype(as_dtype(name)) for size in sizes]


def _all_reduces(names: list[str], sizes: list[int], algorithms: list[str | None]) -> list[str]:
    cupy, _ = machine.join()
    from mpidist import Communicator
    from mpidist.core.options import CommunicationOptions

    taken = []
    with Communicator() as comm:
        for algorithm in algorithms:
            options = CommunicationOptions(algorithm=algorithm)
            for name in names:
                mine = _values(comm.rank, name, sizes)
                arrays = [cupy.asarray(value) for value in mine]
                for op in ("SUM", "MEAN", "PROD", "MIN", "MAX")[: 3 if name.startswith("complex") else 5]:
                    got = comm.all_reduce(op, arrays, options=options)
                    if (name, op) == (names[0], "SUM"):
                        taken.append(comm.last_algorithm)
                    wanted = comm.all_reduce(op, mine)
                    for result, value in zip(got, wanted, strict=True):
                        assert isinstance(result, cupy.ndarray)
                        assert (result.shape, result.dtype) == (value.shape, value.dtype)
                        close = {"rtol": 1e-2} if name in ("float16", "bfloat16") else {"rtol": 1e-6}
                        np.testing.assert_allclose(result.get().astype("c16"), value.astype("c16"), **close)
    return taken


def _rounds(rounds: int, elements: int) -> bool:
    """Many all-reduces of large arrays, started one after the other, their inputs dropped at once."""
    cupy, rank = machine.join()
    from mpidist import Communicator

    with Communicator() as comm:
        total = sum(range(comm.size))
        for number in range(rounds):
            works = [comm.all_reduce_async("SUM", cupy.full(elements + k, rank + k, np.float32)) for k in range(3)]
            for k, work in enumerate(works):
                result = work.wait()
                assert (result == total + comm.size * k).all().get(), (number, k)
    return True


def _movements() -> bool:
    cupy, rank = machine.join()
    from mpidist import Communicator

    with Communicator() as comm:
        gathered = comm.all_gather(cupy.full((rank + 1, 2), rank))
        wanted = np.concatenate([np.full((other + 1, 2), other) for other in range(comm.size)])
        np.testing.assert_array_equal(gathered.get(), wanted)
        sent = comm.broadcast(cupy.full(1000, rank, np.float32), root=comm.size - 1)
        assert (sent.get() == comm.size - 1).all()
        part = comm.reduce_scatter("SUM", cupy.ones((2 * comm.size, 3), np.float32))
        np.testing.assert_array_equal(part.get(), np.full((2, 3), comm.size))
    return True


def _strategy() -> list[float]:
    """Train a line with a strategy: the same numbers as NumPy on one process."""
    cupy, _ = machine.join()
    import mpidist

    strategy = mpidist.MultiWorkerMirroredStrategy(devices=[f"gpu:{cupy.cuda.Device().id}"])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 3))
    y = x @ [1.0, -2.0, 3.0] + 0.5
    with strategy.scope():
        w, b = mpidist.Variable(np.zeros(3), name="w"), mpidist.Variable(0.0, name="b")
        optimizer = mpidist.optimizers.SGD(learning_rate=0.1)
    batches = mpidist.Dataset.from_tensor_slices((x, y)).batch(16)
    batches = strategy.experimental_distribute_dataset(batches)

    def step(x: Any, y: Any) -> Any:
        assert isinstance(x, cupy.ndarray)
        error = x @ w + b - y
        optimizer.apply_gradients(zip([2 * x.T @ error / 16, 2 * error.sum() / 16], [w, b], strict=True))
        return mpidist.compute_average_loss(error**2, global_batch_size=16)

    losses = [float(strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)) for batch in batches]
    strategy.close()
    return losses


def _line_in_numpy() -> list[float]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 3))
    y = x @ [1.0, -2.0, 3.0] + 0.5
    w, b, losses = np.zeros(3), 0.0, []
    for start in range(0, 64, 16):
        part, wanted = x[start : start + 16], y[start : start + 16]
        error = part @ w + b - wanted
        losses.append(float((error**2).mean()))
        w, b = w - 0.1 * 2 * part.T @ error / 16, b - 0.1 * 2 * error.sum() / 16
    return losses


@pytest.mark.parametrize(
    ("ranks", "per_node", "names"),
    [
        pytest.param(2, None, NAMES, id="1x2"),
        pytest.param(2, 1, NAMES, id="2x1"),
        pytest.param(4, 2, ["float32", "int64"], id="2x2"),
        pytest.param(3, 2, ["float32", "int64"], id="2+1"),
        pytest.param(2, None, ["bfloat16"], id="1x2-bfloat16"),
        pytest.param(3, 2, ["bfloat16"], id="2+1-bfloat16"),
    ],
)
def test_all_reduces_of_every_dtype(ranks: int, per_node: int | None, names: list[str]) -> None:
    if machine.nccl_problem() is not None and per_node != 1:
        pytest.skip(f"NCCL: {machine.nccl_problem()}")
    ways = [None, "staged"]
    taken = run_alone(_all_reduces, ranks, names, SIZES, ways, ranks_per_node=per_node, timeout=LIMIT_SECONDS)
    assert len({tuple(names) for names in taken}) == 1
    assert taken[0][1] == "staged"


def test_nccl_over_virtual_nodes() -> None:
    if machine.nccl_problem() is not None:
        pytest.skip(f"NCCL: {machine.nccl_problem()}")
    algorithms = ["nccl", "hierarchical"]
    taken = run_alone(_all_reduces, 4, ["float32"], SIZES, algorithms, ranks_per_node=2, timeout=LIMIT_SECONDS)
    assert taken == [algorithms] * 4


@pytest.mark.parametrize(("ranks", "per_node"), LAYOUTS)
def test_many_rounds_of_large_arrays(ranks: int, per_node: int | None) -> None:
    assert run_alone(_rounds, ranks, 10, 3_000_001, ranks_per_node=per_node, timeout=LIMIT_SECONDS) == [True] * ranks


@pytest.mark.parametrize(("ranks", "per_node"), [(1, None), (2, None), (4, 2)])
def test_movements(ranks: int, per_node: int | None) -> None:
    assert run_alone(_movements, ranks, ranks_per_node=per_node, timeout=LIMIT_SECONDS) == [True] * ranks


@pytest.mark.parametrize(("ranks", "per_node"), [pytest.param(1, None, id="1x1"), *LAYOUTS])
def test_a_strategy_trains_as_numpy_does(ranks: int, per_node: int | None) -> None:
    for losses in run_alone(_strategy, ranks, ranks_per_node=per_node, timeout=LIMIT_SECONDS):
        np.testing.assert_allclose(losses, _line_in_numpy(), rtol=1e-9)
