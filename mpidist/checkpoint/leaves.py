"""The parts of a checkpoint: objects and nests of them taken apart into named variables, arrays and values."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.checkpoint.format_rules import DEEPEST, is_state
from mpidist.core.enums import VariableAggregation, VariableSynchronization
from mpidist.values import Variable
from mpidist.values.composite import AnyVariable, cut_for, parts_of

# Of an object that takes part by its attributes: values that wait for its variables.
WAITING_ATTRIBUTE = "_mpidist_waiting"


@dataclass(frozen=True)
class ValueRef:
    """Where a number or an immutable array stands.

    Attributes:
        get: Returns the value there.
        put: Lets another value stand there.
    """

    get: Callable[[], Any]
    put: Callable[[Any], None]


def entry_of(container: Any, name: Any, outer: ValueRef | None) -> ValueRef | None:
    """Return a reference to an entry of a container at ``outer``, or None."""
    if isinstance(container, (dict, list)):
        return ValueRef(partial(operator.getitem, container, name), partial(operator.setitem, container, name))
    if not isinstance(container, tuple) or outer is None:
        return None

    def put(value: Any) -> None:
        # Another tuple of the same class takes its place.
        before = outer.get()
        entries = [*before[:name], value, *before[name + 1 :]]
        outer.put(before._make(entries) if hasattr(before, "_make") else type(before)(entries))

    return ValueRef(lambda: outer.get()[name], put)


def attribute_of(holder: Any, name: str, outer: ValueRef | None) -> ValueRef | None:
    """Return a reference to an attribute of an object at ``outer``, or None."""
    params: Any = getattr(holder, "__dataclass_params__", None)
    if params is None or not params.frozen:
        return ValueRef(lambda: vars(holder)[name], partial(setattr, holder, name))
    if outer is None or not any(field.name == name and field.init for field in dataclasses.fields(holder)):
        return None
    # Another frozen dataclass takes its place.
    return ValueRef(
        lambda: getattr(outer.get(), name),
        lambda value: outer.put(dataclasses.replace(outer.get(), **{name: value})),
    )


@dataclass
class Leaves:
    """The parts of a checkpoint by key; keys are names and positions joined by "/".

    Attributes:
        variables: Variables of any synchronization and aggregation; those in shards count as one.
        arrays: NumPy or CuPy arrays, filled in place when they are restored.
        tensors: Those of the arrays that are tensors of PyTorch.
        awaited: Synchronization and aggregation of variables that are yet to come, whose values are among the arrays.
        replaced: Where those of the arrays stand that cannot be filled: arrays of JAX.
        places: Where numbers, strings and None stand.
        iterators: Objects whose state is saved: with ``state()`` and ``restore(state)``.
        deferring: Objects that take values of parts that they do not have yet, by key.
        containers: Dicts, lists and tuples.
        objects: Objects that take part by their attributes.
        given: Those of them that are not themselves in an attribute of another one.
        links: Further keys of things that have one already: variables, arrays that can be filled, and objects.
    """

    variables: dict[str, AnyVariable] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    awaited: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)
    replaced: dict[str, ValueRef] = field(default_factory=dict)
    places: dict[str, ValueRef] = field(default_factory=dict)
    iterators: dict[str, Any] = field(default_factory=dict)
    deferring: dict[str, Any] = field(default_factory=dict)
    containers: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    links: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        yield from self.variables
        yield from self.arrays
        yield from self.places
        yield from self.iterators

    def saved(self) -> Iterator[str]:
        """Yield the keys of all that is saved, if only by parts yet to come."""
        yield from self
        yield from self.deferring

    def values(self) -> dict[str, Any]:
        """Return numbers, strings, None and states of iterators, in types that JSON has.

        Raises:
            TypeError: The state of an iterator has something else.
        """
        values = {key: place.get() for key, place in self.places.items()}
        values = {key: v.item() if isinstance(v, np.generic) else v for key, v in values.items()}
        for key, iterator in self.iterators.items():
            values[key] = _checked_state(key, iterator)
        return values

    def classes(self) -> dict[str, str]:
        """Return the class names of optimizers, whose values mean something else in another class."""
        return {key: type(owner).__name__ for key, owner in self.deferring.items()}

    def names_of_all_ranks(self) -> list[str]:
        """Return the keys that every rank must have, whose values travel between ranks.

        Arrays in lists and dicts are not among them, which may have grown on one rank alone: a restore makes them.
        """
        growing = {key for key, container in self.containers.items() if isinstance(container, (list, dict))}
        fixed = self.deferring.keys()
        grown = {key for key in self.arrays if growing & keys_above(key) and not fixed & keys_above(key)}
        return [key for key in (*self.variables, *self.arrays, *self.iterators) if key not in grown]

    def check_given(self) -> None:
        """Raise TypeError where an object that takes part by its attributes has nothing in them."""
        for key in sorted(self.given):
            if not any(is_within(name, key) for name in (*self.saved(), *self.links)):
                raise TypeError(
                    f"checkpoint object {key!r} is a {type(self.objects[key]).__name__} with nothing to save in its "
                    "attributes; expected variables, optimizers, metrics or arrays there: make them before saving, or "
                    "give numbers to Checkpoint(name=value) itself"
                )

    def add(self, kind: str, key: str, value: Any) -> None:
        """Take up a part of one kind.

        Raises:
            ValueError: There is another one of its name.
        """
        is_leaf = key in self.variables or key in self.arrays or key in self.places or key in self.iterators
        if is_leaf or key in self.containers or key in self.links:
            raise ValueError(f"two checkpoint objects are called {key!r}; expected dict keys that differ as text")
        getattr(self, kind)[key] = value


def _checked_state(key: str, iterator: Any) -> Any:
    state = iterator.state()
    try:
        held = json.loads(json.dumps(state))
        if not is_state(held):
            raise ValueError(f"it is nested more than {DEEPEST} deep")
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"state() of checkpoint object {key!r}, a {type(iterator).__name__}, returned what JSON cannot hold "
            f"({error}); expected numbers, strings, None, and lists and dicts of them"
        ) from error
    return held


def is_on_read(variable: AnyVariable) -> bool:
    """Return whether reading the variable takes all ranks."""
    return variable.synchronization == VariableSynchronization.ON_READ


def escaped(name: str) -> str:
    """Return a name as it stands in a key."""
    return name.replace("%", "%25").replace("/", "%2F")


def keys_above(key: str) -> set[str]:
    """Return the keys of the objects that hold ``key``."""
    names = key.split("/")
    return {"/".join(names[:end]) for end in range(1, len(names))}


def is_within(key: str, outer: str) -> bool:
    """Return whether ``key`` is that of the object ``outer``, or of something in it."""
    return key == outer or key.startswith(f"{outer}/")


def follow(key: str, links: Mapping[str, str]) -> str:
    """Return the key under which a thing is held.

    >>> follow("model/last/kernel", {"model/last": "model/layers/1"})
    'model/layers/1/kernel'
    """
    while links:
        outer = next((outer for outer in sorted({key, *keys_above(key)}) if outer in links), None)
        if outer is None:
            return key
        key = links[outer] + key[len(outer) :]
    return key


def child_key(key: str, name: str | int) -> str:
    """Return the key of an entry of the container ``key``."""
    return f"{key}/{escaped(str(name))}"


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
