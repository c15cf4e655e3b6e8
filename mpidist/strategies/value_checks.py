"""Checks of values that strategies reduce or gather, and results apart from them.

Replicas of one process must not have in common the results they write to, nor the gradients of one PyTorch module: they
run one after the other and share whatever the program made once. A module that was made once has one ``.grad`` per
parameter, to which each replica adds: their sum over replicas is no sum of theirs.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import Parameter
from itertools import combinations
from typing import Any, TypeVar

import numpy as np

from mpidist.arrays.convert import NUMBERS, is_jax, is_torch, to_array
from mpidist.arrays.dtypes import Array, check_transportable, reduction_dtypes
from mpidist.collectives.node.packing import overlaps
from mpidist.collectives.reading import check_can_be_written, check_writable, restore
from mpidist.core import nest
from mpidist.core.options import ReduceOp
from mpidist.values import IndexedSlices, PerReplica, ReplicaValues, Variable
from mpidist.values.component import Component
from mpidist.values.placement import copy_of, place_of

Value = TypeVar("Value")

_ONE_REPLICA_PER_RANK = (
    "Expected one replica per rank, each with a module and arrays of its own: give the strategy one device, and type "
    "mpirun -n {n} python train.py"
)
# A look asks all that Python knows, a tenth of a second in a large program. Who shares a module does so from the first
# step; where so many looks were in vain the replicas share constants, and one look in so many is enough.
_LOOKS = 32
_shared_calls = [0]
# The default of a required axis, so that all ranks get an error that says which axis to pass.
NO_AXIS = Parameter.empty


def checked_out(value: object, leaves: Sequence[object], out: object, op: ReduceOp, num_replicas: int) -> list[Array]:
    """Return the arrays of ``out``, which has to fit the result for ``value``.

    Raises:
        ValueError: They cannot take it.
    """
    arrays = outputs_for(value, out)
    for leaf, target_array in zip(leaves, arrays, strict=True):
        if isinstance(leaf, IndexedSlices):
            raise ValueError("out was given for IndexedSlices, whose number of rows is not known; leave it out")
        array = to_array(leaf)
        dtype = reduction_dtypes(array.dtype, op)[1] if num_replicas > 1 else array.dtype
        if (target_array.shape, target_array.dtype) != (array.shape, dtype):
            raise ValueError(
                f"out has {target_array.dtype}{target_array.shape}; expected {dtype}{array.shape}, as the result has"
            )
        check_writable([target_array])
    return arrays


def outputs_for(value: object, out: object) -> list[Array]:
    """Return the arrays of ``out``, which has to have the structure of ``value``."""
    if type(value) is type(out) is np.ndarray:
        return [out]
    try:
        nest.assert_same_structure(value, out)
    except ValueError as error:
        raise ValueError(f"out does not fit the value: {error}") from None
    arrays = [to_array(leaf, "out") for leaf in nest.flatten(out)]
    check_can_be_written(out, arrays)
    return arrays


def copy_into(out: Value, value: object) -> Value:
    """Copy the leaves of ``value`` into the arrays of ``out`` and return ``out``."""
    copy_leaves([to_array(target, "out") for target in nest.flatten(out)], nest.flatten(value))
    return out


def copy_leaves(targets: Sequence[Array], leaves: Sequence[object]) -> None:
    """Copy leaves into arrays."""
    for target, leaf in zip(targets, leaves, strict=True):
        if type(target) is type(leaf) is np.ndarray:
            np.copyto(target, leaf)
            continue
        place = place_of(target)
        with place.current():
            np.copyto(target, place.brings(to_array(leaf)))


def check_can_reduce(leaves: Sequence[object], op: ReduceOp) -> None:
    """Raise TypeError unless ``op`` can reduce each of ``leaves``, also for one replica."""
    for leaf in leaves:
        reduction_dtypes((leaf.values if isinstance(leaf, IndexedSlices) else to_array(leaf)).dtype, op)


def check_can_gather(value: object, axis: int, method: str) -> None:
    """Raise unless ``value`` can be concatenated along ``axis``."""
    sample = value.values[0] if isinstance(value, ReplicaValues) else value
    if isinstance(sample, IndexedSlices):
        raise NotImplementedError(f"{method} of IndexedSlices is not offered; gather their values and indices")
    array = to_array(sample)
    check_transportable(array.dtype, method)
    if array.ndim == 0:
        raise ValueError(f"{method} was given a scalar; expected an array with at least one axis: value[None]")
    if not isinstance(axis, (int, np.integer)) or not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"{method} along axis {axis!r} of an array of rank {array.ndim}; "
            f"expected an axis from {-array.ndim} to {array.ndim - 1}"
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


def copied(value: Value) -> Value:
    """Return a copy of ``value``; IndexedSlices as they are."""
    if isinstance(value, IndexedSlices):
        return value
    array = to_array(value)
    # Those of JAX are made as copies.
    copy: Value = restore(value, array if is_jax(value) else copy_of(array))
    return copy


def check_returned(leaves: Sequence[object]) -> None:
    """Raise TypeError where one of ``leaves`` cannot be a result of a replica function."""
    for leaf in leaves:
        if leaf is None or isinstance(leaf, (str, bytes)):
            raise TypeError(
                f"reduce() was given {leaf!r}; expected arrays or numbers: "
                + (
                    "the function given to strategy.run() returned nothing, end it with `return loss`"
                    if leaf is None
                    else "have the function given to strategy.run() return them"
                )
            )


def as_result(value: object) -> object:
    """Return ``value``, with numbers and 0-d NumPy arrays as NumPy numbers."""
    if isinstance(value, NUMBERS) or (type(value) is np.ndarray and value.ndim == 0):
        return np.asarray(value)[()]
    return value


def apart_from(result: object, given: object) -> object:
    """Return ``result``, or a copy where it shares memory with the leaf ``given``.

    Where there is one replica the result may be the given array itself; a caller who changes it would change that.
    """
    if isinstance(result, ReplicaValues):
        return type(result)([apart_from(part, given) for part in result.values], result.replica_ids)
    if isinstance(result, IndexedSlices):
        values, indices = apart_from(result.values, given), apart_from(result.indices, given)
        return IndexedSlices(values, indices, result.dense_shape)
    if isinstance(result, NUMBERS):
        return result
    if is_jax(result):
        # Nobody changes it, but a function that it is donated to would delete the one that was given.
        parts = given.values if isinstance(given, ReplicaValues) else (given,)
        return copied(result) if any([part is result for part in parts]) else result
    array = to_array(result)
    return restore(result, copy_of(array)) if any(overlaps([array], list(_arrays_in(given)))) else result


def _arrays_in(value: object) -> Iterator[Array]:
    if isinstance(value, (ReplicaValues, Variable)):
        for part in value.values:
            yield from _arrays_in(part.value() if isinstance(part, Component) else part)
    elif isinstance(value, IndexedSlices):
        yield from (to_array(value.values), to_array(value.indices))
    elif not isinstance(value, NUMBERS):
        yield to_array(value)


def concatenated(arrays: Sequence[Array], axis: int) -> Array:
    """Concatenate the arrays of the replicas, which lie in one place, along ``axis``.

    Raises:
        ValueError: They differ in dtype or along another axis.
    """
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


def check_given(axis: object, method: str, advice: str) -> None:
    """Raise TypeError if ``axis`` was left out."""
    if axis is NO_AXIS:
        raise TypeError(f"{method} needs an axis. Pass {advice}.")


def check_axis(axis: object) -> None:
    """Raise TypeError unless ``axis`` is None, an int or a tuple of ints."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    valid = all(isinstance(a, (int, np.integer)) and not isinstance(a, bool) for a in axes)
    if axis is not None and not (valid and axes):
        raise TypeError(
            f"axis is {axis!r} of type {type(axis).__name__}; expected None, an int such as axis=0, or a tuple of ints"
        )


def check_results_apart(outs: object) -> None:
    """Raise ValueError where replicas gave the same memory for their results.

    Args:
        outs: The ``out`` of each replica, regrouped.
    """
    for leaf in nest.flatten(outs):
        parts = leaf.values if isinstance(leaf, PerReplica) else ()
        for (i, one), (j, other) in combinations(enumerate(map(to_array, parts)), 2):
            if any(overlaps([one], [other])) and _share_elements(one, other):
                raise ValueError(
                    f"replicas {i} and {j} of this process gave the same memory as out, so one result would overwrite "
                    f"the other. {_ONE_REPLICA_PER_RANK.format(n=len(parts))}"
                )


def _share_elements(one: Array, other: Array) -> bool:
    """Return whether overlapping arrays have elements in common; assumed on devices."""
    on_host = isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
    return not on_host or bool(np.shares_memory(one, other))


def check_gradients_apart(leaves: Iterable[PerReplica]) -> None:
    """Raise ValueError where replicas gave the gradient of one and the same parameter of PyTorch.

    Args:
        leaves: The values of the replicas of this process.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    shared = [found for leaf in leaves if (found := _shared_tensor(torch, leaf.values)) is not None]
    if not shared:
        return
    _shared_calls[0] += 1
    if _shared_calls[0] > _LOOKS and _shared_calls[0] % _LOOKS:
        return
    gradients = _addresses_of_gradients(torch)
    for address, first, number, count in shared:
        if address in gradients:
            raise ValueError(
                f"replicas {first} and {number} of this process gave the same tensor, the .grad of a parameter: they "
                "use one module of PyTorch, to whose gradients both have added. Expected a copy for each replica: "
                "model = mpidist.torch.adopt(model) and optimizer = mpidist.torch.Optimizer(model, torch.optim.Adam, "
                "...), which sums gradients itself. Or else: "
                f"{_ONE_REPLICA_PER_RANK.format(n=count)}"
            )


def _shared_tensor(torch: Any, values: Sequence[object]) -> tuple[int, int, int, int] | None:
    """Return the address of a shared tensor, the two replicas, and the number of values."""
    seen: dict[int, int] = {}
    for number, value in enumerate(values):
        address = _address(torch, value) if is_torch(value) else None
        if address is not None and (first := seen.setdefault(address, number)) != number:
            return address, first, number, len(values)
    return None


def _addresses_of_gradients(torch: Any) -> set[int | None]:
    """Return the addresses of the gradients of all parameters.

    Modules are not known here, so all objects are asked.
    """
    # Not isinstance: it asks proxies for their class, which may do anything.
    leaves = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and thing.is_leaf)
    return {_address(torch, leaf.grad) for leaf in leaves if leaf.grad is not None}


def _address(torch: Any, tensor: Any) -> int | None:
    """Return the address of a tensor, or None.

    None is for tensors without elements, or without memory in one piece, as sparse ones.
    """
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    try:
        return int(tensor.data_ptr()) or None
    except RuntimeError:
        return None
