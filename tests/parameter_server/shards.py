"""Sharded variables for tests: made of an array, and watched while they are read and written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from mpidist import Variable
from mpidist.parameter_server import ShardedVariable
from mpidist.parameter_server.sharded_variable import div_sizes, offsets_of


def sharded(array: Any, shards: int | Sequence[int], strategy: Any = None, **options: Any) -> ShardedVariable:
    """Return ``array`` in so many shards, or in shards of these sizes, made in the scope of ``strategy``."""
    array = np.asarray(array)
    sizes = div_sizes(len(array), shards) if isinstance(shards, int) else list(shards)
    offsets = offsets_of(sizes)
    with nullcontext() if strategy is None else strategy.scope():
        parts = [
            Variable(array[start : start + size], name=f"table/part_{i}", **options)
            for i, (start, size) in enumerate(zip(offsets, sizes, strict=False))
        ]
    return ShardedVariable(parts, name="table")


class Touched:
    """What of each shard is read and written: "all", or the rows.

    Args:
        monkeypatch: Puts a note-taker in the place of the methods of variables.
        variable: Whose shards are watched.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, variable: ShardedVariable) -> None:
        self.reads: dict[int, Any] = {}
        self.writes: dict[int, Any] = {}
        numbers = {id(shard): number for number, shard in enumerate(variable.variables)}
        read, sparse_read, scatter = Variable.as_array, Variable.sparse_read, Variable.scatter_by

        def noting_read(shard: Any) -> Any:
            if id(shard) in numbers:
                self.reads.setdefault(numbers[id(shard)], "all")
            return read(shard)

        def noting_sparse_read(shard: Any, rows: Any) -> Any:
            # Comes to a read of the memory, which has its note already.
            self.reads[numbers[id(shard)]] = np.asarray(rows).tolist()
            return sparse_read(shard, rows)

        def noting_scatter(shard: Any, how: Any, slices: Any) -> Any:
            self.writes[numbers[id(shard)]] = slices.indices.tolist()
            return scatter(shard, how, slices)

        monkeypatch.setattr(Variable, "as_array", noting_read)
        monkeypatch.setattr(Variable, "sparse_read", noting_sparse_read)
        monkeypatch.setattr(Variable, "scatter_by", noting_scatter)
