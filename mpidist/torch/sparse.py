"""The sum of sparse tensors: all ranks get the elements of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from mpidist.arrays.dtypes import Array
from mpidist.torch.tensors import array_of

if TYPE_CHECKING:
    from torch import Tensor


def gathered_elements(tensor: Tensor, op: str) -> tuple[list[Array], Callable[[list[Array]], None]]:
    """Return the arrays of a sparse tensor, and the function that sums up gathered ones.

    Raises:
        TypeError: Another operation than SUM, or a tensor of another layout than COO, or on a GPU.
    """
    if tensor.is_cuda:
        raise TypeError(
            f"a sparse tensor is on {tensor.device}; expected one in host memory, or a dense one: tensor.cpu() or "
            "tensor.to_dense()"
        )
    if op != "SUM" or tensor.layout is not torch.sparse_coo:
        raise TypeError(f"{op} of {tensor.layout} is not there; expected SUM of torch.sparse_coo, or a dense tensor")
    own = tensor.detach().coalesce()

    def finish(gathered: list[Array]) -> None:
        positions, values = (torch.from_numpy(array) for array in gathered)
        total = torch.sparse_coo_tensor(positions.t(), values, tensor.shape)
        # Not into tensor.detach(), which has a number of elements of its own.
        with torch.no_grad():
            tensor.copy_(total.coalesce())

    return [array_of(own.indices().t()), array_of(own.values())], finish
