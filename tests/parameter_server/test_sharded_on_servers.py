"""ShardedVariable whose shards are on parameter servers: real ranks, and which requests are sent for what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import IndexedSlices
from mpidist.cluster_resolver import MPIClusterResolver
from mpidist.optimizers import SGD
from mpidist.parameter_server import transport
from tests.parameter_server.shards import sharded
from tests.support.ranks.pool import run

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

WHOLE = np.arange(28.0).reshape(14, 2)


def on_a_rank() -> dict[str, Any] | None:
    """Serve, or as the worker read and write 3 shards on 2 servers, and return the requests."""
    resolver = MPIClusterResolver(jobs={"ps": 2, "worker": 1})
    if resolver.task_type == "ps":
        mpidist.Server(resolver).join()
        return None
    seen: dict[str, Any] = {}
    with mpidist.v1.experimental.ParameterServerStrategy(resolver) as strategy:
        v = sharded(WHOLE, 3, strategy)
        asked = noted_requests()
        for name, read in {
            "whole": lambda: v.numpy(),
            "row": lambda: v[4],
            "rows": lambda: v.sparse_read([13, 0, 13]),
            "slice": lambda: v[4:10],
        }.items():
            asked.clear()
            seen[name] = (read(), [sorted(parts) for parts in asked])
        for gradient in (np.ones((14, 2)), IndexedSlices(np.ones((2, 2)), [13, 1])):
            for make in (lambda: SGD(0.5), lambda: SGD(0.5, momentum=0.5)):
                optimizer = make()
                for _ in range(2):
                    asked.clear()
                    optimizer.apply_gradients([(gradient, v)])
                seen.setdefault("updates", []).append(sum(parts.count("update") for parts in asked))
    return seen


def noted_requests() -> list[list[str]]:
    """Return a list to which each request to a server is added from now on: the names of its operations."""
    noted: list[list[str]] = []
    real = transport.Connection.start

    def start(self: Any, request: Any) -> Any:
        noted.append([part.method for part in request.parts])
        return real(self, request)

    transport.Connection.start = start  # type: ignore[method-assign]
    return noted


def test_shards_on_servers() -> None:
    (seen,) = [result for result in run(on_a_rank, 3) if result is not None]
    expected = {"whole": WHOLE, "row": WHOLE[4], "rows": WHOLE[[13, 0, 13]], "slice": WHOLE[4:10]}
    for name, array in expected.items():
        np.testing.assert_array_equal(seen[name][0], array)
    # Shards 0 and 2 are on the first server, shard 1 on the second: one message to each that is needed.
    assert sorted(seen["whole"][1]) == [["read"], ["read", "read"]]
    assert seen["row"][1] == [["gather"]]
    assert seen["rows"][1] == [["gather", "gather"]]
    assert sorted(seen["slice"][1]) == [["gather"], ["read"]]
    # A sparse update by SGD goes to the shards with rows alone, one of momentum to all, since their moments decay.
    assert seen["updates"] == [3, 3, 2, 3]
