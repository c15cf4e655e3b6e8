"""Arithmetic on tensors of PyTorch and arrays of JAX, which keeps their gradients.

Neither library is imported here: a value of theirs can only exist where its program has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays.convert import is_jax, is_torch
from mpidist.arrays.dtypes import DType

if TYPE_CHECKING:
    import jax
    import torch


class TorchArithmetic:
    """Arithmetic of PyTorch."""

    def __init__(self) -> None:
        self._torch = sys.modules["torch"]

    def array(self, value: object, like: torch.Tensor | None = None, what: str = "value") -> torch.Tensor:
        """Return ``value`` as a tensor, on the device of ``like``; lists of tensors are stacked."""
        if is_torch(value):
            return value if like is None else value.to(like.device)
        if isinstance(value, Sequence) and arithmetic_of(value) is not None:
            return self._torch.stack([self.array(part, like) for part in value])
        array = np.asarray(value)
        # PyTorch takes neither negative strides nor bytes in another order, and warns of what is read-only.
        array = np.array(array, array.dtype.newbyteorder("="), order="C")
        return self._torch.as_tensor(array, device=None if like is None else like.device)

    def result_dtype(self, array: torch.Tensor) -> torch.dtype:
        """Return the dtype of an average of ``array``: its own, or float64 for whole numbers."""
        is_inexact = array.dtype.is_floating_point or array.dtype.is_complex
        return array.dtype if is_inexact else self._torch.float64

    def wide_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which values of ``dtype`` are added: float32 at least."""
        return self._torch.float32 if dtype.itemsize < 4 else dtype

    def cast(self, array: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ``array`` in ``dtype``."""
        return array.to(dtype)

    def current(self, array: torch.Tensor) -> AbstractContextManager[None]:
        """Return a block in which ``array`` can be computed with: it knows where it is."""
        return nullcontext()


class JaxArithmetic:
    """Arithmetic of JAX, also while it traces a function (``jax.jit``, ``jax.grad``)."""

    def __init__(self) -> None:
        self._jnp = sys.modules["jax"].numpy

    def array(self, value: object, like: jax.Array | None = None, what: str = "value") -> jax.Array:
        """Return ``value`` as an array of JAX."""
        if isinstance(value, Sequence) and arithmetic_of(value) is not None:
            return self._jnp.stack([self.array(part, like) for part in value])
        return self._jnp.asarray(value)

    def result_dtype(self, array: jax.Array) -> DType:
        """Return the dtype of an average: the array's, or JAX's default for whole numbers."""
        jnp = self._jnp
        dtype: DType = array.dtype if jnp.issubdtype(array.dtype, jnp.inexact) else jnp.result_type(float)
        return dtype

    def wide_dtype(self, dtype: DType) -> DType:
        """Return the dtype in which values of ``dtype`` are added: float32 at least."""
        return self._jnp.dtype(self._jnp.float32) if dtype.itemsize < 4 else dtype

    def cast(self, array: jax.Array, dtype: DType) -> jax.Array:
        """Return ``array`` in ``dtype``."""
        return array.astype(dtype)

    def current(self, array: jax.Array) -> AbstractContextManager[None]:
        """Return a block in which ``array`` can be computed with: it knows where it is."""
        return nullcontext()


def arithmetic_of(*values: object) -> TorchArithmetic | JaxArithmetic | None:
    """Return the arithmetic for the first tensor of PyTorch or array of JAX, or None.

    The values may be lists of them.

    >>> arithmetic_of(1.5, [2.5]) is None
    True
    """
    for value in values:
        if is_torch(value):
            return TorchArithmetic()
        if is_jax(value):
            return JaxArithmetic()
        if isinstance(value, (list, tuple)) and (found := arithmetic_of(*value)) is not None:
            return found
    return None
