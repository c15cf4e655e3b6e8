"""Modules of PyTorch under strategies: the same numbers in every layout as in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import mpidist
from tests.torch.strategy_training import train, train_plainly

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")

pytestmark = [pytest.mark.torch, pytest.mark.counts, pytest.mark.nodes]

OPTIMIZERS = {
    # Optimizer, dtype, settings, and how exact.
    "SGD, float32": (torch.optim.SGD, "float32", {"lr": 0.05, "momentum": 0.9}, 1e-5),
    "SGD, float64": (torch.optim.SGD, "float64", {"lr": 0.05, "momentum": 0.9}, 1e-12),
    "Adam, float64": (torch.optim.Adam, "float64", {"lr": 1e-3}, 1e-9),
}
LAYOUTS = ["1 each", "2 each", "3 each", "2 + 1", "central, 1 each", "central, 2 each"]


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def strategy(layout: str) -> Iterator[Any]:
    if "central" in layout and mpidist.topology.world_topology().num_nodes > 1:
        pytest.skip("CentralStorageStrategy is for one node")
    if layout == "2 + 1" and mpidist.size() == 1:
        pytest.skip("needs a second rank")
    count = 2 - min(mpidist.rank(), 1) if layout == "2 + 1" else int(layout.removeprefix("central, ")[0])
    devices = [f"cpu:{number}" for number in range(count)]
    kind: Any = mpidist.MultiWorkerMirroredStrategy
    kind = mpidist.experimental.CentralStorageStrategy if "central" in layout else kind
    with kind(**{"compute_devices" if "central" in layout else "devices": devices}) as made:
        yield made


def in_one_process(replicas: int) -> Any:
    from mpi4py import MPI

    return mpidist.MirroredStrategy([f"cpu:{number}" for number in range(replicas)], communicator=MPI.COMM_SELF)


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_numbers_are_those_of_one_process(strategy: Any, layout: str, case: str) -> None:
    kind, dtype, settings, exactness = OPTIMIZERS[case]
    weights, losses = train(strategy, kind, dtype, **settings)
    expected, expected_losses = train_plainly(kind, dtype, **settings)
    assert float((weights - expected).abs().max() / expected.abs().max()) <= exactness
    assert losses == pytest.approx(expected_losses, rel=exactness, abs=0)
    # With several replicas on several ranks each gets other rows than in one process.
    rows_are_the_same = mpidist.size() == 1 or layout in ("1 each", "2 + 1", "central, 1 each")
    if rows_are_the_same and mpidist.topology.world_topology().num_nodes == 1:
        with in_one_process(strategy.num_replicas_in_sync) as alone:
            same, same_losses = train(alone, kind, dtype, **settings)
        assert torch.equal(weights, same)
        assert losses == same_losses


@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "Adagrad", "NAdam", "Adadelta", "Rprop", "ASGD", "Adafactor"])
def test_other_optimizers(name: str) -> None:
    kind = getattr(torch.optim, name)
    with mpidist.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        weights, _ = train(strategy, kind, "float64")
    expected, _ = train_plainly(kind, "float64")
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-8)


def test_buckets_change_nothing() -> None:
    options = mpidist.experimental.CommunicationOptions(deterministic=True)
    found = []
    with mpidist.MultiWorkerMirroredStrategy(communication_options=options) as strategy:
        for nbytes in (1, 4096, 1 << 20):
            found.append(train(strategy, torch.optim.SGD, "float32", bucket_bytes=nbytes, lr=0.05)[0])
    assert all(torch.equal(found[0], other) for other in found[1:])
