"""The choice and order of elements: the methods shuffle, repeat, shard, take and skip of a dataset."""

from __future__ import annotations

import operator
import secrets
from typing import TypeVar

from mpidist.core.seed import next_seed
from mpidist.input.input_options import SHARD_HINT
from mpidist.input.item_steps import ReorderedItems
from mpidist.input.iteration import Elements
from mpidist.input.pipeline import Items, Node, Rows
from mpidist.input.reordering import INFINITE, UNKNOWN, Reordering, Repeat, Shard, ShardHint, Shuffle, Skip, Take
from mpidist.input.row_steps import ReorderedRows

D = TypeVar("D", bound="OrderedElements")


class OrderedElements(Elements):
    """Elements of which some can be chosen, and which can be put in another order."""

    def _then(self: D, node: Node) -> D:
        return type(self)(node, self._options)

    def _reordered(self: D, reordering: Reordering) -> D:
        if isinstance(self._node, Rows):
            return self._then(ReorderedRows(self._node, reordering))
        assert isinstance(self._node, Items)
        return self._then(ReorderedItems(self._node, reordering))

    def shuffle(
        self: D,
        buffer_size: int | None = None,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = True,
        *,
        block_size: int | None = None,
    ) -> D:
        """Return the dataset in random order.

        Distributed datasets come in the same order on all ranks, also without a seed.

        Args:
            buffer_size: Elements of a stream that are held in memory to draw from; None holds all of them.
                Rows that can be read by number are permuted as a whole and need no buffer, except in an
                endless dataset, where it is the number of rows to draw from. Only their numbers are permuted, in
                at most 32 MiB however many there are.
            seed: A whole number that fixes the order; None draws one (see ``mpidist.set_seed``).
            reshuffle_each_iteration: Whether each pass has an order of its own, also each one of a later
                ``repeat``; None means True, as in TensorFlow.
            block_size: For rows on a disk that is slow to jump about: blocks of so many consecutive rows come in
                random order, and the rows of ``buffer_size // block_size`` blocks at a time are mixed. Take the rows
                of a chunk or row group, or of about a MiB.

        Raises:
            ValueError: ``buffer_size`` below 1, or left out where the number of elements is endless or
                unknown; a negative seed; ``block_size`` below 1, without ``buffer_size``, or for elements that are
                no rows of a finite dataset.

        >>> from mpidist.input import Dataset
        >>> sorted(int(x) for x in Dataset.range(4).shuffle())
        [0, 1, 2, 3]
        """
        if buffer_size is not None and operator.index(buffer_size) < 1:
            raise ValueError(f"buffer_size is {buffer_size}; expected 1 or more, or None for all elements")
        if seed is not None and operator.index(seed) < 0:
            raise ValueError(f"seed is {seed}; expected 0 or more, or None for one drawn at random")
        rows = isinstance(self._node, Rows)
        if block_size is not None:
            _require_blocks(block_size, buffer_size, self._node)
        if buffer_size is None and (self.cardinality() == INFINITE or (self.cardinality() == UNKNOWN and not rows)):
            raise ValueError(
                f"shuffle() of {self._node}, whose number of elements is endless or unknown, got no "
                "buffer_size; say how many elements to draw from, shuffle(buffer_size=1000), or call "
                "shuffle() before repeat()"
            )
        reshuffles = reshuffle_each_iteration is None or bool(reshuffle_each_iteration)
        return self._reordered(Shuffle(buffer_size, seed_or_drawn(seed), seed is not None, reshuffles, block_size))

    def repeat(self: D, count: int | None = None) -> D:
        """Return the dataset gone through ``count`` times, without end for None or -1.

        >>> from mpidist.input import Dataset
        >>> [int(x) for x in Dataset.range(2).repeat(2)]
        [0, 1, 0, 1]
        """
        times = None if count is None or operator.index(count) < 0 else count
        return self._reordered(Repeat(times))

    def shard(self: D, num_shards: int, index: int) -> D:
        """Return the dataset of every ``num_shards``-th element, beginning with element ``index``.

        ``shard(SHARD_HINT, SHARD_HINT)`` stands for ``shard(W, rank)``: it is filled in when the dataset is
        distributed with ``AutoShardPolicy.HINT``.

        Raises:
            ValueError: ``num_shards`` below 1, or ``index`` not in 0 ... num_shards - 1.

        >>> from mpidist.input import Dataset
        >>> [int(x) for x in Dataset.range(5).shard(2, 1)]
        [1, 3]
        """
        if num_shards == index == SHARD_HINT:
            return self._reordered(ShardHint())
        if operator.index(num_shards) < 1 or not 0 <= operator.index(index) < num_shards:
            raise ValueError(
                f"num_shards is {num_shards} and index {index}; expected num_shards of at least 1 and 0 <= "
                "index < num_shards, for example shard(ctx.num_input_pipelines, ctx.input_pipeline_id)"
            )
        return self._reordered(Shard(num_shards, index))

    def take(self: D, count: int) -> D:
        """Return the dataset of the first ``count`` elements, of all for -1.

        >>> from mpidist.input import Dataset
        >>> [int(x) for x in Dataset.range(5).take(2)]
        [0, 1]
        """
        return self._reordered(Take(operator.index(count)))

    def skip(self: D, count: int) -> D:
        """Return the dataset without its first ``count`` elements, an empty one for -1.

        >>> from mpidist.input import Dataset
        >>> [int(x) for x in Dataset.range(5).skip(3)]
        [3, 4]
        """
        return self._reordered(Skip(operator.index(count)))


def _require_blocks(block_size: int, buffer_size: int | None, node: Node) -> None:
    if operator.index(block_size) < 1:
        raise ValueError(f"block_size is {block_size}; expected 1 or more consecutive rows")
    if buffer_size is None:
        raise ValueError(
            f"block_size is {block_size} and buffer_size None; expected how many rows are mixed at a time, several "
            f"blocks: shuffle(buffer_size={64 * block_size}, block_size={block_size})"
        )
    if not isinstance(node, Rows) or node.cardinality == INFINITE:
        raise ValueError(
            f"block_size is {block_size}, and the elements of {node} are no rows of a finite dataset; "
            "call shuffle(buffer_size, block_size=...) before batch() and repeat(), of a source whose rows are read by "
            "number"
        )


def seed_or_drawn(seed: int | None) -> int:
    """Return ``seed``, or one drawn at random (see ``mpidist.set_seed``)."""
    if seed is None:
        seed = next_seed()
    return secrets.randbits(63) if seed is None else seed
