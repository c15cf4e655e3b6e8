"""Classes that JAX takes for pytrees are structures: of Flax, Equinox and optax, and those that a program registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import tree_util

from mpidist.core import nest


def register_trees() -> None:
    """Have mpidist take JAX's pytrees apart as JAX does, in this process.

    Lists, tuples and dicts it knows already. A leaf None is something to mpidist and nothing to JAX.
    """
    nest.register(nest.Kind(_is_node, _children, _rebuilt))


def _is_node(of: type) -> bool:
    return of is not type(None) and tree_util.is_tree_node(of)


def _parts(node: object) -> list[tuple[str, Any]]:
    pairs, _ = tree_util.flatten_one_level_with_keys(node)
    return [(tree_util.keystr((key,), simple=True), part) for key, part in pairs]


def _children(node: object) -> list[tuple[object, Any]]:
    return [(name, part) for name, part in _parts(node) if part is not None]


def _rebuilt(like: object, children: Sequence[object]) -> Any:
    parts = [part for _, part in _parts(like)]
    supply = iter(children)
    changed = [None if part is None else next(supply) for part in parts]
    if all(part is other for part, other in zip(parts, changed, strict=True)):
        # An object that changes in place, as a module of flax.nnx does, stays the one that the program has.
        return like
    return tree_util.tree_unflatten(tree_util.tree_structure(like, is_leaf=lambda part: part is not like), changed)
