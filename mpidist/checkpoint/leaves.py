"""What a checkpoint consists of: objects and nests of them taken apart into named variables, arrays and values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpidist.arrays.convert import Array, to_array
from mpidist.arrays.device_ops import is_device_array
from mpidist.arrays.dtypes import check_transportable
from mpidist.checkpoint.format_rules import DEEPEST, is_key, is_state
from mpidist.core.enums import VariableAggregation, VariableSynchronization
from mpidist.values import Variable
from mpidist.values.composite import AnyVariable

_PLAIN = (bool, int, float, str, type(None))


@dataclass
class Leaves:
    """The parts of a checkpoint by key; keys are names and positions joined by "/".

    Attributes:
        variables: Variables of any synchronization and aggregation; those in shards count as one.
        arrays: NumPy or CuPy arrays, filled in place when they are restored.
        places: Where numbers, strings and None stand: the dict or list, and the key in it.
        iterators: Objects whose state is saved: with ``state()`` and ``restore(state)``.
        deferring: Objects that take values of parts that they do not have yet, by key.
        containers: Dicts, lists and tuples.
    """

    variables: dict[str, AnyVariable] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)
    places: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    iterators: dict[str, Any] = field(default_factory=dict)
    deferring: dict[str, Any] = field(default_factory=dict)
    containers: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        yield from self.variables
        yield from self.arrays
        yield from self.places
        yield from self.iterators

    def values(self) -> dict[str, Any]:
        """Return the numbers, strings and None, and the states of iterators, as they are now, in types that JSON has.

        Raises:
            TypeError: The state of an iterator has something else.
        """
        values = {key: container[name] for key, (container, name) in self.places.items()}
        values = {key: v.item() if isinstance(v, np.generic) else v for key, v in values.items()}
        for key, iterator in self.iterators.items():
            values[key] = _checked_state(key, iterator)
        return values

    def classes(self) -> dict[str, str]:
        """Return the names of the classes whose values mean something else in another class: those of optimizers."""
        return {key: type(owner).__name__ for key, owner in self.deferring.items()}

    def names_of_all_ranks(self) -> list[str]:
        """Return the keys that every rank must have, as values of theirs travel between the ranks.

        Arrays in lists and dicts are not among them, which may have grown on one rank alone: a restore makes them.
        """
        growing = {key for key, container in self.containers.items() if isinstance(container, (list, dict))}
        fixed = self.deferring.keys()
        grown = {key for key in self.arrays if growing & keys_above(key) and not fixed & keys_above(key)}
        return [key for key in (*self.variables, *self.arrays, *self.iterators) if key not in grown]

    def _add(self, kind: str, key: str, value: Any) -> None:
        taken = (self.variables, self.arrays, self.places, self.iterators, self.containers)
        if any(key in those for those in taken):
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


def collect(objects: dict[str, Any]) -> Leaves:
    """Return the parts of named objects.

    An object takes part by a method ``_checkpoint_children()`` that returns its parts by name. If it also has
    ``_checkpoint_defer(values)``, it is given, when a checkpoint is restored, a dict of the arrays under its key that
    it has no part for yet, and takes out of it what it comes to use. An iterator takes part by ``state()``, which
    returns something that JSON has, and ``restore(state)``.

    Raises:
        TypeError: Something that a checkpoint cannot hold.
        ValueError: A variable that has no value across replicas, two objects of one name, or a nest without end.
    """
    leaves = Leaves()
    for name, value in objects.items():
        _collect(leaves, value, escaped(name), (objects, name))
    return leaves


def _collect(leaves: Leaves, value: Any, key: str, place: tuple[Any, Any] | None) -> None:
    if not is_key(key):
        raise ValueError(f"checkpoint object {key!r} is nested more than {DEEPEST} deep; expected a flatter nest")
    if isinstance(value, AnyVariable):
        _check_readable(value, key)
        leaves._add("variables", key, value)
    elif isinstance(value, np.ndarray) or is_device_array(value):
        check_transportable(value.dtype, f"checkpoint object {key!r}")
        array = to_array(value, f"checkpoint object {key!r}")
        # Of a matrix, which is no vector even when it is asked to be one, the array whose memory it shows.
        leaves._add("arrays", key, np.asarray(array) if isinstance(array, np.ndarray) else array)
    elif hasattr(value, "_checkpoint_children"):
        if hasattr(value, "_checkpoint_defer"):
            leaves.deferring[key] = value
        for name, child in value._checkpoint_children().items():
            _collect(leaves, child, f"{key}/{name}", None)
    elif isinstance(value, (Mapping, list, tuple)):
        _collect_container(leaves, value, key)
    elif isinstance(value, (*_PLAIN, np.bool_, np.integer, np.floating)):
        if place is None:
            raise TypeError(
                f"checkpoint object {key!r} is {value!r}, which cannot be replaced where it stands when the "
                "checkpoint is restored; put it in a dict or a list, or give it to Checkpoint(name=value) itself"
            )
        leaves._add("places", key, place)
    elif callable(getattr(value, "state", None)) and callable(getattr(value, "restore", None)):
        leaves._add("iterators", key, value)
    else:
        raise TypeError(
            f"checkpoint object {key!r} is a {type(value).__name__}; expected a variable, an optimizer, a metric, "
            "a NumPy or CuPy array, a number, a string, an iterator with state() and restore(), or a dict, list or "
            "tuple of them"
        )


def _collect_container(leaves: Leaves, value: Any, key: str) -> None:
    above = next((above for above in sorted(keys_above(key)) if leaves.containers.get(above) is value), None)
    if above is not None:
        raise ValueError(
            f"checkpoint object {key!r} is {above!r} itself, a {type(value).__name__}, which so would have no end; "
            "expected lists, tuples and dicts that do not hold themselves"
        )
    leaves._add("containers", key, value)
    if isinstance(value, Mapping):
        for name, child in value.items():
            if not isinstance(name, (str, int)):
                raise TypeError(f"checkpoint object {key!r} has the dict key {name!r}; expected a string or an int")
            _collect(leaves, child, child_key(key, name), (value, name) if isinstance(value, dict) else None)
    else:
        for index, child in enumerate(value):
            _collect(leaves, child, child_key(key, index), (value, index) if isinstance(value, list) else None)


def _check_readable(variable: AnyVariable, key: str) -> None:
    if (
        is_on_read(variable)
        and variable.aggregation == VariableAggregation.NONE
        and variable.distribute_strategy.num_replicas_in_sync > 1
    ):
        raise ValueError(
            f"checkpoint object {key!r} is variable {variable.name!r} with synchronization ON_READ and aggregation "
            "NONE: its copies cannot become one value; create it with aggregation=mpidist.VariableAggregation.SUM, "
            "MEAN or ONLY_FIRST_REPLICA"
        )


def is_on_read(variable: AnyVariable) -> bool:
    """Whether reading the variable takes all ranks."""
    return variable.synchronization == VariableSynchronization.ON_READ


def escaped(name: str) -> str:
    """Return a name as it stands in a key."""
    return name.replace("%", "%25").replace("/", "%2F")


def keys_above(key: str) -> set[str]:
    """Return the keys of what holds the object ``key``."""
    names = key.split("/")
    return {"/".join(names[:end]) for end in range(1, len(names))}


def child_key(key: str, name: str | int) -> str:
    """Return the key of an entry of the container ``key``."""
    return f"{key}/{escaped(str(name))}"


def restore_variable(variable: AnyVariable, array: Array) -> None:
    """Give ``variable`` the value that a checkpoint holds; in cross-replica context, on every rank.

    Copies of an ON_READ variable with aggregation SUM get equal shares; what is left of integers goes to replica
    0, so that the sum is kept.
    """
    variable.assign(array)
    if not isinstance(variable, Variable):
        return  # its parts are ON_WRITE
    count = variable.distribute_strategy.num_replicas_in_sync
    is_sum = is_on_read(variable) and variable.aggregation == VariableAggregation.SUM
    if is_sum and array.dtype.kind in "iu" and count > 1:
        share = array // array.dtype.type(count)
        for replica_id, copy in zip(
            variable.distribute_strategy.extended.local_replica_ids, variable.values, strict=True
        ):
            copy.assign(array - share * array.dtype.type(count - 1) if replica_id == 0 else share)
