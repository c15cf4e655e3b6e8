"""Plans of reductions, cached per signature (operation, shapes, dtypes, options).

Equal arguments give equal ids on all ranks. Ranks never negotiate a plan, because the handshake compares the ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpidist.arrays.dtypes import Array, DType, is_half, reduction_dtypes
from mpidist.collectives.channel.operation import Signature, describe, note_text, signature_text
from mpidist.collectives.node.memory import Pool
from mpidist.collectives.node.packing import Pack, PackedReduction, copies_of_overlapping, group_by_size
from mpidist.core.nest import flat_kind
from mpidist.core.options import CommunicationOptions, ReduceOp

# Placeholder for a result in a list.
_PENDING = np.empty(0)


def _options_text(options: CommunicationOptions) -> str:
    shown = [
        f"{name}={getattr(options, name)!r}"
        for name in ("bytes_per_pack", "wire_dtype", "error_feedback", "deterministic", "algorithm")
        if getattr(options, name)
    ]
    return f" with {', '.join(shown)}" if shown else ""


class DeviceGroup(NamedTuple):
    """Group arrays on a GPU by the dtypes of source, reduction and result."""

    indices: list[int]
    source: DType
    formed: DType
    result: DType


class ReductionPlan:
    """The plan of an all-reduce, a reduce or a reduce-scatter of a list of arrays.

    Raises TypeError for a dtype that ``op`` cannot reduce.

    Args:
        on_device: Whether each array is on a GPU. Empty if no array is.
        note: Structure of the arrays, or other facts that must be equal on all ranks.
        root: Rank that gets the result. None for all.
        by_core: Whether the core of a node reads small arrays without a copy, and 16-bit arrays without a cast.

    Attributes:
        description: Text and id that must be equal on all ranks.
        in_memory: Indices of the arrays in host memory with elements.
        may_be_short: Whether all arrays are in one pack without casts, as the fast path requires.
        read_late: Indices of the arrays in host memory that may be read after the first results are written.
    """

    def __init__(
        self,
        operation: str,
        op: ReduceOp,
        signature: Signature,
        options: CommunicationOptions,
        divisor: int,
        on_device: tuple[bool, ...] = (),
        note: str = "",
        root: int | None = None,
        by_core: bool = False,
    ) -> None:
        self.op = op
        self.on_device = on_device
        self.divisor = divisor if op is ReduceOp.MEAN and divisor > 1 else None
        self.options = options
        over = f" over {divisor}" if op is ReduceOp.MEAN else ""
        to = "" if root is None else f" to rank {root}"
        of = f"{signature_text(signature, on_device)}{note_text('as', note)}{_options_text(options)}"
        nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in signature)
        self.description = describe(f"{operation}{to} {op.name}{over}", of, operation=operation, nbytes=nbytes)
        self.shapes = [shape for shape, _ in signature]
        self.formed = formed = [reduction_dtypes(dtype, op) for _, dtype in signature]
        if by_core:
            # The core does not reduce arrays on a GPU.
            devices = on_device or (False,) * len(signature)
            self.formed = formed = [
                (to, to) if is_half(to) and not is_on_device else (wire, to)
                for (wire, to), is_on_device in zip(formed, devices, strict=True)
            ]
        self.result_dtypes = [result for _, result in formed]
        self.result_signature: Signature = tuple(zip(self.shapes, self.result_dtypes, strict=True))
        self._counts = [int(np.prod(shape)) for shape in self.shapes]
        self._has_no_blanks = 0 not in self._counts
        self.packs: list[Pack] = []
        self.device_groups: list[DeviceGroup] = []
        self._make_packs(signature, formed, options.bytes_per_pack, not by_core)
        needs_no_cast = [(dtype, dtype) for _, dtype in signature] == formed
        is_one_pack = len(self.packs) == 1 and len(self.packs[0].indices) == len(signature)
        self.may_be_short = is_one_pack and needs_no_cast and flat_kind(note) is not None
        self.in_memory = [index for pack in self.packs for index in pack.indices]
        # The first pack copies its small arrays into a buffer before any result is written.
        self.read_late = [
            index for number, pack in enumerate(self.packs) for index in (pack.indices if number else pack.apart)
        ]

    def _make_packs(
        self, signature: Signature, formed: list[tuple[DType, DType]], bytes_per_pack: int, joins_small: bool
    ) -> None:
        groups: dict[tuple[DType, DType, DType, bool], list[int]] = {}
        on_device = self.on_device or (False,) * len(signature)
        # Last arrays first, because in a list of gradients they are ready first.
        for index in reversed(range(len(signature))):
            if self._counts[index]:
                kind = (formed[index][0], signature[index][1], formed[index][1], on_device[index])
                groups.setdefault(kind, []).append(index)
        for (dtype, source_dtype, result_dtype, is_on_device), indices in groups.items():
            sizes = [self._counts[i] * dtype.itemsize for i in indices]
            for group in group_by_size(sizes, bytes_per_pack):
                members = [indices[k] for k in group]
                if is_on_device:
                    self.device_groups.append(DeviceGroup(members, source_dtype, dtype, result_dtype))
                else:
                    self.packs.append(Pack(members, self.shapes, dtype, source_dtype, result_dtype, joins_small))

    def reduction(
        self,
        pack: Pack,
        arrays: Sequence[Array],
        out: Sequence[Array] | None,
        pool: Pool,
        more: Sequence[Sequence[Array]] = (),
    ) -> PackedReduction:
        """Return the job of an algorithm for ``pack``. ``more`` are the arrays of further replicas of this rank."""
        targets = None if out is None else pack.targets(out, pool)
        inputs, *others = [pack.inputs(replica, pool) for replica in (arrays, *more)]
        return PackedReduction(pack, inputs, others, targets, self.op, self.divisor, self.options, pool)

    def blank_results(self, out: Sequence[Array] | None, on_device: Mapping[int, Array] | None = None) -> list[Array]:
        """Return the list of results, with placeholders for results in host memory."""
        if out is not None:
            return list(out)
        if self._has_no_blanks and not on_device:
            return [_PENDING] * len(self.shapes)
        results = [
            np.empty(shape, dtype) if count == 0 else _PENDING
            for shape, dtype, count in zip(self.shapes, self.result_dtypes, self._counts, strict=True)
        ]
        for index, result in (on_device or {}).items():
            results[index] = result
        return results

    def deliver_alone(self, arrays: Sequence[Array], results: list[Array], *, are_given: bool, pool: Pool) -> None:
        """Write the results of a single rank in host memory to ``results``, as ``Pack.deliver`` does."""
        here = self.in_memory
        if are_given:
            moved = [index for index in here if arrays[index] is not results[index]]
            targets = [results[index] for index in here]
            sources = copies_of_overlapping([arrays[index] for index in moved], targets, pool)
        else:
            moved, sources = here, [arrays[index] for index in here]
            for index in here:
                results[index] = pool.take(*self.result_signature[index])
        for index, source in zip(moved, sources, strict=True):
            np.copyto(results[index], source)
        if self.divisor is not None:
            for index in here:
                result, (formed, _) = results[index], self.formed[index]
                np.true_divide(result, self.divisor, out=result, dtype=formed, casting="unsafe")
