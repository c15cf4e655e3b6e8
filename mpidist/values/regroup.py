"""From one structure per replica to one structure of distributed values, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.arrays.convert import is_array_like
from mpidist.core import nest
from mpidist.values.component import Component
from mpidist.values.composite import CompositeVariable
from mpidist.values.distributed import Mirrored, PerReplica, ReplicaValues
from mpidist.values.indexed_slices import IndexedSlices
from mpidist.values.variable import Variable


def regroup(
    values: Sequence[Any],
    replica_ids: Sequence[int] | None = None,
    always_wrap: bool = False,
    *,
    wrap_lone: bool = False,
    unwrap_objects: bool = False,
) -> Any:
    """Return one structure whose leaves hold the corresponding leaves of ``values``.

    None, an equal string, and a variable come out unwrapped; so do the components of one variable, as the
    variable. Numbers and arrays are always wrapped when there are several replicas, also when they are equal or
    identical: the same replicas laid out over several ranks could not know, and must give the same numbers.

    Args:
        values: A structure per local replica.
        replica_ids: Their global ids.
        always_wrap: Wrap every leaf in a PerReplica, also that of a lone replica.
        wrap_lone: Treat a lone replica as one of several, for strategies whose ranks differ in their numbers.
        unwrap_objects: Unwrap also any other object that is one and the same on every replica and is neither
            number nor array; for the arguments of ``merge_call``.

    Raises:
        ValueError: The structures differ.

    >>> regroup([{"loss": 1.0, "name": "a"}, {"loss": 2.0, "name": "a"}])
    {'loss': PerReplica:{0: 1.0, 1: 2.0}, 'name': 'a'}
    """
    if len(values) == 1 and not (always_wrap or wrap_lone):
        return values[0]

    def group(*leaves: Any) -> Any:
        # What a replica function captured and hands on is its replica's value.
        leaves = tuple(
            leaf.values[i] if isinstance(leaf, PerReplica) and len(leaf.values) == len(leaves) else leaf
            for i, leaf in enumerate(leaves)
        )
        if not always_wrap:
            first = leaves[0]
            if isinstance(first, Component) and all(
                isinstance(leaf, Component) and leaf.container is first.container for leaf in leaves
            ):
                return first.container
            if isinstance(first, str) and all(isinstance(leaf, str) and leaf == first for leaf in leaves):
                return first
            if all(leaf is first for leaf in leaves) and _unwraps(first, unwrap_objects):
                return first
        return PerReplica(leaves, replica_ids)

    return nest.map_structure(group, *values)


def _unwraps(leaf: object, unwrap_objects: bool) -> bool:
    if leaf is None or isinstance(leaf, (Variable, CompositeVariable)):
        return True
    return unwrap_objects and not (is_array_like(leaf) or isinstance(leaf, IndexedSlices))


def select_replica(local_id: int, structure: Any) -> Any:
    """Return ``structure`` with every distributed value replaced by its component for a local replica.

    Variables stay as they are: they resolve by context.

    >>> select_replica(1, {"x": PerReplica((1, 2)), "y": 5})
    {'x': 2, 'y': 5}
    """

    def select(leaf: Any) -> Any:
        return leaf.values[local_id] if isinstance(leaf, ReplicaValues) else leaf

    return nest.map_structure(select, structure)


def select_replica_mirrored(local_id: int, structure: Any) -> Any:
    """As :func:`select_replica`, for structures in which nothing may differ between replicas.

    Raises:
        TypeError: A leaf is a PerReplica.
    """
    for path, leaf in nest.flatten_with_path(structure):
        if isinstance(leaf, ReplicaValues) and not isinstance(leaf, Mirrored):
            raise TypeError(f"expected a value that is equal on all replicas, and was given {leaf!r}{path}")
    return select_replica(local_id, structure)
