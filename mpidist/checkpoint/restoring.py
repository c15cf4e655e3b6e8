"""Restore objects from a checkpoint: match keys, check, fill, and keep values for later."""

from __future__ import annotations

import contextlib
import warnings
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpidist.arrays.convert import fill_torch, is_writable, jax_makes, like_jax
from mpidist.arrays.dtypes import Array
from mpidist.checkpoint.agreement import Agreement, digest
from mpidist.checkpoint.format import MANIFEST, DamagedCheckpointError, Manifest, Tensor, dtype_of
from mpidist.checkpoint.objects import (
    WAITING_ATTRIBUTE,
    Container,
    Leaves,
    child_key,
    collect,
    describe_container,
    follow,
    is_on_read,
    is_within,
    keys_above,
)
from mpidist.checkpoint.reader import Values
from mpidist.core.options import VariableAggregation
from mpidist.values import Variable
from mpidist.values.composite import AnyVariable, cut_for, parts_of, slot_keys
from mpidist.values.placement import place_of
from mpidist.values.variable import begin_to_wait, stop_waiting

# Matching keys ----------------------------------------------------------------------------------------------------


@dataclass
class Aligned:
    """A checkpoint as the present objects would have saved it.

    Attributes:
        manifest: The manifest with the keys of the objects.
        sources: Keys of tensors in the checkpoint, if they differ.
        doubles: Pairs of keys of tensors in the checkpoint that are one object here.
        problems: Values that differ, but are one object here.
    """

    manifest: Manifest
    sources: dict[str, str] = field(default_factory=dict)
    doubles: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def source(self, key: str) -> str:
        """Return the key of a tensor in the checkpoint."""
        return self.sources.get(key, key)

    def paths(self, leaves: Leaves) -> dict[AnyVariable, str]:
        """Return the path of each variable in the checkpoint."""
        return {variable: self.source(key) for variable, key in leaves.paths().items()}


# The entries of a manifest by kind and key.
_Tables = dict[str, dict[str, Any]]


def align(manifest: Manifest, leaves: Leaves) -> Aligned:
    """Return a checkpoint with the keys of the objects. Nothing is changed.

    An object of the checkpoint that is several here is copied for each. Several that are one here are merged.
    """
    tables: _Tables = {kind: dict(getattr(manifest, kind)) for kind in ("tensors", "values", "containers", "classes")}
    tables["iterators"] = dict.fromkeys(manifest.iterators)
    aligned = Aligned(manifest)
    _split(tables, manifest.links, leaves, aligned)
    if leaves.links:
        _merge(tables, leaves, aligned)
    _match_slots(tables["tensors"], leaves, aligned)
    changed: dict[str, Any] = {**tables, "iterators": tuple(tables["iterators"])}
    aligned.manifest = replace(manifest, **changed)
    return aligned


def _split(tables: _Tables, links: Mapping[str, str], leaves: Leaves, aligned: Aligned) -> None:
    """Add the keys of objects here that links lead to. All keys of a ring of links would be endless."""
    sources = {key: follow(key, links) for key in (*leaves.saved(), *leaves.containers, *leaves.objects)}
    sources = {key: source for key, source in sources.items() if source != key}
    names = {kind: sorted(table) for kind, table in tables.items()}

    def add(kind: str, key: str, name: str) -> None:
        if key not in tables[kind]:
            tables[kind][key] = tables[kind][name]
            if kind == "tensors":
                aligned.sources[key] = name

    for key, source in sources.items():
        # Optimizers and containers also receive entries that do not exist here yet.
        is_open = key in leaves.deferring or key in leaves.containers
        for kind in tables:
            for name in (*_inside(names[kind], source), source) if is_open else (source,):
                if name in tables[kind]:
                    add(kind, key + name[len(source) :], name)
    objects: dict[str, list[str]] = {}
    for key in leaves.objects.keys() & sources.keys():
        objects.setdefault(sources[key], []).append(key)
    here = {*leaves.saved()}
    for source, keys in sorted(objects.items()):
        for name in _inside(names["tensors"], source):
            # The value waits if one of the objects lacks the variable.
            lacking = (key + name[len(source) :] for key in sorted(keys))
            first = next((key for key in lacking if follow(key, leaves.links) not in here), None)
            if first is not None:
                add("tensors", first, name)


def _inside(names: list[str], outer: str) -> list[str]:
    """Return the sorted keys that are within the object ``outer``."""
    return names[bisect_left(names, f"{outer}/") : bisect_left(names, f"{outer}0")]


def _merge(tables: _Tables, leaves: Leaves, aligned: Aligned) -> None:
    """Move entries to the key that holds their object here."""
    for kind, table in tables.items():
        for name in list(table):
            held = follow(name, leaves.links)
            if held == name:
                continue
            entry = table.pop(name)
            if kind == "tensors":
                source = aligned.sources.pop(name, name)
                if held not in table:
                    aligned.sources[held] = source
                elif aligned.source(held) != source:
                    aligned.doubles.append((aligned.source(held), source))
            elif kind in ("values", "classes") and table.get(held, entry) != entry:
                aligned.problems.append(f"{name!r} is {held!r} here, and another value in the checkpoint")
            table.setdefault(held, entry)


def _match_slots(tensors: dict[str, Tensor], leaves: Leaves, aligned: Aligned) -> None:
    """Rename the slots of the checkpoint to the keys that they have here."""
    paths, paths_there = leaves.paths(), aligned.paths(leaves)
    moved: dict[str, str] = {}
    for owner, slots in leaves.slots.items():
        here, there = (slot_keys(list(slots.of), each) for each in (paths, paths_there))
        for (group, *_), candidates, names in zip(here, there, slots.of.values(), strict=True):
            saved = [each for each in candidates if any(f"{owner}/{each}/{name}" in tensors for name in names)]
            moved.update({f"{owner}/{group}/{name}": f"{owner}/{each}/{name}" for each in saved[:1] for name in names})
    # All at once, because the path of one variable may be that of another in the checkpoint.
    entries = {key: (tensors[name], aligned.source(name)) for key, name in moved.items() if name in tensors}
    for name in moved.values():
        tensors.pop(name, None)
        aligned.sources.pop(name, None)
    for key, (tensor, source) in entries.items():
        tensors[key] = tensor
        if key != source:
            aligned.sources[key] = source


def find_paths(objects: dict[str, object], manifest: Manifest) -> dict[AnyVariable, str]:
    """Return the path in a checkpoint of each variable that the objects hold now."""
    leaves = collect(objects, is_complete=False)
    return align(manifest, leaves).paths(leaves)


# Lists and dicts --------------------------------------------------------------------------------------------------


class _CannotBeMadeError(Exception):
    """The entry is a variable or another object that only the program can create."""


def give_shape(leaves: Leaves, manifest: Manifest) -> bool:
    """Resize lists and dicts as in a checkpoint. Return whether anything changed.

    Lists get their length and dicts their missing keys, if the entries are values, arrays or containers of them.
    Variables and arrays are never removed.
    """
    changed = False
    for key, container in leaves.containers.items():
        additions = _additions(key, container, manifest)
        if isinstance(container, list):
            container.extend(additions.values())
            changed |= _shorten(container, key, manifest, leaves)
        elif isinstance(container, dict):
            container.update(additions)
        changed |= bool(additions)
    return changed


def _tensors_to_be_made(leaves: Leaves, manifest: Manifest) -> set[str]:
    """Return the keys of the arrays that :func:`give_shape` would create."""
    entries = {
        child_key(key, name)
        for key, container in leaves.containers.items()
        for name in _additions(key, container, manifest)
    }
    return {key for key in manifest.tensors if entries & {key, *keys_above(key)}} if entries else set()


def _additions(key: str, container: Container, manifest: Manifest) -> dict[str | int, object]:
    """Return the missing entries of a list or dict, by index or name."""
    kind, shape = manifest.containers.get(key, (None, None))
    additions: dict[str | int, object] = {}
    if kind == "list" and isinstance(container, list):
        with contextlib.suppress(_CannotBeMadeError):
            return {index: _made(child_key(key, index), manifest) for index in range(len(container), shape)}
    if kind == "dict" and isinstance(container, dict):
        for name in shape:
            if name not in container:
                with contextlib.suppress(_CannotBeMadeError):
                    additions[name] = _made(child_key(key, name), manifest)
    return additions


def _shorten(container: list[object], key: str, manifest: Manifest, leaves: Leaves) -> bool:
    kind, size = manifest.containers.get(key, (None, None))
    if kind != "list":
        return False
    surplus = [child_key(key, index) for index in range(size, len(container))]
    of_program = (*leaves.variables, *leaves.arrays, *leaves.iterators, *leaves.deferring)
    if not surplus or any(is_within(name, child) for name in of_program for child in surplus):
        return False
    del container[size:]
    return True


def _made(key: str, manifest: Manifest) -> object:
    """Create the object that the checkpoint has under ``key``. Arrays are filled later."""
    if key in manifest.containers:
        kind, shape = manifest.containers[key]
        if kind == "dict":
            return {name: _made(child_key(key, name), manifest) for name in shape}
        entries = [_made(child_key(key, index), manifest) for index in range(shape)]
        return entries if kind == "list" else tuple(entries)
    if key in manifest.values and key not in manifest.iterators:
        return manifest.values[key]
    tensor = manifest.tensors.get(key)
    if tensor is None or tensor.synchronization is not None:
        raise _CannotBeMadeError(key)
    return np.zeros(tensor.shape, dtype_of(tensor))


# Checking ---------------------------------------------------------------------------------------------------------


def _check_fit(leaves: Leaves, aligned: Aligned, path: str) -> None:
    """Raise ValueError unless the checkpoint can fill the objects of this rank."""
    manifest, problems = aligned.manifest, [*aligned.problems]
    targets: dict[str, AnyVariable | Array] = {**leaves.variables, **leaves.arrays}
    for key, target in targets.items():
        tensor = manifest.tensors.get(key)
        if tensor is None:
            if key in manifest.values:
                problems.append(f"{key!r} is {manifest.values[key]!r} in the checkpoint and an array here")
        elif (tensor.shape, tensor.dtype) != (target.shape, target.dtype.name):
            problems.append(
                f"{key!r} has shape {tensor.shape} and dtype {tensor.dtype} in the checkpoint, and shape "
                f"{target.shape} and dtype {target.dtype.name} here"
            )
        elif key in leaves.replaced:
            if jax_makes(target.dtype) != target.dtype:
                problems.append(
                    f"{key!r} is a JAX array of {target.dtype.name}, which JAX makes no more: type "
                    "jax.config.update('jax_enable_x64', True)"
                )
        elif key in leaves.arrays and not is_writable(leaves.tensors.get(key, target)):
            problems.append(f"{key!r} is a read-only array here, and cannot be filled")
    for key in sorted(leaves.places):
        if key in manifest.tensors:
            problems.append(f"{key!r} is an array in the checkpoint and a value here")
        if key in manifest.iterators:
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
    there = (*manifest.tensors, *manifest.values, *manifest.containers)
    if here and not any(here & {key, *keys_above(key)} for key in there):
        raise ValueError(
            f"checkpoint {path} has nothing of what is asked for: it holds {sorted(manifest.tensors)} and "
            f"{sorted(manifest.values)}, the objects are {sorted(here)}; expected the names that it was saved under"
        )


def _misfit(path: str, problems: list[str]) -> ValueError:
    return ValueError(f"checkpoint {path} does not fit the objects: " + "; ".join(problems))


def check_fit_of_all(agreement: Agreement, leaves: Leaves, aligned: Aligned, path: str, values: Values) -> None:
    """Raise on every rank unless the checkpoint fits the objects of all (collective)."""
    tensors = aligned.manifest.tensors.keys()
    there = {*leaves.variables, *leaves.arrays, *_tensors_to_be_made(leaves, aligned.manifest)}
    known = {key for key in tensors if key in there or _owner_of(key, leaves) is not None}
    waiting = [f"{key} (yet to be made)" for key in tensors - known if _is_kept(key, leaves)]
    doubles = [f"{one} as {other}" for one, other in aligned.doubles]
    # Their values will travel between the ranks.
    names = [*known, *waiting, *doubles, *(key for key in leaves.iterators if key in aligned.manifest.iterators)]

    def check() -> int:
        _check_fit(leaves, aligned, path)
        return digest(names)

    agreement.check_same(names, agreement.every_rank_does(check))
    problems = [
        f"{one!r} and {other!r} are one thing here, and differ in the checkpoint"
        for one, other in aligned.doubles
        if not _are_equal(values.of(one), values.of(other))
    ]

    def fail() -> None:
        raise _misfit(path, problems)

    if problems:
        agreement.chief_does(fail)


def _are_equal(one: Array, other: Array) -> bool:
    return (one.shape, one.dtype, one.tobytes()) == (other.shape, other.dtype, other.tobytes())


def _owner_of(key: str, leaves: Leaves) -> str | None:
    """Return the object that keeps the value ``key`` for a variable that it creates later."""
    return next((name for name in leaves.deferring if key.startswith(f"{name}/")), None)


def _is_kept(key: str, leaves: Leaves) -> bool:
    """Return whether the value ``key`` is kept for a variable that is created later."""
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


# Filling ----------------------------------------------------------------------------------------------------------


def restore_iterators(agreement: Agreement, leaves: Leaves, manifest: Manifest) -> None:
    """Restore the states of iterators (collective if there are any). An exception of one is raised on all ranks."""
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
        Keys of the checkpoint without an object; values that optimizers keep for later variables, by key of the
        optimizer; and values for variables that objects have not created yet.
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
            _restore_variable(leaves.variables[key], value)
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
    elif key in leaves.tensors:
        fill_torch(leaves.tensors[key], value)
    else:
        target = leaves.arrays[key]
        with place_of(target).current():
            np.copyto(target, place_of(target).brings(value))


def _restore_variable(variable: AnyVariable, array: Array) -> None:
    """Assign a restored value, in cross-replica context, on every rank.

    Copies of an ON_READ variable with aggregation SUM get equal shares. Replica 0 gets the remainder of integers.
    """
    variable.assign(array)
    if isinstance(variable, Variable) and _is_sum(variable) and array.dtype.kind in "iu":
        for copy, share in zip(variable.values, _shares_of(variable, array), strict=True):
            copy.assign(share)


def _start_variable(variable: AnyVariable, array: Array) -> None:
    """Initialize an unused variable with a restored value; in any context, local."""
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


# Values for later variables ---------------------------------------------------------------------------------------


class Waiting:
    """Restored values for variables that do not exist yet. Each is assigned before the first use of its variable.

    Every rank has all values, so this takes no communication. The objects keep it alive.

    Attributes:
        is_expected: Whether unused values cause no warning.
        has_given: Whether any variable has received a value.
        without_value: Keys of later variables without a value.
    """

    def __init__(self, path: str, objects: dict[str, object], manifest: Manifest, values: dict[str, Array]) -> None:
        self._path, self._objects, self._manifest, self._values = path, objects, manifest, values
        self.has_given = False
        self.without_value: dict[str, None] = {}
        self.is_expected = False
        self._keepers: list[object] = []
        if values:
            leaves = collect(objects)
            self._keepers += [leaves.objects[key] for key in sorted(leaves.given)]
            begin_to_wait(self)
        for keeper in self._keepers:
            vars(keeper)[WAITING_ATTRIBUTE] = self

    @property
    def open(self) -> tuple[str, ...]:
        """Keys of the values that no variable has received."""
        return tuple(sorted(self._values))

    def look(self, used: Variable | None = None) -> None:
        """Assign the values of new variables; local, in any context.

        A value is assigned once: a later variable of the same path keeps its own. If the value of ``used``, the
        variable that is about to be used, does not fit, this is a ValueError. Other errors are reported where they
        matter.
        """
        if not self._values:
            return
        for source, variable in self._give(collect(self._objects, is_complete=False)).items():
            if any(part is used for part in parts_of(variable)):
                raise self._misfit(source, variable)

    def look_at_all(self) -> None:
        """Assign the values of new variables, raise any error, and stop if nothing waits."""
        if self._values:
            for source, variable in self._give(collect(self._objects)).items():
                raise self._misfit(source, variable)
        if not self._values:
            self.end()

    def _give(self, leaves: Leaves) -> dict[str, AnyVariable]:
        """Assign values, and return the variables that do not fit by key of their value."""
        aligned = align(self._manifest, leaves)
        # One of two values of a variable may have been assigned.
        others = {one: other for one, other in aligned.doubles if one not in self._values}
        given, misfits = set(), {}
        for key, variable in leaves.variables.items():
            if not any(part.is_unused for part in parts_of(variable)):
                continue
            source = others.get(aligned.source(key), aligned.source(key))
            value = self._values.get(source)
            if value is None:
                if key not in aligned.manifest.tensors:
                    self.without_value[key] = None
            elif (value.shape, value.dtype) != (variable.shape, variable.dtype):
                misfits[source] = variable
            else:
                _start_variable(variable, value)
                given.add(source)
        for source in given:
            del self._values[source]
            self.has_given = True
        # Its attribute stays on the objects, because a caller may be iterating over their attributes.
        if not self._values:
            stop_waiting(self)
        return misfits

    def _misfit(self, source: str, variable: AnyVariable) -> ValueError:
        value = self._values[source]
        return _misfit(
            self._path,
            [
                f"{source!r} has shape {value.shape} and dtype {value.dtype.name} in the checkpoint, and the variable "
                f"that was made for it has shape {variable.shape} and dtype {variable.dtype.name}"
            ],
        )

    def add_to(self, leaves: Leaves) -> None:
        """Add the values to the parts to save, so that a checkpoint keeps them."""
        there = {*leaves.saved(), *leaves.links}
        lacking = [key for key in self.open if follow(key, leaves.links) not in there]
        for key in lacking:
            tensor = self._manifest.tensors[key]
            leaves.add("arrays", key, self._values[key])
            leaves.awaited[key] = (tensor.synchronization, tensor.aggregation)
        for key, to in self._manifest.links.items():
            is_taken = keys_above(key) & there or any(is_within(name, key) for name in (*there, *leaves.containers))
            if not is_taken and any(is_within(name, to) for name in lacking):
                leaves.add("links", key, to)

    def end(self) -> None:
        """Stop waiting, and remove the attributes of the objects."""
        stop_waiting(self)
        self._values.clear()
        for keeper in self._keepers:
            if vars(keeper).get(WAITING_ATTRIBUTE) is self:
                del vars(keeper)[WAITING_ATTRIBUTE]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # A copied or unpickled object waits for nothing.
        return type(None), ()

    def __del__(self) -> None:
        if not self.is_expected and self._values:
            warnings.warn(
                f"checkpoint {self._path} has values that no variable has got: {list(self.open)}; check with "
                "status.assert_consumed() when all variables are made, or say restore(path).expect_partial()",
                stacklevel=2,
            )


@dataclass(eq=False, repr=False)
class LoadStatus:
    """The result of ``Checkpoint.restore``, which tells whether everything was restored.

    A status that is deleted without a check warns about missing and unused values.

    Attributes:
        path: Path of the checkpoint.
        unused: Keys of the checkpoint that no object has.
    """

    path: str
    unused: tuple[str, ...]
    _missing: list[str]
    _deferred: dict[str, dict[str, Array]]
    _waiting: Waiting
    _is_any: bool
    _is_asked: bool = False

    def __repr__(self) -> str:
        counts = f"{len(self.missing)} missing, {len(self.unused)} unused, {len(self.deferred)} deferred"
        return f"<LoadStatus of {self.path!r}: {counts}>"

    @property
    def missing(self) -> tuple[str, ...]:
        """Keys of objects without a value in the checkpoint, later ones included. They keep their values."""
        return tuple(dict.fromkeys((*self._missing, *self._waiting.without_value)))

    @property
    def deferred(self) -> tuple[str, ...]:
        """Keys of values that wait for variables which an object has not created yet."""
        return (*(f"{key}/{name}" for key, values in self._deferred.items() for name in values), *self._waiting.open)

    def assert_consumed(self) -> LoadStatus:
        """Return the status if every value was restored and every object received one.

        Raises:
            AssertionError: Values are missing, unused or waiting. The message has the keys.
            ValueError: A variable that was created since has another shape or dtype than its value.
        """
        self._ask()
        problems = self._problems()
        if self.deferred:
            problems.append(
                f"values that wait for variables of an optimizer, or of an object: {list(self.deferred)} (call "
                "optimizer.build first; make the variables, and only then restore where they had been made elsewhere)"
            )
        if problems:
            raise AssertionError(f"checkpoint {self.path} does not match the objects: " + "; ".join(problems))
        return self

    def assert_existing_objects_matched(self) -> LoadStatus:
        """Return the status if every existing object received a value.

        Raises:
            AssertionError: Values are missing.
            ValueError: A variable that was created since has another shape or dtype than its value.
        """
        self._ask()
        if self.missing:
            raise AssertionError(f"checkpoint {self.path} has no value for {list(self.missing)}")
        return self

    def assert_nontrivial_match(self) -> LoadStatus:
        """Return the status if any object received a value.

        Raises:
            AssertionError: No object did.
            ValueError: A variable that was created since has another shape or dtype than its value.
        """
        self._ask()
        if not self._is_any and not self._waiting.has_given:
            raise AssertionError(f"checkpoint {self.path} has given no object a value; it has {list(self.deferred)}")
        return self

    def expect_partial(self) -> LoadStatus:
        """Suppress warnings about missing and unused values. Waiting values are still assigned later."""
        self._is_asked = True
        self._waiting.is_expected = True
        return self

    def _ask(self) -> None:
        self._is_asked = True
        self._waiting.look_at_all()

    def _problems(self) -> list[str]:
        problems = []
        if self.missing:
            problems.append(f"no value for {list(self.missing)}")
        if self.unused:
            problems.append(f"values that no object has: {list(self.unused)}")
        return problems

    def __del__(self) -> None:
        if not self._is_asked and self._problems():
            warnings.warn(
                f"checkpoint {self.path} does not match the objects: {'; '.join(self._problems())}; "
                "check with restore(path).assert_consumed(), or say restore(path).expect_partial()",
                stacklevel=2,
            )
