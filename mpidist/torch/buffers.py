"""The buffers of a replica's module, as statistics of BatchNorm, which become the first replica's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpidist.core.context import ReplicaContextLike
from mpidist.core.options import ReduceOp
from mpidist.torch.foreign import Foreign
from mpidist.torch.tensors import array_of

if TYPE_CHECKING:
    from torch import Tensor


class SharedBuffers:
    """The buffers of one replica's module on their way from the first replica.

    All replicas but the first contribute zeros, bit by bit, so that every dtype arrives as it is.

    Args:
        module: Of the replica.
    """

    def __init__(self, module: Foreign) -> None:
        found = {id(buffer): (owner, name) for owner, name, buffer in _buffers_of(module)}
        self._places = sorted(found.values(), key=lambda place: -getattr(*place).element_size())
        sizes = [_nbytes(buffer) for buffer in self._tensors()]
        self._bytes = torch.zeros(sum(sizes), dtype=torch.uint8)
        self._array = array_of(self._bytes)
        # The widest come first, so that each begins at a multiple of its element.
        parts = self._bytes.split(sizes) if sizes else ()
        self._views = [
            part.view(buffer.dtype).view(buffer.shape) for part, buffer in zip(parts, self._tensors(), strict=True)
        ]
        self._work: Foreign = None

    def _tensors(self) -> list[Tensor]:
        return [getattr(owner, name) for owner, name in self._places]

    def start(self, context: ReplicaContextLike) -> None:
        """Start to fetch the buffers of the first replica (collective)."""
        if not self._places:
            return
        if context.replica_id_in_sync_group == 0:
            _copy(self._tensors(), self._views)
        else:
            self._bytes.zero_()
        context_: Foreign = context
        self._work = context_.all_reduce_async(ReduceOp.BOR, self._array, out=self._array)

    def finish(self, context: ReplicaContextLike) -> None:
        """Wait for the buffers, and take them over."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        if context.replica_id_in_sync_group:
            _copy(self._views, self._tensors())


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _buffers_of(module: Foreign) -> list[tuple[Foreign, str, Tensor]]:
    return [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if buffer.numel()
    ]


def _nbytes(tensor: Tensor) -> int:
    nbytes: int = tensor.numel() * tensor.element_size()
    return nbytes
