"""Plans: what one call of a reduction does, worked out once per signature and kept.

A plan is found by what the caller passed (operation, shapes, dtypes, options) and carries an id that is the
same on all ranks that passed the same. It is never negotiated: the handshake compares the ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.arrays.dtypes import DType, reduction_dtypes
from mpidist.collectives.handshake import plan_id
from mpidist.collectives.memory import Pool
from mpidist.collectives.packing import Pack, Reduction, group_by_size
from mpidist.core.enums import ReduceOp
from mpidist.core.options import CommunicationOptions

_TO_COME = np.empty(0)
Signature = tuple[tuple[tuple[int, ...], DType], ...]


def signature_of(arrays: Sequence[Array]) -> Signature:
    """Return shape and dtype of each array."""
    return tuple([(array.shape, array.dtype) for array in arrays])


def signature_text(signature: Signature) -> str:
    """Return shapes and dtypes as text, runs of equal ones once.

    >>> signature_text((((2, 3), np.dtype("f4")), ((2, 3), np.dtype("f4"))))
    '2 x float32(2, 3)'
    """
    parts: list[tuple[str, int]] = []
    for shape, dtype in signature:
        text = f"{dtype.name}{shape}"
        if parts and parts[-1][0] == text:
            parts[-1] = (text, parts[-1][1] + 1)
        else:
            parts.append((text, 1))
    return ", ".join(text if count == 1 else f"{count} x {text}" for text, count in parts) or "nothing"


def _options_text(options: CommunicationOptions) -> str:
    shown = [
        f"{name}={getattr(options, name)!r}"
        for name in ("bytes_per_pack", "wire_dtype", "error_feedback", "deterministic", "algorithm")
        if getattr(options, name)
    ]
    return f" with {', '.join(shown)}" if shown else ""


class ReductionPlan:
    """How a list of arrays is reduced.

    Args:
        kind: ``"all_reduce"``, ``"reduce to rank 0"`` or the like.
        op: The operation.
        signature: Shape and dtype of each array.
        options: Packing and algorithm.
        divisor: What a mean divides the sum by.
        most_inline: How many numbers may travel in the handshake.
        note: What else all ranks must agree on, such as the structure that the arrays came from.

    Raises:
        TypeError: A dtype that ``op`` cannot reduce.
    """

    def __init__(
        self,
        kind: str,
        op: ReduceOp,
        signature: Signature,
        options: CommunicationOptions,
        divisor: int,
        most_inline: int,
        note: str = "",
    ) -> None:
        self.op = op
        self.divisor = divisor if op is ReduceOp.MEAN else None
        self.options = options
        over = f" over {divisor}" if op is ReduceOp.MEAN else ""
        structure = f" as {note}" if note else ""
        self.text = f"{kind} {op.name}{over} of {signature_text(signature)}{structure}{_options_text(options)}"
        self.id = plan_id(self.text)
        self.shapes = [shape for shape, _ in signature]
        self.formed = formed = [reduction_dtypes(dtype, op) for _, dtype in signature]
        self.result_dtypes = [result for _, result in formed]
        self.result_signature: Signature = tuple(zip(self.shapes, self.result_dtypes, strict=True))
        self._counts = [int(np.prod(shape)) for shape in self.shapes]
        self.count = sum(self._counts)
        self.inline = (
            options.algorithm is None
            and not options.deterministic
            and op in (ReduceOp.SUM, ReduceOp.MEAN)
            and self.count <= most_inline
            and all(
                dtype.itemsize <= 8 and wire.kind == "f" and dtype == result
                for (_, dtype), (wire, result) in zip(signature, formed, strict=True)
            )
        )
        self.packs = self._make_packs(signature, formed, options.bytes_per_pack)

    def _make_packs(self, signature: Signature, formed: list[tuple[DType, DType]], bytes_per_pack: int) -> list[Pack]:
        by_dtype: dict[tuple[DType, DType, DType], list[int]] = {}
        # Last arrays first: in a list of gradients they are ready first.
        for index in reversed(range(len(signature))):
            if self._counts[index]:
                by_dtype.setdefault((formed[index][0], signature[index][1], formed[index][1]), []).append(index)
        packs = []
        for dtypes, indices in by_dtype.items():
            sizes = [self._counts[i] * dtypes[0].itemsize for i in indices]
            for group in group_by_size(sizes, bytes_per_pack):
                packs.append(Pack([indices[k] for k in group], self.shapes, *dtypes))
        return packs

    def reduction(self, pack: Pack, arrays: Sequence[Array], out: Sequence[Array] | None, pool: Pool) -> Reduction:
        """Return what an algorithm has to do for ``pack``."""
        targets = None if out is None else pack.targets(out, pool)
        return Reduction(pack, pack.inputs(arrays, pool), targets, self.op, self.divisor, self.options, pool)

    def blank_results(self, out: Sequence[Array] | None) -> list[Array]:
        """Return a list of results in which those without elements are there already."""
        if out is not None:
            return list(out)
        return [
            np.empty(shape, dtype) if count == 0 else _TO_COME
            for shape, dtype, count in zip(self.shapes, self.result_dtypes, self._counts, strict=True)
        ]

    def fill_inline(self, arrays: Sequence[Array], payload: Array) -> None:
        """Put all elements into the payload of the handshake."""
        if len(arrays) == 1:
            array = arrays[0]
            payload[:] = array if array.ndim == 1 else array.reshape(-1)
            return
        start = 0
        for array, count in zip(arrays, self._counts, strict=True):
            payload[start : start + count] = array.reshape(-1)
            start += count

    def from_inline(self, totals: Array, out: Sequence[Array] | None) -> list[Array]:
        """Return the results that came with the handshake."""
        if out is None and self.shapes == [()]:
            total = totals[0] if self.divisor is None else totals[0] / self.divisor
            return [np.array(total, self.result_dtypes[0])]
        results = []
        start = 0
        for index, (shape, count) in enumerate(zip(self.shapes, self._counts, strict=True)):
            part = totals[start : start + count].reshape(shape)
            if self.divisor is not None:
                part = part / self.divisor
            if out is None:
                results.append(np.array(part, self.result_dtypes[index]))
            else:
                out[index][...] = part
                results.append(out[index])
            start += count
        return results
