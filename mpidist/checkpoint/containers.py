"""Lists and dicts of a checkpoint: what stands in the manifest of them, and how they get the entries they lack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpidist.checkpoint.leaves import Leaves, child_key
from mpidist.checkpoint.manifest import Manifest, dtype_of


class _CannotBeMadeError(Exception):
    """Something that only the program can make, such as a variable."""


def describe_containers(leaves: Leaves) -> dict[str, Any]:
    """Return what the manifest says of dicts, lists and tuples."""
    return {key: describe_container(container) for key, container in leaves.containers.items()}


def describe_container(container: Any) -> list[Any]:
    """Return the kind of a container, and its keys or its length."""
    if isinstance(container, Mapping):
        return ["dict", list(container)]
    return ["list" if isinstance(container, list) else "tuple", len(container)]


def give_shape(leaves: Leaves, manifest: Manifest) -> bool:
    """Let lists and dicts have room for the entries that a checkpoint has of them; whether anything changed.

    Lists get the length that they had and dicts the keys that they lack, where the entries are numbers, strings, None,
    new arrays, or lists, tuples and dicts of them. Variables, and arrays that are there, are left alone.
    """
    changed = False
    for key, container in leaves.containers.items():
        kind, shape = manifest.containers.get(key, (None, None))
        if kind == "list" and isinstance(container, list):
            changed |= _lengthen(container, key, shape, manifest)
            changed |= _shorten(container, key, shape, leaves)
        elif kind == "dict" and isinstance(container, dict):
            changed |= _add_keys(container, key, shape, manifest)
    return changed


def _lengthen(container: list[Any], key: str, size: int, manifest: Manifest) -> bool:
    try:
        more = [_made(child_key(key, index), manifest) for index in range(len(container), size)]
    except _CannotBeMadeError:
        return False
    container.extend(more)
    return bool(more)


def _shorten(container: list[Any], key: str, size: int, leaves: Leaves) -> bool:
    surplus = [child_key(key, index) for index in range(size, len(container))]
    # Arrays, too: the program may count on each of them.
    of_program = (*leaves.variables, *leaves.arrays, *leaves.iterators, *leaves.deferring)
    if not surplus or any(_is_under(name, child) for name in of_program for child in surplus):
        return False
    del container[size:]
    return True


def _add_keys(container: dict[Any, Any], key: str, names: list[Any], manifest: Manifest) -> bool:
    changed = False
    for name in names:
        if name not in container:
            try:
                container[name] = _made(child_key(key, name), manifest)
            except _CannotBeMadeError:
                continue
            changed = True
    return changed


def _made(key: str, manifest: Manifest) -> Any:
    """Return what the checkpoint has under ``key``, arrays still to be filled."""
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


def _is_under(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}/")
