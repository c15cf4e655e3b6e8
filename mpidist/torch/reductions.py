"""The operations of torch's reductions, in terms of a Communicator's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch.distributed as dist

from mpidist.arrays.dtypes import Array
from mpidist.torch.foreign import Foreign
from mpidist.torch.results import nothing

_Kind: Foreign = dist.ReduceOp.RedOpType
# By their numbers, which a ReduceOp hashes to: to compare two takes as long as a small all-reduce.
SUM = int(_Kind.SUM)
_NAMES = {
    SUM: "SUM",
    int(_Kind.AVG): "MEAN",
    int(_Kind.PRODUCT): "PROD",
    int(_Kind.MIN): "MIN",
    int(_Kind.MAX): "MAX",
    int(_Kind.BAND): "BAND",
    int(_Kind.BOR): "BOR",
    int(_Kind.BXOR): "BXOR",
}
# Of bools, as bytes that are 0 or 1: a sum is whether any is true, a product whether all are.
_OF_BOOLS = {"SUM": "MAX", "MAX": "MAX", "BOR": "MAX", "PROD": "MIN", "MIN": "MIN", "BAND": "MIN", "BXOR": "BXOR"}


class Reduction:
    """One operation, for the tensors of a call, which have one dtype or several.

    Args:
        op: torch's ReduceOp.
        size: Of the group.

    Attributes:
        op: The Communicator's name for it.
    """

    def __init__(self, op: Foreign, size: int) -> None:
        name = _NAMES.get(hash(op))
        if name is None:
            raise ValueError(
                f"mpidist has no reduction {op.op}; expected one of SUM, AVG, PRODUCT, MIN, MAX, BAND, ..."
            )
        self.op, self._asked = name, name
        self._size, self._divides = size, False

    def opened(self, array: Array) -> Array:
        """Return an array as the Communicator reduces it: a view of the same memory."""
        op = self._asked
        if array.dtype == np.bool_:
            if op == "MEAN":
                raise TypeError("a mean of bools is not defined; cast the tensor first: tensor.float()")
            op, array = _OF_BOOLS[op], array.view(np.uint8)
        elif op == "MEAN" and array.dtype.kind in "iu":
            # torch reduces in place: the mean of integers is an integer, rounded down.
            op, self._divides = "SUM", True
        if self.op not in (op, self._asked):
            raise TypeError(f"{self._asked} of tensors of these dtypes in one go is not there; reduce each by itself")
        self.op = op
        return array

    def finisher(self, arrays: Sequence[Array], bring: Callable[[], None] | None) -> Callable[[object], None]:
        """Return the function that brings the results in ``arrays`` into the tensors."""

        if bring is None and not self._divides:
            return nothing

        def finish(_: object) -> None:
            if self._divides:
                for array in arrays:
                    array //= self._size
            if bring is not None:
                bring()

        return finish
