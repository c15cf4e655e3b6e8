"""Align a checkpoint with the objects that are here: links, lists and dicts."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mpidist.checkpoint.collecting import Container, Leaves, child_key, collect, follow, is_within, keys_above
from mpidist.checkpoint.formats import Manifest, dtype_of
from mpidist.values.composite import AnyVariable, slot_keys


@dataclass
class Aligned:
    """A checkpoint as the objects that are here would have saved it.

    Attributes:
        manifest: With the keys of the objects.
        sources: Keys of tensors in the checkpoint, where they are others.
        doubles: Pairs of keys of tensors in the checkpoint that are one thing here.
        problems: Values that differ, and are one thing here.
    """

    manifest: Manifest
    sources: dict[str, str] = field(default_factory=dict)
    doubles: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def source(self, key: str) -> str:
        """Return the key of a tensor in the checkpoint."""
        return self.sources.get(key, key)


# The entries of a manifest by kind and key.
_Tables = dict[str, dict[str, Any]]


def align(manifest: Manifest, leaves: Leaves) -> Aligned:
    """Return a checkpoint as seen by the objects; nothing is changed.

    One thing that is several here is there for each of them; several things that are one here are there once.
    """
    tables: _Tables = {kind: dict(getattr(manifest, kind)) for kind in ("tensors", "values", "containers", "classes")}
    tables["iterators"] = dict.fromkeys(manifest.iterators)
    aligned = Aligned(manifest)
    _take_apart(tables, manifest.links, leaves, aligned)
    _bring_together(tables, leaves, aligned)
    _match_slots(tables["tensors"], leaves, aligned)
    changed: dict[str, Any] = {**tables, "iterators": tuple(tables["iterators"])}
    aligned.manifest = replace(manifest, **changed)
    return aligned


def _take_apart(tables: _Tables, links: Mapping[str, str], leaves: Leaves, aligned: Aligned) -> None:
    """Add the keys of objects here that links lead to.

    Others would have no end where links form a ring.
    """
    sources = {key: follow(key, links) for key in (*leaves.saved(), *leaves.containers, *leaves.objects)}
    sources = {key: source for key, source in sources.items() if source != key}
    names = {kind: sorted(table) for kind, table in tables.items()}

    def add(kind: str, key: str, name: str) -> None:
        if key not in tables[kind]:
            tables[kind][key] = tables[kind][name]
            if kind == "tensors":
                aligned.sources[key] = name

    for key, source in sources.items():
        # These take what they have no part for yet, too.
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
            lacking = (key + name[len(source) :] for key in sorted(keys))
            # One that lacks it is enough for the value to wait.
            first = next((key for key in lacking if follow(key, leaves.links) not in here), None)
            if first is not None:
                add("tensors", first, name)


def _inside(names: list[str], outer: str) -> list[str]:
    """Return those of sorted keys that are of something in the object ``outer``."""
    return names[bisect_left(names, f"{outer}/") : bisect_left(names, f"{outer}0")]


def _bring_together(tables: _Tables, leaves: Leaves, aligned: Aligned) -> None:
    if not leaves.links:
        return
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


def find_paths(objects: dict[str, object], manifest: Manifest) -> dict[AnyVariable, str]:
    """Return the path in a checkpoint of each variable that the objects hold now."""
    leaves = collect(objects, is_complete=False)
    return _paths_there(leaves, align(manifest, leaves))


def _paths_there(leaves: Leaves, aligned: Aligned) -> dict[AnyVariable, str]:
    return {variable: aligned.source(key) for variable, key in leaves.paths().items()}


def _match_slots(tensors: dict[str, Any], leaves: Leaves, aligned: Aligned) -> None:
    """Rename the slots of the checkpoint to the keys that they have here."""
    paths, paths_there = leaves.paths(), _paths_there(leaves, aligned)
    moved: dict[str, str] = {}
    for owner, slots in leaves.slots.items():
        here, there = (slot_keys(list(slots.of), each) for each in (paths, paths_there))
        for (group, *_), candidates, names in zip(here, there, slots.of.values(), strict=True):
            saved = [each for each in candidates if any(f"{owner}/{each}/{name}" in tensors for name in names)]
            moved.update({f"{owner}/{group}/{name}": f"{owner}/{each}/{name}" for each in saved[:1] for name in names})
    # All at once, because a variable may have the path here that another variable has in the checkpoint.
    entries = {key: (tensors[name], aligned.source(name)) for key, name in moved.items() if name in tensors}
    for name in moved.values():
        tensors.pop(name, None)
        aligned.sources.pop(name, None)
    for key, (tensor, source) in entries.items():
        tensors[key] = tensor
        if key != source:
            aligned.sources[key] = source


# Lists and dicts --------------------------------------------------------------------------------------------------


class _CannotBeMadeError(Exception):
    """Something that only the program can make, such as a variable."""


def describe_container(container: Container) -> list[object]:
    """Return the kind of a container, and its keys or its length."""
    if isinstance(container, Mapping):
        return ["dict", list(container)]
    return ["list" if isinstance(container, list) else "tuple", len(container)]


def give_shape(leaves: Leaves, manifest: Manifest) -> bool:
    """Give lists and dicts the entries that a checkpoint has; return whether anything changed.

    Lists get the length that they had and dicts the keys that they lack, where the entries are numbers, strings, None,
    new arrays, or lists, tuples and dicts of them. Variables, and arrays that are there, are left alone.
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


def tensors_to_be_made(leaves: Leaves, manifest: Manifest) -> set[str]:
    """Return the keys of the arrays that :func:`give_shape` would make; nothing is changed."""
    entries = {
        child_key(key, name)
        for key, container in leaves.containers.items()
        for name in _additions(key, container, manifest)
    }
    return {key for key in manifest.tensors if entries & {key, *keys_above(key)}} if entries else set()


def _additions(key: str, container: Container, manifest: Manifest) -> dict[str | int, object]:
    """Return entries that a list or dict lacks and can get, by index or name."""
    kind, shape = manifest.containers.get(key, (None, None))
    additions: dict[str | int, object] = {}
    if kind == "list" and isinstance(container, list):
        try:
            return {index: _made(child_key(key, index), manifest) for index in range(len(container), shape)}
        except _CannotBeMadeError:
            return {}
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
    # Arrays, too: the program may count on each of them.
    of_program = (*leaves.variables, *leaves.arrays, *leaves.iterators, *leaves.deferring)
    if not surplus or any(is_within(name, child) for name in of_program for child in surplus):
        return False
    del container[size:]
    return True


def _made(key: str, manifest: Manifest) -> object:
    """Return the thing that the checkpoint has under ``key``, arrays still to be filled."""
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
