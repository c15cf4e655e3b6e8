"""Lists and dicts of a checkpoint: what stands in the manifest of them, and how they get the entries they lack."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpidist.checkpoint.leaves import Leaves, child_key, is_within, keys_above
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


def _additions(key: str, container: Any, manifest: Manifest) -> dict[Any, Any]:
    """Return the entries that a list or dict lacks and can be given, by index or name."""
    kind, shape = manifest.containers.get(key, (None, None))
    additions: dict[Any, Any] = {}
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


def _shorten(container: list[Any], key: str, manifest: Manifest, leaves: Leaves) -> bool:
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
