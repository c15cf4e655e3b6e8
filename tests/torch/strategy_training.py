"""Training of a small network under a strategy and in plain PyTorch, for comparing their numbers."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np

import mpidist

STEPS = 20
ROWS, BATCH = 107, 16


def rows(dtype: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, 10)).astype(dtype), rng.integers(0, 5, ROWS)


def network(dtype: str, seed: int = 0) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(seed)
    layers = (nn.Linear(10, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 5))
    return nn.Sequential(*layers).to(getattr(torch, dtype))


def weights_of(model: Any) -> Any:
    import torch

    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def epochs(dtype: str) -> Any:
    # The last one has 11 rows: 6 and 5 of two replicas, 4, 4 and 3 of three.
    return mpidist.Dataset.from_tensor_slices(rows(dtype)).batch(BATCH)


def losses_of(model: Any, images: Any, labels: Any, count: int | None = None) -> Any:
    import torch
    from torch.nn import functional

    losses = functional.cross_entropy(model(torch.as_tensor(images)), torch.as_tensor(labels), reduction="none")
    return mpidist.compute_average_loss(losses, global_batch_size=count or len(images))


def train(strategy: Any, kind: Any, dtype: str, bucket_bytes: int = 4096, **settings: Any) -> tuple[Any, list[float]]:
    """Return the weights after STEPS steps under a strategy, and the losses."""
    with strategy.scope():
        # Of other numbers on every rank, to be made equal.
        seed = mpidist.rank() if strategy.extended.spans_ranks else 0
        model = mpidist.torch.adopt(lambda: network(dtype, seed))
        optimizer = mpidist.torch.Optimizer(model, kind, bucket_bytes=bucket_bytes, **settings)

    def step(images: Any, labels: Any) -> Any:
        count = mpidist.global_count(images)
        optimizer.zero_grad()
        loss = losses_of(model, images, labels, count)
        loss.backward()
        optimizer.step()
        return loss.detach()

    dataset = strategy.experimental_distribute_dataset(epochs(dtype))
    losses: list[float] = []
    while len(losses) < STEPS:
        for batch in islice(dataset, STEPS - len(losses)):
            losses.append(float(strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)))
    copies = [weights_of(copy) for copy in model.copies]
    assert all(copy.equal(copies[0]) for copy in copies), "copies of this rank differ"
    return copies[0], losses


def train_plainly(kind: Any, dtype: str, **settings: Any) -> tuple[Any, list[float]]:
    """Return the same of plain PyTorch in one process, with the whole batches."""
    model = network(dtype)
    optimizer = kind(model.parameters(), **settings)
    losses: list[float] = []
    while len(losses) < STEPS:
        for images, labels in islice(epochs(dtype), STEPS - len(losses)):
            optimizer.zero_grad()
            loss = losses_of(model, images, labels)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return weights_of(model), losses
