"""Read a checkpoint, check that it fits the objects, and give them its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mpidist.arrays.convert import fill_torch, is_writable, jax_makes, like_jax
from mpidist.arrays.dtypes import Array
from mpidist.checkpoint import storage
from mpidist.checkpoint.agreement import Agreement, digest
from mpidist.checkpoint.alignment import Aligned, describe_container, tensors_to_be_made
from mpidist.checkpoint.collecting import Leaves, is_on_read, keys_above
from mpidist.checkpoint.format_rules import DamagedCheckpointError
from mpidist.checkpoint.formats import Manifest, dtype_of
from mpidist.checkpoint.storage import Found
from mpidist.core.enums import VariableAggregation
from mpidist.values import Variable
from mpidist.values.composite import AnyVariable, cut_for, parts_of
from mpidist.values.placement import place_of


@dataclass
class Read:
    """A checkpoint that the first rank has read.

    Attributes:
        path: The checkpoint.
        manifest: Its manifest.
        arrays: Its tensors by key.
        unusable: Newer ones that cannot be used, and why.
    """

    path: Path
    manifest: Manifest
    arrays: dict[str, Array]
    unusable: dict[str, str] = field(default_factory=dict)


def read_newest(find: Callable[[], Found]) -> Read | None:
    """Return the newest undamaged checkpoint, or None where there is none at all.

    Args:
        find: Returns those that are there.

    Raises:
        DamagedCheckpointError: There are checkpoints, and none can be used.
    """
    found = find()
    while found.checkpoints:
        path, manifest = found.checkpoints.pop()
        try:
            return Read(path, manifest, storage.read_arrays(path, manifest), found.unusable)
        except DamagedCheckpointError as error:
            if path.exists():
                found.unusable[str(path)] = str(error)
            else:  # removed by another process, which has saved a newer one before
                found = find()
    if found.unusable:
        reasons = "; ".join(found.unusable.values())
        raise DamagedCheckpointError(
            f"none of the checkpoints that are there can be used: {reasons}. To start from scratch, take another "
            "directory or move them away"
        )
    return None


def check_fit(leaves: Leaves, aligned: Aligned, path: str, arrays: Mapping[str, Array]) -> None:
    """Raise ValueError unless the checkpoint can fill the objects of this rank.

    Args:
        leaves: Of the objects.
        aligned: The checkpoint.
        path: Of it, for messages.
        arrays: Its tensors, on the first rank.
    """
    manifest, problems = aligned.manifest, [*aligned.problems]
    for one, other in aligned.doubles:
        if one in arrays and not _are_equal(arrays[one], arrays[other]):
            problems.append(f"{one!r} and {other!r} are one thing here, and differ in the checkpoint")
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
        raise ValueError(f"checkpoint {path} does not fit the objects: " + "; ".join(problems))
    here = {*leaves.saved(), *leaves.containers, *leaves.objects}
    if here and not any(
        here & {key, *keys_above(key)} for key in (*manifest.tensors, *manifest.values, *manifest.containers)
    ):
        raise ValueError(
            f"checkpoint {path} has nothing of what is asked for: it holds {sorted(manifest.tensors)} and "
            f"{sorted(manifest.values)}, the objects are {sorted(here)}; expected the names that it was saved under"
        )


def _are_equal(one: Array, other: Array) -> bool:
    return (one.shape, one.dtype, one.tobytes()) == (other.shape, other.dtype, other.tobytes())


def check_fit_of_all(
    agreement: Agreement, leaves: Leaves, aligned: Aligned, path: str, arrays: Mapping[str, Array]
) -> None:
    """Raise on every rank unless the checkpoint fits the objects of all (collective)."""
    tensors = aligned.manifest.tensors.keys()
    there = {*leaves.variables, *leaves.arrays, *tensors_to_be_made(leaves, aligned.manifest)}
    known = {key for key in tensors if key in there or _owner_of(key, leaves) is not None}
    waiting = [f"{key} (yet to be made)" for key in tensors - known if _is_kept(key, leaves)]
    # Their values will travel between the ranks.
    names = [*known, *waiting, *(key for key in leaves.iterators if key in aligned.manifest.iterators)]

    def check() -> int:
        check_fit(leaves, aligned, path, arrays)
        return digest(names)

    agreement.check_same(names, agreement.every_rank_does(check))


def _owner_of(key: str, leaves: Leaves) -> str | None:
    """Return the object that keeps the value ``key`` for a part yet to come."""
    return next((name for name in leaves.deferring if key.startswith(f"{name}/")), None)


def _is_kept(key: str, leaves: Leaves) -> bool:
    """Return whether the value ``key`` is kept for a part yet to come."""
    return _owner_of(key, leaves) is not None or bool(keys_above(key) & leaves.objects.keys())


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
    agreement: Agreement, leaves: Leaves, aligned: Aligned, arrays: dict[str, Array]
) -> tuple[list[str], dict[str, dict[str, Array]], dict[str, Array]]:
    """Broadcast the values from the first rank, and fill the objects (collective).

    Returns:
        Keys of the checkpoint that no object has; the values that optimizers keep for variables that they have yet to
        make, by key of the optimizer; and those of variables that objects have not made yet.
    """
    manifest, unused = aligned.manifest, []
    deferred: dict[str, dict[str, Array]] = {key: {} for key in leaves.deferring}
    waiting: dict[str, Array] = {}
    last_use = {aligned.source(key): key for key in sorted(manifest.tensors)}
    for key, tensor in sorted(manifest.tensors.items()):
        if key not in leaves.variables and key not in leaves.arrays and not _is_kept(key, leaves):
            unused.append(key)
            continue
        source = aligned.source(key)
        mine = arrays[source] if source in arrays else np.empty(tensor.shape, dtype_of(tensor))
        if last_use[source] == key:
            arrays.pop(source, None)
        value = np.asarray(agreement.extended.broadcast_nest(mine))
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
