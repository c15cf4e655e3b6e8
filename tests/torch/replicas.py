"""Modules and optimizers for tests of replicas, and what is compared on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import mpidist


def opened(strategy: Any, make: Callable[[], Any], kind: Any = None, **settings: Any) -> tuple[Any, Any]:
    import torch

    with strategy.scope():
        model = mpidist.torch.adopt(make)
        return model, mpidist.torch.Optimizer(
            model, kind or torch.optim.SGD, bucket_bytes=64, **(settings or {"lr": 1.0})
        )


def linear() -> Any:
    from torch import nn

    net = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(net.weight)
    return net


def replica() -> int:
    context = mpidist.get_replica_context()
    assert context is not None
    return int(context.replica_id_in_sync_group)


def same_on_all(strategy: Any, step: Callable[[], Any]) -> Any:
    """Run a step, whose results have to be equal on all replicas, and return one."""
    results = strategy.run(lambda: np.asarray(step()))
    low, high = (strategy.reduce(op, results, axis=None) for op in ("MIN", "MAX"))
    np.testing.assert_array_equal(low, high)
    return low


def alone() -> Any:
    from mpi4py import MPI

    return MPI.COMM_SELF
