"""Tensors of PyTorch as the arrays of a Communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from mpidist.arrays.convert import fill_torch, to_array
from mpidist.arrays.dtypes import Array, as_dtype
from mpidist.torch.ordering import array_on_gpu

if TYPE_CHECKING:
    from torch import Tensor

# NumPy has nothing for them, and to move them is to move their bytes.
_OPAQUE = tuple(dtype for name, dtype in vars(torch).items() if name.startswith("float8"))
# Those that NumPy has, too, and how it writes them.
_OF_NUMPY = {torch.from_numpy(np.empty(0, code)).dtype: np.dtype(code).str for code in "?bhilBefdFD"}


def array_of(tensor: Tensor) -> Array:
    """Return the elements of a tensor as a contiguous array, of CuPy for a GPU.

    It lies over the memory of a tensor that is contiguous.
    """
    _check_dense(tensor)
    if not _is_plain(tensor):
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return _plain_array(tensor)


def target_of(tensor: Tensor) -> tuple[Array, Callable[[], None] | None]:
    """Return an array for a result, and the function that brings it there.

    The function is None where the array lies over the tensor's own memory.
    """
    if _is_plain(tensor):
        return _plain_array(tensor), None
    # A copy, as the elements do not lie one behind the other.
    array = array_of(tensor)
    return array, lambda: fill(tensor, array)


def joined(tensors: Sequence[Tensor]) -> Array:
    """Return the elements of tensors, one tensor after the other, as a new flat array."""
    for tensor in tensors:
        _check_dense(tensor)
    return array_of(torch.cat([_opened(tensor.detach()).reshape(-1) for tensor in tensors]))


def targets_of(tensors: Sequence[Tensor]) -> tuple[list[Array], Callable[[], None] | None]:
    """Return arrays of several tensors for results, and the function that brings these there."""
    if len(tensors) == 1:
        array, bring_one = target_of(tensors[0])
        return [array], bring_one
    opened = [target_of(tensor) for tensor in tensors]
    bringing = [bring for _, bring in opened if bring is not None]

    def bring_all() -> None:
        for bring in bringing:
            bring()

    return [array for array, _ in opened], bring_all if bringing else None


def fill(tensor: Tensor, array: Array) -> None:
    """Copy the elements of an array into a tensor of the same dtype and size."""
    array, tensor = array.reshape(tensor.shape), _opened(tensor)
    if _is_plain(tensor):
        target = _plain_array(tensor)
        if target.dtype != array.dtype:
            raise TypeError(f"the tensor for the result is of dtype {target.dtype}; expected {array.dtype}")
        target[...] = array
    else:
        fill_torch(tensor, array)


class _Memory:
    """The memory of a tensor, as NumPy asks for it. It keeps the tensor alive as long as an array lies over it."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tensor.shape,
            "typestr": _OF_NUMPY[tensor.dtype],
        }


def _plain_array(tensor: Tensor) -> Array:
    tensor = _opened(tensor.detach())
    if tensor.is_cuda:
        return array_on_gpu(tensor)
    if tensor.is_cpu:
        # Tensor.numpy() would keep torch from giving the memory back and taking it again, as FSDP and PowerSGD do.
        if tensor.dtype in _OF_NUMPY:
            return np.asarray(_Memory(tensor))
        if tensor.dtype == torch.bfloat16:
            return np.asarray(_Memory(tensor.view(torch.int16))).view(as_dtype("bfloat16"))
    return to_array(tensor, "tensor")


def memory_of(tensor: Tensor) -> Array | None:
    """Return the array over a tensor's memory, or None.

    It is there for elements that lie one behind the other as NumPy has them.
    """
    if tensor.dtype in _OF_NUMPY and tensor.is_cpu and _is_plain(tensor):
        return np.asarray(_Memory(tensor))
    return None


def _opened(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in _OPAQUE else tensor


def _check_dense(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise TypeError(f"the tensor is {tensor.layout}; expected a dense one: tensor.to_dense()")


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the elements lie one behind the other in memory, as they are."""
    return bool(
        tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    )
