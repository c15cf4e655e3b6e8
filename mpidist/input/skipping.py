"""Pipelines without their first elements, for going on in the middle of a pass: nothing is read that need not be."""

from __future__ import annotations

from mpidist.input.item_steps import Batches, Mapped, PrefetchedItems, ReorderedItems, Zipped
from mpidist.input.pipeline import Node, Rows, require_items
from mpidist.input.reordering import Skip
from mpidist.input.row_steps import PrefetchedRows, ReorderedRows

_PASS_ON = (Mapped, PrefetchedItems, PrefetchedRows)


def skip_elements(node: Node, count: int) -> Node:
    """Return the pipeline without its first ``count`` elements.

    Rows that are known by number are not read, and functions after ``batch`` are not called for what is skipped;
    elements of a stream have to be read. Shuffles and repetitions give the same order as without skipping.

    >>> from mpidist.input import Dataset
    >>> print(skip_elements(Dataset.range(10).batch(2).map(len)._node, 3))
    range(0, 10).skip(6).batch(2).map
    """
    if count == 0:
        return node
    if isinstance(node, (*_PASS_ON, Zipped)):
        return node.with_inputs([skip_elements(before, count) for before in node.inputs])
    if isinstance(node, Batches):
        return node.with_inputs([skip_elements(node.source, count * node.size)])
    if isinstance(node, Rows):
        return ReorderedRows(node, Skip(count))
    return ReorderedItems(require_items(node), Skip(count))


def last_batching(node: Node) -> Batches | None:
    """Return the ``batch`` that makes the elements of the pipeline, None where something else may choose among them."""
    while isinstance(node, _PASS_ON):
        (node,) = node.inputs
    return node if isinstance(node, Batches) else None


def skip_rows(node: Node, count: int) -> Node:
    """Return the pipeline with batches of what comes after ``count`` rows.

    Args:
        node: With a :func:`last_batching`.
        count: Rows, or elements of a stream, before ``batch``.

    >>> from mpidist.input import Dataset
    >>> print(skip_rows(Dataset.range(10).batch(4).map(len)._node, 3))
    range(0, 10).skip(3).batch(4).map
    """
    if count == 0:
        return node
    (before,) = node.inputs
    return node.with_inputs([skip_elements(before, count) if isinstance(node, Batches) else skip_rows(before, count)])


def outline(node: Node, mask_batch_size: bool = True) -> str:
    """Return a text of the pipeline that is the same for all that give the same rows in the same order.

    Args:
        node: The pipeline.
        mask_batch_size: Whether the size of its :func:`last_batching` does not count.

    >>> from mpidist.input import Dataset
    >>> outline(Dataset.range(10).batch(4).prefetch(2)._node)
    'range(0, 10).batch(*)'
    """
    if isinstance(node, (PrefetchedItems, PrefetchedRows)):
        return outline(node.inputs[0], mask_batch_size)
    inside = [outline(before, mask_batch_size and isinstance(node, Mapped)) for before in node.inputs]
    text = node.identity
    if mask_batch_size and isinstance(node, Batches):
        text = node.text_of_size("*")
    if len(inside) == 1:
        return f"{inside[0]}.{text}"
    return f"{text}({', '.join(inside)})" if inside else text
