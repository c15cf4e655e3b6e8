"""Plans of reductions, cached per signature (operation, shapes, dtypes, options).

Equal arguments give equal ids on all ranks. Ranks never negotiate a plan, because the handshake compares the ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpidist.arrays.dtypes import Array, DType, is_half, reduction_dtypes
from mpidist.collectives.channel.operation import Signature, describe, note_text, signature_text
from mpidist.collectives.node.memory import Pool
from mpidist.collectives.node.packing import Pack, copies_of_overlapping, group_by_size
from mpidist.collectives.reduce.registry import Algorithm
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
        formed: Dtype of the reduction and of the result, for each array.
        packs, device_groups: Arrays in host memory and on a GPU that are reduced together. Empty arrays are in none.
        made: Name and instance of the algorithm of each pack, or None before the first call.
        needs_algorithm: Whether the options name an algorithm, or need a fixed order or a 16-bit wire.
        may_be_short: Whether all arrays are in one pack without casts, as the fast path requires.
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
        self.options, self.root = options, root
        self.needs_algorithm = bool(options.algorithm or options.deterministic or options.wire_dtype)
        over = f" over {divisor}" if op is ReduceOp.MEAN else ""
        to = "" if root is None else f" to rank {root}"
        of = f"{signature_text(signature, on_device)}{note_text('as', note)}{_options_text(options)}"
        nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in signature)
        self.description = describe(f"{operation}{to} {op.name}{over}", of, operation=operation, nbytes=nbytes)
        self.shapes = [shape for shape, _ in signature]
        self._is_on_device = on_device or (False,) * len(signature)
        self.formed: list[tuple[DType, DType]] = []
        for (_, dtype), is_on_device in zip(signature, self._is_on_device, strict=True):
            wire, result = reduction_dtypes(dtype, op)
            # The core casts 16-bit arrays itself. It does not reduce arrays on a GPU.
            self.formed.append((result if by_core and is_half(result) and not is_on_device else wire, result))
        self.result_dtypes = [result for _, result in self.formed]
        self.result_signature: Signature = tuple(zip(self.shapes, self.result_dtypes, strict=True))
        self.packs: list[Pack] = []
        self.device_groups: list[DeviceGroup] = []
        self._make_packs(signature, not by_core)
        self.made: list[tuple[str, Algorithm] | None] = [None] * len(self.packs)
        self._empty = [index for index, shape in enumerate(self.shapes) if 0 in shape]
        needs_no_cast = [(dtype, dtype) for _, dtype in signature] == self.formed
        is_one_pack = len(self.packs) == 1 and len(self.packs[0].indices) == len(signature)
        self.may_be_short = is_one_pack and needs_no_cast

    def _make_packs(self, signature: Signature, joins_small: bool) -> None:
        groups: dict[tuple[DType, DType, DType, bool], list[int]] = {}
        # Last arrays first, because in a list of gradients they are ready first.
        for index, (shape, dtype) in reversed(list(enumerate(signature))):
            if 0 not in shape:
                groups.setdefault((*self.formed[index], dtype, self._is_on_device[index]), []).append(index)
        for (dtype, result_dtype, source_dtype, is_on_device), indices in groups.items():
            sizes = [math.prod(self.shapes[index]) * dtype.itemsize for index in indices]
            for group in group_by_size(sizes, self.options.bytes_per_pack):
                members = [indices[k] for k in group]
                if is_on_device:
                    self.device_groups.append(DeviceGroup(members, source_dtype, dtype, result_dtype))
                else:
                    self.packs.append(Pack(members, self.shapes, dtype, source_dtype, result_dtype, joins_small))

    def blank_results(self) -> list[Array]:
        """Return the list of results, with placeholders for all but empty arrays."""
        results = [_PENDING] * len(self.shapes)
        for index in self._empty:
            results[index] = np.empty(*self.result_signature[index])
        return results

    def read_late(self, arrays: Sequence[Array], out: Sequence[Array], pool: Pool) -> Sequence[Array]:
        """Return ``arrays``, with copies of arrays that the results of an earlier pack may overwrite."""
        late = [index for pack in self.packs[1:] for index in pack.indices]
        if not late:
            return arrays
        targets = [out[index] for pack in self.packs for index in pack.indices]
        apart = list(arrays)
        copies = copies_of_overlapping([arrays[index] for index in late], targets, pool)
        for index, copy in zip(late, copies, strict=True):
            apart[index] = copy
        return apart
