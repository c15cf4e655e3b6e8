"""Arithmetic on arrays of libraries that record gradients, PyTorch's and JAX's, so that what is computed keeps them.

Neither library is imported here: a value of theirs can only exist where its program has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from mpidist.arrays.convert import is_jax, is_torch


class TorchArithmetic:
    """What PyTorch computes with."""

    def __init__(self) -> None:
        self._torch = sys.modules["torch"]

    def array(self, value: Any, like: Any = None, what: str = "value") -> Any:
        """Return ``value`` as a tensor, on the device of ``like``; several tensors in a list are stacked."""
        if is_torch(value):
            return value if like is None else value.to(like.device)
        if isinstance(value, Sequence) and arithmetic_of(value) is not None:
            return self._torch.stack([self.array(part, like) for part in value])
        array = np.asarray(value)
        # PyTorch takes neither negative strides nor bytes in another order, and warns of what is read-only.
        array = np.array(array, array.dtype.newbyteorder("="), order="C")
        return self._torch.as_tensor(array, device=None if like is None else like.device)

    def result_dtype(self, array: Any) -> Any:
        """Return the dtype of an average of ``array``: its own, or float64 for whole numbers."""
        is_inexact = array.dtype.is_floating_point or array.dtype.is_complex
        return array.dtype if is_inexact else self._torch.float64

    def wide_dtype(self, dtype: Any) -> Any:
        """Return the dtype in which values of ``dtype`` are added: float32 at least."""
        return self._torch.float32 if dtype.itemsize < 4 else dtype

    def cast(self, array: Any, dtype: Any) -> Any:
        """Return ``array`` in ``dtype``."""
        return array.to(dtype)

    def current(self, array: Any) -> AbstractContextManager[Any]:
        """Return a block in which ``array`` can be computed with: it knows where it is."""
        return nullcontext()


class JaxArithmetic:
    """What JAX computes with, also while it traces a function (``jax.jit``, ``jax.grad``)."""

    def __init__(self) -> None:
        self._jnp = sys.modules["jax"].numpy

    def array(self, value: Any, like: Any = None, what: str = "value") -> Any:
        """Return ``value`` as an array of JAX."""
        if isinstance(value, Sequence) and arithmetic_of(value) is not None:
            return self._jnp.stack([self.array(part, like) for part in value])
        return self._jnp.asarray(value)

    def result_dtype(self, array: Any) -> Any:
        """Return the dtype of an average of ``array``: its own, or JAX's default for whole numbers."""
        jnp = self._jnp
        return array.dtype if jnp.issubdtype(array.dtype, jnp.inexact) else jnp.result_type(float)

    def wide_dtype(self, dtype: Any) -> Any:
        """Return the dtype in which values of ``dtype`` are added: float32 at least."""
        return self._jnp.dtype(self._jnp.float32) if dtype.itemsize < 4 else dtype

    def cast(self, array: Any, dtype: Any) -> Any:
        """Return ``array`` in ``dtype``."""
        return array.astype(dtype)

    def current(self, array: Any) -> AbstractContextManager[Any]:
        """Return a block in which ``array`` can be computed with: it knows where it is."""
        return nullcontext()


def arithmetic_of(*values: Any) -> TorchArithmetic | JaxArithmetic | None:
    """Return the arithmetic of the first of ``values`` that is of such a library, or a list of such; None without.

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
