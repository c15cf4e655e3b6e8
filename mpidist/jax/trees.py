"""Registers JAX's pytrees as structures: classes of Flax, Equinox, optax and of the program."""

from __future__ import annotations

from collections.abc import Sequence

from jax import tree_util

from mpidist.core import nest


def register_trees() -> None:
    """Flatten JAX's pytrees as JAX does: inner lists and dicts, too, and without None."""
    nest.register(nest.NestKind(_is_node, _children, _rebuilt))


def _is_node(of: type) -> bool:
    return of is not type(None) and tree_util.is_tree_node(of)


def _children(tree: object) -> list[tuple[object, object]]:
    pairs, _ = tree_util.tree_flatten_with_path(tree)
    return [(tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in pairs]


def _rebuilt(like: object, children: Sequence[object]) -> object:
    leaves, structure = tree_util.tree_flatten(like)
    if all(leaf is child for leaf, child in zip(leaves, children, strict=True)):
        # The program keeps objects that change in place, such as modules of flax.nnx.
        return like
    return tree_util.tree_unflatten(structure, children)
