"""Values with one component per replica: PerReplica (they differ), Mirrored (they are equal)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from mpidist.arrays.convert import is_array_like
from mpidist.arrays.device_ops import is_device_array
from mpidist.arrays.dtypes import Array, DType
from mpidist.core import nest
from mpidist.core.context import current_frame, has_strategy
from mpidist.values.component import Assignable, Component, ReadsAsArray
from mpidist.values.indexed_slices import IndexedSlices
from mpidist.values.placement import array_of

Value = TypeVar("Value")


class DistributedValues:
    """The base of values per replica: PerReplica, Mirrored and Variable (tf.distribute.DistributedValues)."""


class ReplicaValues(DistributedValues):
    """A value per replica of this rank.

    Functions of replicas get one each; a Variable resolves by itself.

    Args:
        values: The components of this rank's replicas, in order.
        replica_ids: Their global replica ids; 0, 1, ... by default.

    >>> PerReplica((1, 2), replica_ids=(2, 3))
    PerReplica:{2: 1, 3: 2}
    """

    def __init__(self, values: Sequence[object], replica_ids: Sequence[int] | None = None) -> None:
        if len(values) == 0:
            raise ValueError(f"{type(self).__name__} was given no values; expected one per local replica")
        self.values: tuple[Any, ...] = tuple(values)
        self.replica_ids = tuple(range(len(self.values)) if replica_ids is None else replica_ids)
        if len(self.replica_ids) != len(self.values):
            raise ValueError(f"{len(self.values)} values were given with {len(self.replica_ids)} replica ids")

    def __repr__(self) -> str:
        parts = ", ".join(f"{i}: {value!r}" for i, value in zip(self.replica_ids, self.values, strict=True))
        return f"{type(self).__name__}:{{{parts}}}"


class PerReplica(ReplicaValues, ReadsAsArray):
    """Components that differ between replicas.

    Inside ``strategy.run``, and in an update, it is this replica's component, whether it came as an argument or is
    captured: operators, indexing and attributes are the component's. Elsewhere using it as one array raises ValueError
    (an attribute: AttributeError), since nobody could say which replica is meant.

    >>> import mpidist
    >>> with mpidist.MirroredStrategy(["cpu:0", "cpu:1"], communicator=None) as strategy:
    ...     x = strategy.experimental_distribute_values_from_function(lambda ctx: ctx.replica_id_in_sync_group)
    ...     strategy.run(lambda: x + 10)
    PerReplica:{0: 10, 1: 11}
    """

    def here(self) -> Any:
        """Return the component of the replica that the context addresses."""
        frame = current_frame()
        index = frame.update_replica_id
        if index is None and frame.replica_context is not None and has_strategy():
            index = frame.replica_context.local_replica_id
        extended = frame.strategy.extended
        # An update of a copy that all replicas share is of none of them.
        is_of_all = frame.update_replica_id is not None and extended.is_central and len(self.values) > 1
        if index is None or len(self.values) != len(extended.local_replica_ids) or is_of_all:
            raise ValueError(
                f"a PerReplica value of {len(self.values)} replicas was used as one array; "
                "use it inside strategy.run(fn), combine it with strategy.reduce('SUM', value, axis=None), "
                "or take it apart with strategy.experimental_local_results(value)"
            )
        return self.values[index]

    def as_array(self) -> Array:
        """See ``ReadsAsArray``."""
        return array_of(self.here())

    def _is_on_device(self) -> bool:
        return any(map(is_device_array, self.values))

    def __getattr__(self, name: str) -> Any:
        # Protocols that Python looks for, such as that of copy, are the container's own.
        if name.startswith("_") or "values" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            component = self.here()
        except ValueError as error:
            raise AttributeError(str(error)) from None  # so that hasattr() says no
        return getattr(component, name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        del types
        return func(*nest.map_structure(here, tuple(args)), **nest.map_structure(here, kwargs or {}))

    def __getitem__(self, key: object) -> Any:
        return self.here()[here(key)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.here())

    def __len__(self) -> int:
        return len(self.here())


def here(value: object) -> Any:
    """Return ``value``, or this replica's component of a PerReplica."""
    return value.here() if isinstance(value, PerReplica) else value


def _forward(name: str, reflected: bool) -> Callable[..., Any]:
    # The component's own library computes, which need not be NumPy.
    function = getattr(operator, name)

    def forward(self: PerReplica, *other: object) -> Any:
        operands = [self.here(), *map(here, other)]
        return function(*(reversed(operands) if reflected else operands))

    return forward


_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift"
for _name in (_ARITHMETIC + " eq ne lt le gt ge neg pos abs invert").split():
    setattr(PerReplica, f"__{_name.strip('_')}__", _forward(_name, reflected=False))
for _name in _ARITHMETIC.split():
    setattr(PerReplica, f"__r{_name.strip('_')}__", _forward(_name, reflected=True))
PerReplica.__hash__ = object.__hash__  # type: ignore[method-assign]


class Mirrored(ReplicaValues, ReadsAsArray):
    """Components that are equal on all replicas.

    It behaves as an array by way of the first local copy.

    >>> import numpy as np
    >>> Mirrored((np.array([1.0, 2.0]), np.array([1.0, 2.0]))) + 1
    array([2., 3.])
    """

    def as_array(self) -> Array:
        """See ``ReadsAsArray``."""
        return array_of(self.values[0])

    def _is_on_device(self) -> bool:
        return is_device_array(self.values[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one copy."""
        return self.as_array().shape

    @property
    def dtype(self) -> DType:
        """Dtype of one copy."""
        return self.as_array().dtype


def regroup(
    values: Sequence[Value],
    replica_ids: Sequence[int] | None = None,
    always_wrap: bool = False,
    *,
    wrap_lone: bool = False,
    unwrap_objects: bool = False,
) -> Value:
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

    def group(*leaves: object) -> object:
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

    grouped: Value = nest.map_structure(group, *values)
    return grouped


def _unwraps(leaf: object, unwrap_objects: bool) -> bool:
    if leaf is None or isinstance(leaf, Assignable):
        return True
    return unwrap_objects and not (is_array_like(leaf) or isinstance(leaf, IndexedSlices))


def select_replica(local_id: int, structure: Value) -> Value:
    """Return ``structure`` with every distributed value replaced by its component for a local replica.

    Variables stay as they are: they resolve by context.

    >>> select_replica(1, {"x": PerReplica((1, 2)), "y": 5})
    {'x': 2, 'y': 5}
    """

    def select(leaf: object) -> object:
        return leaf.values[local_id] if isinstance(leaf, ReplicaValues) else leaf

    selected: Value = nest.map_structure(select, structure)
    return selected
