"""Global batches that replicas share equally, for the iterators of v1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mpidist.input.batching import last_batching
from mpidist.input.dataset import Dataset, graph_and_options
from mpidist.input.elements import as_element, row_count
from mpidist.input.graph import Form, Pass, PassThrough

_END = object()


@dataclass(eq=False, repr=False)
class EvenBatches(PassThrough):
    """The same batches, with their rows counted.

    Only the last one may be no multiple of the number of replicas.

    Args:
        replicas: Number of replicas.
    """

    replicas: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.text = f"shared_by({self.replicas})"
        if self.form is Form.ROWS:  # an element is a batch: its rows are counted once it is read
            self.form, self.table, self.read_ahead = Form.ELEMENTS, None, 0

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the batches.

        Raises:
            ValueError: One that is not the last cannot be shared equally, or one that is no smaller than a whole batch.
        """
        by_number = self.form is Form.BATCHES
        batches: Iterator[Any] = self.source.items(run) if by_number else self.source.elements(run)
        made = last_batching(self.source)
        whole = 0 if made is None or made.size % self.replicas else made.size
        for batch in batches:
            rows = len(batch) if by_number else row_count(as_element(batch))
            if rows % self.replicas and (rows >= whole or next(batches, _END) is not _END):
                raise uneven(rows, self.replicas)
            whole = max(whole, rows)
            yield batch


def with_even_batches(dataset: Dataset, replicas: int) -> Dataset:
    """Return ``dataset`` with batches that replicas can share equally.

    Batches whose size is not known beforehand are checked as they come.

    Raises:
        ValueError: The size is known, and no multiple of the number of replicas.
    """
    node, options = graph_and_options(dataset)
    size = node.batch_size() if node.batched else None
    if size is None:
        return Dataset(EvenBatches((node,), replicas), options)
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
