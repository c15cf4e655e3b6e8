"""Checks of the values that strategies reduce, gather or write results to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import Parameter
from itertools import combinations
from typing import TypeVar

import numpy as np

from mpidist.arrays.convert import NUMBERS, is_jax, to_array
from mpidist.arrays.device_ops import is_device_array
from mpidist.arrays.dtypes import Array, check_transportable, reduction_dtypes
from mpidist.collectives.node.packing import overlaps
from mpidist.collectives.reading import check_can_be_written, check_writable, restore
from mpidist.core import nest
from mpidist.core.options import ReduceOp
from mpidist.values import IndexedSlices, PerReplica
from mpidist.values.placement import copy_of, place_of

Value = TypeVar("Value")
# The default of a required axis, so that all ranks get an error that says which axis to pass.
NO_AXIS = Parameter.empty


def check_axis_given(axis: object, method: str, advice: str) -> None:
    """Raise TypeError if ``axis`` was left out."""
    if axis is NO_AXIS:
        raise TypeError(f"{method} needs an axis. Pass {advice}.")


def check_can_reduce(leaves: Sequence[object], op: ReduceOp) -> None:
    """Raise TypeError unless ``op`` can reduce each of ``leaves``, also for one replica."""
    for leaf in leaves:
        reduction_dtypes((leaf.values if isinstance(leaf, IndexedSlices) else to_array(leaf)).dtype, op)


def check_can_gather(sample: object, axis: int, method: str) -> None:
    """Raise unless values like ``sample`` can be concatenated along ``axis``."""
    if isinstance(sample, IndexedSlices):
        raise NotImplementedError(f"{method} does not support IndexedSlices. Gather their values and indices.")
    array = to_array(sample)
    check_transportable(array.dtype, method)
    if array.ndim == 0:
        raise ValueError(f"{method} got a scalar. Pass an array with at least one axis: value[None].")
    if not isinstance(axis, (int, np.integer)) or not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"{method} along axis {axis!r} of an array of rank {array.ndim}. Pass an axis from {-array.ndim} to "
            f"{array.ndim - 1}."
        )


def check_returned(leaves: Sequence[object], axis: object) -> None:
    """Raise TypeError if ``axis``, or one of ``leaves``, cannot be an argument of ``reduce``."""
    check_axis_given(axis, "reduce()", "axis=None to combine replicas element by element, or axis=0")
    axes = axis if isinstance(axis, tuple) else (axis,)
    are_ints = all(isinstance(a, (int, np.integer)) and not isinstance(a, bool) for a in axes)
    if axis is not None and not (are_ints and axes):
        raise TypeError(
            f"axis is {axis!r} of type {type(axis).__name__}; expected None, an int such as axis=0, or a tuple of ints"
        )
    for leaf in leaves:
        if leaf is None:
            raise TypeError(
                "reduce() was given None; expected arrays or numbers: the function given to strategy.run() returned "
                "nothing, end it with `return loss`"
            )
        if isinstance(leaf, (str, bytes)):
            raise TypeError(
                f"reduce() was given {leaf!r}; expected arrays or numbers: have the function given to strategy.run() "
                "return them"
            )


def check_equal_on_replicas(what: str, args: Sequence[object], kwargs: Mapping[str, object] | None) -> None:
    """Raise ValueError if an argument of an update holds a PerReplica."""
    for name, given in (("args", args), ("kwargs", kwargs or {})):
        for path, leaf in nest.flatten_with_path(given, name):
            if isinstance(leaf, PerReplica):
                raise ValueError(
                    f"{what} received a PerReplica as {path}, and the copies on the replicas would differ. Reduce it "
                    "first: strategy.extended.reduce_to(op, value, variable)."
                )


# Arrays for results ---------------------------------------------------------------------------------------------------


def outputs_for(value: object, out: object) -> list[Array]:
    """Return the arrays of ``out``. Raise ValueError unless it has the structure of ``value`` and can be written."""
    if type(value) is type(out) is np.ndarray:
        return [out]
    try:
        nest.assert_same_structure(value, out)
    except ValueError as error:
        raise ValueError(f"out does not fit the value: {error}") from None
    targets = [to_array(leaf, "out") for leaf in nest.flatten(out)]
    check_can_be_written(out, targets)
    return targets


def check_out(value: object, leaves: Sequence[object], out: object, op: ReduceOp, num_replicas: int) -> None:
    """Raise ValueError unless ``out`` can hold the results for ``leaves``, those of ``value``."""
    for leaf, target in zip(leaves, outputs_for(value, out), strict=True):
        if isinstance(leaf, IndexedSlices):
            raise ValueError(
                "out was given for IndexedSlices. The number of rows of their result is not known. Omit out"
            )
        array = to_array(leaf)
        dtype = reduction_dtypes(array.dtype, op)[1] if num_replicas > 1 else array.dtype
        if (target.shape, target.dtype) != (array.shape, dtype):
            raise ValueError(f"out has {target.dtype}{target.shape}; expected {dtype}{array.shape}, as the result has")
        check_writable([target])


def check_results_apart(outs: object) -> None:
    """Raise ValueError if replicas passed the same memory in ``outs``, one ``out`` each."""
    for leaf in nest.flatten(outs):
        parts = [to_array(part) for part in leaf.values] if isinstance(leaf, PerReplica) else []
        for (i, one), (j, other) in combinations(enumerate(parts), 2):
            if _share_elements(one, other):
                raise ValueError(
                    f"replicas {i} and {j} of this process gave the same memory as out, so one result would overwrite "
                    "the other. Expected one replica per rank, each with a module and arrays of its own: give the "
                    f"strategy one device, and type mpirun -n {len(parts)} python train.py"
                )


def _share_elements(one: Array, other: Array) -> bool:
    overlap = any(overlaps([one], [other]))
    return overlap and (is_device_array(one) or bool(np.shares_memory(one, other)))


def copy_into(out: Value, value: object) -> Value:
    """Copy the leaves of ``value`` into the arrays of ``out`` and return ``out``."""
    for target, leaf in zip(nest.flatten(out), nest.flatten(value), strict=True):
        array = to_array(target, "out")
        place = place_of(array)
        with place.current():
            np.copyto(array, place.brings(to_array(leaf)))
    return out


def copied(value: Value) -> Value:
    """Return a copy of a leaf."""
    if isinstance(value, IndexedSlices):
        return IndexedSlices(copied(value.values), copied(value.indices), value.dense_shape)  # type: ignore[return-value]
    array = to_array(value)
    # Arrays of JAX are always made as copies.
    copy: Value = restore(value, array if is_jax(value) else copy_of(array))
    return copy


def as_result(value: object) -> object:
    """Return ``value``, with numbers and 0-d NumPy arrays as NumPy numbers."""
    if isinstance(value, NUMBERS) or (type(value) is np.ndarray and value.ndim == 0):
        return np.asarray(value)[()]
    return value


def concatenated(arrays: Sequence[Array], axis: int) -> Array:
    """Concatenate the arrays of the replicas, which are in one place. Raise ValueError if they do not fit."""
    if len(arrays) == 1:
        return arrays[0]
    position = axis % arrays[0].ndim
    kinds = [(a.dtype, a.ndim, *(n for i, n in enumerate(a.shape) if i != position)) for a in arrays]
    if any(kind != kinds[0] for kind in kinds):
        shown = ", ".join(f"{a.dtype}{a.shape}" for a in arrays)
        raise ValueError(
            f"the values of the replicas cannot be concatenated along axis {axis}: {shown}; "
            "expected equal dtypes and equal sizes along every other axis"
        )
    return np.concatenate(arrays, axis)
