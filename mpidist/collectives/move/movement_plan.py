"""Plans of all-gather and broadcast, worked out once per signature and kept.

See ``mpidist.collectives.reduce.plan`` for those of reductions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mpidist.arrays.dtypes import Array, check_transportable
from mpidist.collectives.channel.operation import Signature, describe, note_text, signature_text


class GatherPlan:
    """The plan for a list of arrays to be concatenated over ranks.

    Args:
        axis: Along which; the arrays of other ranks may differ in length there.
        signature: Shape and dtype of each array.
        note: Further facts that all ranks must agree on, such as the structure that the arrays came from.
        on_device: Whether they go from GPU to GPU, on all ranks.

    Attributes:
        description: The text and id that all ranks have to agree on.
        row_sizes: Elements of each array per index of the axis.
        positions: The axis of each array, counted from 0.

    Raises:
        TypeError: A dtype that cannot be sent.
        ValueError: An array does not have the axis.
    """

    def __init__(self, axis: int, signature: Signature, note: str = "", on_device: bool = False) -> None:
        parts = []
        self.positions: list[int] = []
        self.row_sizes: list[int] = []
        for shape, dtype in signature:
            check_transportable(dtype, "all_gather")
            position = check_has_axis(len(shape), axis, "all_gather")
            shown = ", ".join("*" if i == position else str(n) for i, n in enumerate(shape))
            parts.append(f"{dtype.name}({shown})")
            self.positions.append(position)
            self.row_sizes.append(math.prod(shape[:position] + shape[position + 1 :]))
        place = " on GPUs" if on_device else ""
        of = f"{', '.join(parts)}{place}{note_text('as', note)}"
        nbytes = _bytes_of(signature)
        self.description = describe(f"all_gather along axis {axis}", of, operation="all_gather", nbytes=nbytes)

    def moved(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the arrays with the axis first."""
        return [
            np.moveaxis(array, position, 0) if position else array
            for array, position in zip(arrays, self.positions, strict=True)
        ]

    def result(self, index: int, moved: Array) -> Array:
        """Return array ``index`` of the result, given it with the axis first."""
        position = self.positions[index]
        return np.moveaxis(moved, 0, position) if position else moved


class DealPlan:
    """The plan for a list of arrays whose rows go from some ranks to some.

    Args:
        name: Of the collective.
        root: The rank that gives, or takes, if only one does.
        signature: Shape and dtype of each array; ranks may have other numbers of rows.
        note: Further facts that all ranks must agree on.
        compares: Whether each rank says how many rows it expects.

    Attributes:
        description: The text and id that all ranks have to agree on.
        row_shapes: Of each array.
        row_bytes: Of each array.

    Raises:
        TypeError: A dtype that cannot be sent.
        ValueError: An array has no rows.
    """

    def __init__(
        self, name: str, root: int | None, signature: Signature, note: str = "", compares: bool = False
    ) -> None:
        parts = []
        for shape, dtype in signature:
            check_transportable(dtype, name)
            check_has_axis(len(shape), 0, name)
            parts.append(f"{dtype.name}({', '.join(['*', *map(str, shape[1:])])})")
        at = "" if root is None else f" {'to' if name == 'gather' else 'from'} rank {root}"
        of = f"{', '.join(parts)}{note_text('as', note)}{' with expected rows' if compares else ''}"
        self.description = describe(f"{name}{at}", of, operation=name, nbytes=_bytes_of(signature))
        self.row_shapes = [shape[1:] for shape, _ in signature]
        self.row_bytes = [math.prod(shape[1:]) * dtype.itemsize for shape, dtype in signature]


class BroadcastPlan:
    """The plan for a list of arrays to be broadcast.

    Args:
        root: The rank whose arrays it is.
        signature: Shape and dtype of each array.
        note: Further facts that all ranks must agree on.
        on_device: Whether they go from GPU to GPU, on all ranks.

    Attributes:
        description: The text and id that all ranks have to agree on.

    Raises:
        TypeError: A dtype that cannot be sent.
    """

    def __init__(self, root: int, signature: Signature, note: str = "", on_device: bool = False) -> None:
        for _, dtype in signature:
            check_transportable(dtype, "broadcast")
        self.root = root
        of = f"{signature_text(signature)}{' on GPUs' if on_device else ''}{note_text('for', note)}"
        nbytes = _bytes_of(signature)
        self.description = describe(f"broadcast from rank {root}", of, operation="broadcast", nbytes=nbytes)


def _bytes_of(signature: Signature) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in signature)


def check_has_axis(rank: int, axis: int, method: str) -> int:
    """Return ``axis`` counted from 0, after checking that an array with ``rank`` dimensions has it."""
    if rank == 0:
        raise ValueError(f"{method} was given a scalar; expected an array with at least one axis: value[None]")
    if not -rank <= axis < rank:
        raise ValueError(
            f"{method} along axis {axis!r} of an array of rank {rank}; expected an axis from {-rank} to {rank - 1}"
        )
    return axis % rank
