"""Reductions by all-reduce over packed arrays: HierarchicalCopyAllReduce and NcclAllReduce."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import pairwise

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.collectives import Communicator
from mpidist.core.enums import ReduceOp
from mpidist.core.options import CommunicationOptions
from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps

_ONE_PACK_EACH = CommunicationOptions(bytes_per_pack=1)


class AllReduceCrossDeviceOps(CrossDeviceOps):
    """All-reduce in a fixed number of packs.

    Args:
        num_packs: The arrays are flattened into one vector per dtype, which is cut into this many pieces, the
            last with the remainder; 0 sends every array by itself.
        comm: See ``CrossDeviceOps``.

    Raises:
        ValueError: ``num_packs`` is negative.
    """

    def __init__(self, num_packs: int = 1, comm: Communicator | None = None) -> None:
        if num_packs < 0:
            raise ValueError(f"num_packs is {num_packs}; expected 0 (no packing) or more")
        super().__init__(comm)
        self.num_packs = num_packs

    @property
    def leaves_all_to_engine(self) -> bool:
        """See ``CrossDeviceOps``."""
        return self.num_packs == 1

    def _between_ranks(
        self,
        op: ReduceOp,
        arrays: list[Array],
        divisor: int,
        options: CommunicationOptions | None,
        structure: str = "",
    ) -> list[Array]:
        if self.num_packs == 1:
            return super()._between_ranks(op, arrays, divisor, options, structure)
        each = _ONE_PACK_EACH if options is None else replace(options, bytes_per_pack=1)
        if self.num_packs == 0:
            return super()._between_ranks(op, arrays, divisor, each, structure)
        results: list[Array] = [arrays[0]] * len(arrays)
        for dtype in dict.fromkeys(array.dtype for array in arrays):
            indices = [i for i, array in enumerate(arrays) if array.dtype == dtype]
            flat = np.concatenate([arrays[i].reshape(-1) for i in indices])
            pieces = super()._between_ranks(op, split_flat(flat, self.num_packs), divisor, each, structure)
            total = np.concatenate(pieces)
            start = 0
            for i in indices:
                results[i] = total[start : start + arrays[i].size].reshape(arrays[i].shape)
                start += arrays[i].size
        return results


def split_flat(flat: Array, num_packs: int) -> list[Array]:
    """Cut a flat array into ``num_packs`` pieces of equal length, the last with the remainder.

    >>> [len(piece) for piece in split_flat(np.arange(5), 2)]
    [2, 3]
    """
    length = len(flat) // num_packs
    cuts = [length * k for k in range(num_packs)] + [len(flat)]
    return [flat[a:b] for a, b in pairwise(cuts)]


class HierarchicalCopyAllReduce(AllReduceCrossDeviceOps):
    """Reduces inside each node, then between the nodes (tf.distribute.HierarchicalCopyAllReduce).

    Args:
        num_packs: See ``AllReduceCrossDeviceOps``.
        comm: See ``CrossDeviceOps``.
    """

    algorithm = "hierarchical"


class NcclAllReduce(AllReduceCrossDeviceOps):
    """All-reduce by NCCL between GPUs (tf.distribute.NcclAllReduce); arrays in host memory go by MPI.

    A warning, once, says so when an array in host memory is reduced.

    Args:
        num_packs: See ``AllReduceCrossDeviceOps``.
        comm: See ``CrossDeviceOps``.
    """

    def __init__(self, num_packs: int = 1, comm: Communicator | None = None) -> None:
        super().__init__(num_packs, comm)
        self._has_warned = False

    @property
    def leaves_all_to_engine(self) -> bool:
        """See ``CrossDeviceOps``."""
        return False

    def _between_ranks(
        self,
        op: ReduceOp,
        arrays: list[Array],
        divisor: int,
        options: CommunicationOptions | None,
        structure: str = "",
    ) -> list[Array]:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "NcclAllReduce was given arrays in host memory, which NCCL cannot reduce: they go by MPI. "
                "Use CollectiveAllReduce or HierarchicalCopyAllReduce for arrays on the CPU",
                stacklevel=2,
            )
        return super()._between_ranks(op, arrays, divisor, options, structure)
