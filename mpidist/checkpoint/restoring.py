"""Check that a checkpoint fits the objects, and give them its values."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpidist.arrays.convert import fill_torch, is_writable, jax_makes, like_jax
from mpidist.arrays.dtypes import Array
from mpidist.checkpoint.agreement import Agreement, digest
from mpidist.checkpoint.alignment import Aligned, align, describe_container, tensors_to_be_made
from mpidist.checkpoint.collecting import Leaves, is_on_read, keys_above
from mpidist.checkpoint.format_rules import DamagedCheckpointError
from mpidist.checkpoint.formats import MANIFEST, Manifest
from mpidist.checkpoint.shared_reading import Values
from mpidist.core.options import VariableAggregation
from mpidist.values import Variable
from mpidist.values.composite import AnyVariable, cut_for, parts_of
from mpidist.values.placement import place_of


def check_fit(leaves: Leaves, aligned: Aligned, path: str) -> None:
    """Raise ValueError unless the checkpoint can fill the objects of this rank.

    Args:
        leaves: Of the objects.
        aligned: The checkpoint.
        path: Of it, for messages.
    """
    manifest, problems = aligned.manifest, [*aligned.problems]
    targets: dict[str, AnyVariable | Array] = {**leaves.variables, **leaves.arrays}
    for key, target in targets.items():
        tensor = manifest.tensors.get(key)
        if tensor is None and key in manifest.values:
            problems.append(f"{key!r} is {manifest.values[key]!r} in the checkpoint and an array here")
        elif tensor is not None and (tensor.shape, tensor.dtype) != (target.shape, target.dtype.name):
            problems.append(
                f"{key!r} has shape {tensor.shape} and dtype {tensor.dtype} in the checkpoint, and shape "
                f"{target.shape} and dtype {target.dtype.name} here"
            )
        elif tensor is not None and key in leaves.replaced:
            if jax_makes(target.dtype) != target.dtype:
                problems.append(
                    f"{key!r} is a JAX array of {target.dtype.name}, which JAX makes no more: type "
                    "jax.config.update('jax_enable_x64', True)"
                )
        elif tensor is not None and key in leaves.arrays and not is_writable(leaves.tensors.get(key, target)):
            problems.append(f"{key!r} is a read-only array here, and cannot be filled")
    for key in sorted(leaves.places.keys() & manifest.tensors.keys()):
        problems.append(f"{key!r} is an array in the checkpoint and a value here")
    for key in sorted(leaves.places.keys() & set(manifest.iterators)):
        problems.append(f"{key!r} is the state of an iterator in the checkpoint and a value here")
    for key in sorted(leaves.iterators.keys() & (manifest.tensors.keys() | manifest.values.keys())):
        if key not in manifest.iterators:
            problems.append(f"{key!r} is no state of an iterator in the checkpoint, and an iterator here")
    for key, name in leaves.classes().items():
        if manifest.classes.get(key, name) != name:
            problems.append(f"{key!r} is of class {manifest.classes[key]} in the checkpoint and of class {name} here")
    for key, container in leaves.containers.items():
        kind, kind_here = manifest.containers.get(key, [None])[0], describe_container(container)[0]
        if kind != kind_here and "dict" in (kind, kind_here) and kind is not None:
            problems.append(f"{key!r} is a {kind} in the checkpoint and a {kind_here} here")
    if problems:
        raise _misfit(path, problems)
    here = {*leaves.saved(), *leaves.containers, *leaves.objects}
    if here and not any(
        here & {key, *keys_above(key)} for key in (*manifest.tensors, *manifest.values, *manifest.containers)
    ):
        raise ValueError(
            f"checkpoint {path} has nothing of what is asked for: it holds {sorted(manifest.tensors)} and "
            f"{sorted(manifest.values)}, the objects are {sorted(here)}; expected the names that it was saved under"
        )


def _misfit(path: str, problems: list[str]) -> ValueError:
    return ValueError(f"checkpoint {path} does not fit the objects: " + "; ".join(problems))


def check_fit_of_all(agreement: Agreement, leaves: Leaves, aligned: Aligned, path: str, values: Values) -> None:
    """Raise on every rank unless the checkpoint fits the objects of all (collective)."""
    tensors = aligned.manifest.tensors.keys()
    there = {*leaves.variables, *leaves.arrays, *tensors_to_be_made(leaves, aligned.manifest)}
    known = {key for key in tensors if key in there or _owner_of(key, leaves) is not None}
    waiting = [f"{key} (yet to be made)" for key in tensors - known if _is_kept(key, leaves)]
    doubles = [f"{one} as {other}" for one, other in aligned.doubles]
    # Their values will travel between the ranks.
    names = [*known, *waiting, *doubles, *(key for key in leaves.iterators if key in aligned.manifest.iterators)]

    def check() -> int:
        check_fit(leaves, aligned, path)
        return digest(names)

    agreement.check_same(names, agreement.every_rank_does(check))
    problems = [
        f"{one!r} and {other!r} are one thing here, and differ in the checkpoint"
        for one, other in aligned.doubles
        if not _are_equal(*[values.of(key) for key in (one, other)])
    ]

    def tell() -> None:
        raise _misfit(path, problems)

    if problems:
        agreement.chief_does(tell)


def _are_equal(one: Array, other: Array) -> bool:
    return (one.shape, one.dtype, one.tobytes()) == (other.shape, other.dtype, other.tobytes())


def _owner_of(key: str, leaves: Leaves) -> str | None:
    """Return the object that keeps the value ``key`` for a part yet to come."""
    return next((name for name in leaves.deferring if key.startswith(f"{name}/")), None)


def _is_kept(key: str, leaves: Leaves) -> bool:
    """Return whether the value ``key`` is kept for a part yet to come."""
    return _owner_of(key, leaves) is not None or bool(keys_above(key) & leaves.objects.keys())


def check_states(leaves: Leaves, path: Path, manifest: Manifest) -> None:
    """Raise DamagedCheckpointError if the state of an iterator of mpidist is not in its format."""
    aligned = align(manifest, leaves).manifest
    for key in sorted(leaves.iterators.keys() & set(aligned.iterators)):
        check = getattr(leaves.iterators[key], "_checkpoint_check", None)
        try:
            if check is not None:
                check(aligned.values[key])
        except (TypeError, ValueError) as error:
            raise DamagedCheckpointError(f"{path / MANIFEST} is damaged: {key!r}: {error}") from error


def restore_iterators(agreement: Agreement, leaves: Leaves, manifest: Manifest) -> None:
    """Let the iterators go on where they stood (collective where there are any).

    Raises:
        Exception: That of one of them; on the other ranks PeerError.
    """
    mine = {key: iterator for key, iterator in leaves.iterators.items() if key in manifest.iterators}

    def restore() -> None:
        for key, iterator in mine.items():
            iterator.restore(manifest.values[key])

    if mine:
        agreement.every_rank_does(restore)


def fill(
    leaves: Leaves, aligned: Aligned, values: Values
) -> tuple[list[str], dict[str, dict[str, Array]], dict[str, Array]]:
    """Fill the objects with the values, one tensor at a time (collective).

    Returns:
        Keys of the checkpoint that no object has; the values that optimizers keep for variables that they have yet to
        make, by key of the optimizer; and those of variables that objects have not made yet.
    """
    manifest, unused = aligned.manifest, []
    deferred: dict[str, dict[str, Array]] = {key: {} for key in leaves.deferring}
    waiting: dict[str, Array] = {}
    for key in sorted(manifest.tensors):
        if key not in leaves.variables and key not in leaves.arrays and not _is_kept(key, leaves):
            unused.append(key)
            continue
        source = aligned.source(key)
        value = values.of(source)
        owner = _owner_of(key, leaves)
        if key in leaves.variables:
            restore_variable(leaves.variables[key], value)
        elif key in leaves.arrays:
            _fill_array(leaves, key, value)
        elif owner is not None:
            deferred[owner][key.removeprefix(f"{owner}/")] = np.array(value)
        else:
            waiting[source] = np.array(value)
    for name, owner_object in leaves.deferring.items():
        owner_object._checkpoint_defer(deferred[name])
    for key, stored in manifest.values.items():
        if key in leaves.places:
            leaves.places[key].put(stored)
        elif key not in leaves.iterators:
            unused.append(key)
    return unused, deferred, waiting


def _fill_array(leaves: Leaves, key: str, value: Array) -> None:
    if key in leaves.replaced:
        place = leaves.replaced[key]
        place.put(like_jax(place.get(), value))
        return
    if key in leaves.tensors:
        fill_torch(leaves.tensors[key], value)
        return
    target = leaves.arrays[key]
    with place_of(target).current():
        np.copyto(target, place_of(target).brings(value))


# Variables --------------------------------------------------------------------------------------------------------


def restore_variable(variable: AnyVariable, array: Array) -> None:
    """Give ``variable`` the value that a checkpoint holds; in cross-replica context, on every rank.

    Copies of an ON_READ variable with aggregation SUM get equal shares; the rest of integers goes to replica
    0, so that the sum is kept.
    """
    variable.assign(array)
    if isinstance(variable, Variable) and _is_sum(variable) and array.dtype.kind in "iu":
        for copy, share in zip(variable.values, _shares_of(variable, array), strict=True):
            copy.assign(share)


def start_variable(variable: AnyVariable, array: Array) -> None:
    """Give an unused variable the value that a checkpoint holds; in any context, local."""
    for part, share in zip(parts_of(variable), cut_for(variable, array), strict=True):
        part.is_unused = False
        for copy, value in zip(part.values, _shares_of(part, share), strict=True):
            copy.start_from(value)


def _shares_of(variable: Variable, array: Array) -> list[Array]:
    """Return the share of each local copy in a value."""
    if not _is_sum(variable):
        return [array] * len(variable.values)
    count = variable.distribute_strategy.num_replicas_in_sync
    is_whole = array.dtype.kind in "iu"
    share = array // array.dtype.type(count) if is_whole else (array / count).astype(array.dtype)
    rest = array - share * array.dtype.type(count - 1) if is_whole else share
    ids = variable.distribute_strategy.extended.local_replica_ids
    return [rest if replica_id == 0 else share for replica_id in ids]


def _is_sum(variable: Variable) -> bool:
    is_shared_out = variable.distribute_strategy.num_replicas_in_sync > 1
    return is_on_read(variable) and variable.aggregation == VariableAggregation.SUM and is_shared_out
