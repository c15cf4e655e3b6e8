"""What optimizers form updates with: a variable's copy as an array, the dtype to compute in, checks of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.values import Variable
from mpidist.values.composite import AnyVariable


def current(variable: Variable) -> Array:
    """Return the array of a variable's copy that the context addresses, not to be written: no copy of it."""
    return variable.as_array()


def compute_dtype(variable: AnyVariable) -> np.dtype[Any]:
    """Return the dtype in which a variable's updates are formed: float32 for half precision, else its own."""
    return np.dtype(np.float32) if variable.dtype.itemsize < 4 else variable.dtype


def subtract(variable: Variable, delta: Array) -> None:
    """Subtract ``delta``, which is of the variable's compute dtype, from the variable's copy."""
    if delta.dtype == variable.dtype:
        variable.assign_sub(delta)
    else:
        variable.assign((current(variable).astype(delta.dtype) - delta).astype(variable.dtype))


def check_fraction(name: str, value: float) -> float:
    """Return a hyper-parameter that must lie in [0, 1).

    Raises:
        ValueError: It does not.
    """
    if not 0 <= value < 1:
        raise ValueError(f"{name} is {value!r}; expected a number from 0 to below 1")
    return float(value)


def check_positive(name: str, value: float) -> float:
    """Return a hyper-parameter that must be more than 0.

    Raises:
        ValueError: It is not.
    """
    if not value > 0:
        raise ValueError(f"{name} is {value!r}; expected a number of more than 0")
    return float(value)
