"""Whole files for each worker: names of files as rows, and pipelines cut down to the files of one worker."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from typing import Any

from mpidist.input.interleaved import Interleaved
from mpidist.input.item_steps import ReorderedItems
from mpidist.input.pipeline import Node, Rows, require_items
from mpidist.input.reordering import Pass, Repeat, Shard, ShardHint, Shuffle, Skip, Take
from mpidist.input.row_indices import RowIndex
from mpidist.input.row_steps import MappedRows, PrefetchedRows, ReorderedRows
from mpidist.input.streams import Files, files_text
from mpidist.input.tables import SequenceTable


class FileNames(Rows):
    """Paths of files, as rows: what reads the files comes after it."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__((), len(paths), f"list_files({files_text(paths)})", SequenceTable(paths))
        self.identity = f"list_files({files_text(paths, without_folder=True)})"
        self.paths = paths

    def blocks(self, run: Pass) -> Iterator[RowIndex]:
        """Yield all row numbers."""
        return iter((range(len(self.paths)),))

    def files(self) -> Iterator[str]:
        """Yield the paths."""
        return iter(self.paths)


def names_node(file_pattern: Any) -> FileNames:
    """Return the node of the files that match; the rules are those of ``Dataset.list_files``.

    Raises:
        TypeError: No pattern.
        ValueError: Nothing matches.
    """
    several = isinstance(file_pattern, Iterable) and not isinstance(file_pattern, (str, bytes, os.PathLike))
    patterns = list(file_pattern) if several else [file_pattern]
    for pattern in patterns:
        if not isinstance(pattern, (str, os.PathLike)):
            raise TypeError(
                f"file_pattern has {pattern!r} of type {type(pattern).__name__} in it; expected a pattern such as "
                "'data/part-*.npy', or a list of patterns"
            )
    paths = sorted({path for pattern in patterns for path in glob.glob(os.fspath(pattern), recursive=True)})
    if not paths:
        raise ValueError(
            f"list_files() found no file that matches {file_pattern!r}, seen from {os.getcwd()}; expected at least one"
        )
    return FileNames(paths)


def other_source(node: Node) -> Node | None:
    """Return the first source of a pipeline that is not files, None if all are."""
    if isinstance(node, (Files, FileNames)):
        return None
    if not node.inputs:
        return node
    for before in node.inputs:
        other = other_source(before)
        if other is not None:
            return None if isinstance(node, Interleaved) and _makes_files(node) else other
    return None


def _makes_files(node: Interleaved) -> bool:
    """Whether the datasets that the function makes, of elements from elsewhere, read files and nothing else."""
    first = node.first()
    return first is not None and other_source(first) is None


def deal_files(node: Node, num_workers: int, worker_id: int) -> Node:
    """Return the pipeline, whose sources are all files, with every ``num_workers``-th file only.

    Files are counted as the names come, but as they would come without shuffles and repetitions, which each worker has
    for its own files, as in TensorFlow.

    Raises:
        ValueError: There are fewer files than workers.
    """
    if isinstance(node, Files):
        _require_enough(node, len(node.paths), num_workers)
        return node.part(num_workers, worker_id)
    if isinstance(node, Rows):
        return _deal_rows(node, num_workers, worker_id)
    if isinstance(node, Interleaved) and other_source(node.source) is not None:
        source = node.source
        shard = Shard(num_workers, worker_id)
        dealt: Node
        if isinstance(source, Rows):
            dealt = _deal_rows(source, num_workers, worker_id)
        else:
            _require_enough(source, source.cardinality, num_workers)
            dealt = ReorderedItems(require_items(source), shard)
        return node.with_inputs((dealt,))
    return node.with_inputs([deal_files(before, num_workers, worker_id) for before in node.inputs])


def _deal_rows(node: Rows, num_workers: int, worker_id: int) -> Rows:
    """Return the rows with every ``num_workers``-th name; shuffles and repetitions stay behind the choice."""
    before = node.inputs[0] if node.inputs else None
    passes_on = isinstance(node, (MappedRows, PrefetchedRows)) or (
        isinstance(node, ReorderedRows) and isinstance(node.reordering, (Shuffle, Repeat))
    )
    if passes_on and isinstance(before, Rows):
        dealt = node.with_inputs((_deal_rows(before, num_workers, worker_id),))
        assert isinstance(dealt, Rows)
        return dealt
    _require_enough(node, node.cardinality, num_workers)
    return ReorderedRows(node, Shard(num_workers, worker_id))


def _require_enough(node: Node, count: int, num_workers: int) -> None:
    if 0 <= count < num_workers:
        raise ValueError(
            f"{node} has {count} files for {num_workers} ranks, and AutoShardPolicy.FILE, which AUTO is where all "
            "sources are files, deals whole files; expected a file for each rank at least: write more files, or let "
            "every rank read all and keep its part of each batch with "
            "dataset.with_options(auto_shard_policy=AutoShardPolicy.DATA)"
        )


def has_hint(node: Node) -> bool:
    """Whether there is a ``shard(SHARD_HINT, SHARD_HINT)`` in the pipeline."""
    return any(map(_is_hint, node.graph()))


def fill_in_hints(node: Node, num_workers: int, worker_id: int) -> Node:
    """Return the pipeline with every ``shard(SHARD_HINT, SHARD_HINT)`` made that of a worker."""
    inputs = [fill_in_hints(before, num_workers, worker_id) for before in node.inputs]
    if not _is_hint(node):
        return node.with_inputs(inputs)
    shard = Shard(num_workers, worker_id)
    (before,) = inputs
    return ReorderedRows(before, shard) if isinstance(before, Rows) else ReorderedItems(require_items(before), shard)


def _is_hint(node: Node) -> bool:
    return isinstance(node, (ReorderedRows, ReorderedItems)) and isinstance(node.reordering, ShardHint)


def dealt_files(node: Node) -> Iterator[str]:
    """Yield the paths that a pipeline with the files of one worker reads, as far as they are the same in every pass."""
    before = node.inputs[0] if node.inputs else None
    if isinstance(node, ReorderedRows) and isinstance(node.reordering, Shard) and isinstance(before, FileNames):
        yield from before.paths[node.reordering.index :: node.reordering.num_shards]
    elif isinstance(node, (Files, FileNames)):
        yield from node.files()
    elif not (isinstance(node, ReorderedRows) and isinstance(node.reordering, (Shard, Take, Skip))):
        for each in node.inputs:
            yield from dealt_files(each)
