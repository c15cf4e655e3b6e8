"""Classes that JAX takes for pytrees are structures.

They are those of Flax, Equinox and optax, and those that a program registers with JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import tree_util

from mpidist.core import nest


def register_trees() -> None:
    """Have mpidist take JAX's pytrees apart as JAX does, in this process.

    Such a tree has all its leaves on one level, lists and dicts in it included, and None in it is nothing, as in JAX.
    """
    nest.register(nest.NestKind(_is_node, _children, _rebuilt))


def _is_node(of: type) -> bool:
    return of is not type(None) and tree_util.is_tree_node(of)


def _children(tree: object) -> list[tuple[object, Any]]:
    pairs, _ = tree_util.tree_flatten_with_path(tree)
    return [(tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in pairs]


def _rebuilt(like: object, children: Sequence[object]) -> Any:
    leaves, structure = tree_util.tree_flatten(like)
    if all(leaf is child for leaf, child in zip(leaves, children, strict=True)):
        # An object that changes in place, as a module of flax.nnx does, stays the one that the program has.
        return like
    return tree_util.tree_unflatten(structure, children)
