"""Global batches that all replicas can share equally, as the iterators of v1 demand them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mpidist.input.dataset import Dataset
from mpidist.input.elements import as_element, row_count
from mpidist.input.item_steps import SameItems
from mpidist.input.pipeline import Items, Node
from mpidist.input.reordering import Pass
from mpidist.input.skipping import last_batching

_END = object()


class EvenBatches(SameItems):
    """The same batches, whose rows are counted: only the last one may be no multiple of the number of replicas.

    Args:
        source: The batches.
        replicas: Number of replicas.
    """

    def __init__(self, source: Node, replicas: int) -> None:
        super().__init__(source, f"shared_by({replicas})")
        self.replicas = replicas
        if isinstance(source, Items):
            self.table, self.read_ahead = source.table, source.read_ahead

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the batches.

        Raises:
            ValueError: One that is not the last cannot be shared equally, or one that is no smaller than a whole batch.
        """
        source, by_number = self.source, self.table is not None
        batches = source.items(run) if by_number and isinstance(source, Items) else source.elements(run)
        made = last_batching(self.source)
        whole = 0 if made is None or made.size % self.replicas else made.size
        for batch in batches:
            rows = len(batch) if by_number else row_count(as_element(batch))
            if rows % self.replicas and (rows >= whole or next(batches, _END) is not _END):
                raise uneven(rows, self.replicas)
            whole = max(whole, rows)
            yield batch

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return other batches, whose rows are counted."""
        return EvenBatches(inputs[0], self.replicas)


def with_even_batches(dataset: Dataset, replicas: int) -> Dataset:
    """Return ``dataset``, whose batches are looked at while they come if their size is not known beforehand.

    Raises:
        ValueError: The size is known, and no multiple of the number of replicas.
    """
    node = dataset._node
    size = node.batch_size() if node.batched else None
    if size is None:
        return dataset._then(EvenBatches(node, replicas))
    if size % replicas:
        raise uneven(size, replicas)
    return dataset


def uneven(rows: int, replicas: int) -> ValueError:
    """Return the error for a batch that replicas cannot share equally."""
    return ValueError(
        f"the dataset has batches of {rows} rows, which {replicas} replicas in sync cannot share equally; expected a "
        f"multiple of {replicas}, or use make_input_fn_iterator(input_fn) or experimental_distribute_dataset(dataset), "
        "which takes any size"
    )
