"""The last step of a collective: its result goes into the tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from mpidist.arrays.dtypes import Array
from mpidist.torch.tensors import array_of, fill

if TYPE_CHECKING:
    from torch import Tensor

# Brings the result of a Communicator's method into the tensors; returns the rank that a message came from.
Finish = Callable[[Any], int | None]


def nothing(_: object) -> None:
    """Leave the result alone."""


def bringing(bring: Callable[[], None] | None) -> Finish:
    """Return a function that calls ``bring``, if there is one."""
    if bring is None:
        return nothing
    return lambda _: bring()


def filling(tensors: Sequence[Tensor]) -> Finish:
    """Return a function that copies each row of a result into one tensor."""

    def finish(rows: Array) -> None:
        for tensor, row in zip(tensors, rows, strict=True):
            fill(tensor, row)

    return finish


def filling_flat(tensors: Sequence[Tensor]) -> Finish:
    """Return a function that deals the elements of a flat result to tensors."""

    def finish(flat: Array) -> None:
        borders = list(accumulate([tensor.numel() for tensor in tensors], initial=0))
        if len(flat) != borders[-1]:
            raise ValueError(f"{len(flat)} elements came; expected {borders[-1]}, as the tensors for them have")
        for tensor, (start, end) in zip(tensors, pairwise(borders), strict=True):
            fill(tensor, flat[start:end])

    return finish


def gathered_parts(tensor: Tensor, parts: Sequence[Tensor]) -> tuple[Array, Finish]:
    """Return the array of a tensor to gather, and the function that fills the results.

    Where they have the shape of the tensor, ranks compare their shapes.
    """
    array = array_of(tensor)
    if {part.shape for part in parts} == {tensor.shape}:
        return array[None], filling(parts)
    return array.reshape(-1), filling_flat(parts)
