"""ShardedVariable whose shards are on parameter servers: real ranks, and which requests are sent for what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import Checkpoint, IndexedSlices, Variable
from mpidist.cluster_resolver import MPIClusterResolver
from mpidist.optimizers import SGD, Adam
from mpidist.parameter_server import transport
from tests.parameter_server.shards import sharded
from tests.support.ranks.pool import run

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

WHOLE = np.arange(28.0).reshape(14, 2)


def on_a_rank(folder: str) -> dict[str, Any] | None:
    """Serve, or as the worker read and write 3 shards on 2 servers, and return what was seen."""
    resolver = MPIClusterResolver(jobs={"ps": 2, "worker": 1})
    if resolver.task_type == "ps":
        mpidist.Server(resolver).join()
        return None
    seen: dict[str, Any] = {}
    with mpidist.v1.experimental.ParameterServerStrategy(resolver) as strategy:
        v = sharded(WHOLE, 3, strategy)
        with strategy.scope():
            plain = Variable(WHOLE)
        asked = noted_requests()
        for name, read in {
            "whole": lambda: v.numpy(),
            "row": lambda: v[4],
            "rows": lambda: v.sparse_read([13, 0, 13]),
            "slice": lambda: v[4:10],
        }.items():
            asked.clear()
            seen[name] = (read(), [sorted(parts) for parts in asked])
        v.scatter_add(IndexedSlices(np.ones((2, 2)), [13, 13]))
        plain.scatter_add(IndexedSlices(np.ones((2, 2)), [13, 13]))
        for make in (lambda: SGD(0.5), lambda: SGD(0.5, momentum=0.5), lambda: Adam(0.5)):
            for gradient in (np.ones((14, 2)), IndexedSlices(np.ones((2, 2)), [13, 1])):
                for variable in (v, plain):
                    optimizer = make()
                    for _ in range(2):
                        asked.clear()
                        optimizer.apply_gradients([(gradient, variable)])
                    seen.setdefault("updates", []).append([sorted(parts) for parts in asked])
        seen["same"] = (v.numpy(), plain.numpy())
        adam = Adam(0.5)
        adam.apply_gradients([(np.ones((14, 2)), v)])
        seen["saved"] = (v.numpy(), adam.get_slot(v, "m").numpy())
        Checkpoint(v=v, optimizer=adam).write(Path(folder) / "ckpt")
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


def test_shards_on_servers(tmp_path: Path) -> None:
    (seen,) = [result for result in run(on_a_rank, 3, str(tmp_path)) if result is not None]
    expected = {"whole": WHOLE, "row": WHOLE[4], "rows": WHOLE[[13, 0, 13]], "slice": WHOLE[4:10]}
    for name, array in expected.items():
        np.testing.assert_array_equal(seen[name][0], array)
    # Shards 0 and 2 are on the first server, shard 1 on the second: one message to each that is needed.
    assert sorted(seen["whole"][1]) == [["read"], ["read", "read"]]
    assert seen["row"][1] == [["gather"]]
    assert seen["rows"][1] == [["gather", "gather"]]
    assert sorted(seen["slice"][1]) == [["gather"], ["read"]]
    np.testing.assert_allclose(*seen["same"], rtol=1e-14)
    # A sparse update by SGD goes to the shards with rows alone, one of momentum to all, since their moments decay.
    counts = [sum("update" in name for parts in update for name in parts) for update in seen["updates"][::2]]
    assert counts == [3, 2, 3, 3, 3, 3]

    # What was on three shards of two servers goes on in one variable of this process.
    variable, adam = Variable(WHOLE * 0), Adam(0.5)
    status = Checkpoint(v=variable, optimizer=adam).restore(tmp_path / "ckpt")
    adam.build([variable])
    status.assert_consumed()
    np.testing.assert_array_equal(variable.numpy(), seen["saved"][0])
    np.testing.assert_array_equal(adam.get_slot(variable, "m").numpy(), seen["saved"][1])
