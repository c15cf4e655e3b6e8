"""collect: takes objects, and nests and attributes of them, apart into named variables, arrays and values."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from mpidist.arrays.convert import is_jax, is_torch, is_torch_module, is_torch_optimizer, to_array
from mpidist.arrays.device_ops import is_device_array
from mpidist.arrays.dtypes import check_transportable
from mpidist.checkpoint.format_rules import DEEPEST, is_key
from mpidist.checkpoint.leaves import WAITING_ATTRIBUTE, Leaves, child_key, escaped, is_on_read, keys_above
from mpidist.checkpoint.places import Entry, Place, attribute_of, entry_of
from mpidist.core.enums import VariableAggregation
from mpidist.values.composite import AnyVariable

_PLAIN = (bool, int, float, str, type(None), np.bool_, np.integer, np.floating)
# Kinds of NumPy dtypes that hold no numbers: objects, text and dates.
_NO_NUMBERS = "OSUTMm"
# Objects of these are no one's model. Those of mpidist that have something to save say so themselves.
_NOT_WALKED = {*sys.stdlib_module_names, "builtins", "mpidist", "torch", "jax", "jaxlib", "numpy", "cupy"}


def collect(objects: dict[str, Any]) -> Leaves:
    """Return the parts of named objects.

    An object takes part by a method ``_checkpoint_children()`` that returns its parts by name. If it also has
    ``_checkpoint_defer(values)``, it is given, when a checkpoint is restored, a dict of the arrays under its key that
    it has no part for yet, and takes out of it what it comes to use. An iterator takes part by ``state()``, which
    returns something that JSON has, and ``restore(state)``.

    Any other object of a class of the program takes part by what its attributes hold at any depth, as tf.Module does:
    numbers, strings and whatever else stands there are its settings. The shortest path to an object, and of those the
    first by name, is its key; others are links to it. So they are the same on all ranks that have the same objects.

    Raises:
        TypeError: Something that a checkpoint cannot hold.
        ValueError: A variable that has no value across replicas, two objects of one name, or a nest without end.
    """
    collector = _Collector()
    for name in sorted(objects):
        collector.add(_Found(objects[name], escaped(name), Entry(objects, name)))
    return collector.result()


@dataclass(frozen=True)
class _Found:
    """Something that may be saved.

    Attributes:
        value: The thing itself.
        key: Its path.
        place: Where it stands, if it can be replaced there.
        is_optional: Whether it stands in an attribute, where things that cannot be saved are no error.
        outer: The container that it is an entry of.
    """

    value: Any
    key: str
    place: Place | None = None
    is_optional: bool = False
    outer: _Found | None = None


class _Collector:
    """Looks at everything, level by level, and at each object once."""

    def __init__(self) -> None:
        self._leaves = Leaves()
        self._queue: deque[_Found] = deque()
        # What was met, by id. The things are kept, as another one could get the id of one that is gone.
        self._met: dict[int, tuple[str, Any]] = {}
        # Under dict keys that cannot be part of a path: fine, as long as nothing is there that is saved.
        self._without_key: list[tuple[_Found, Any]] = []

    def add(self, found: _Found) -> None:
        self._queue.append(found)

    def result(self) -> Leaves:
        while self._queue:
            self._look_at(self._queue.popleft())
        leaves = self._leaves
        for found, name in self._without_key:
            if any(True for _ in _parts_in(found.value[name])):
                raise _wrong_dict_key(found.key, name)
        leaves.links = _links_to_something(leaves)
        return leaves

    def _look_at(self, found: _Found) -> None:
        value, key, leaves = found.value, found.key, self._leaves
        if not is_key(key):
            raise ValueError(f"checkpoint object {key!r} is nested more than {DEEPEST} deep; expected a flatter nest")
        if isinstance(value, AnyVariable):
            _check_readable(value, key)
            if self._is_new(found):
                leaves.add("variables", key, value)
        elif isinstance(value, np.ndarray) or is_device_array(value) or is_torch(value) or is_jax(value):
            self._look_at_array(found)
        elif hasattr(value, "_checkpoint_children") and not isinstance(value, type):
            self._look_at_children(found)
        elif isinstance(value, (Mapping, list, tuple)):
            self._look_at_container(found)
        elif isinstance(value, _PLAIN):
            if not found.is_optional:
                leaves.add("places", key, _required(found))
        elif is_torch_module(value):
            if self._is_new(found):
                for name, tensor in value.state_dict().items():
                    self.add(_Found(tensor, child_key(key, name)))
        elif callable(getattr(value, "state", None)) and callable(getattr(value, "restore", None)):
            leaves.add("iterators", key, value)
        elif _is_walked(value):
            self._look_at_attributes(found)
        elif not found.is_optional or is_torch_optimizer(value):
            raise _wrong_object(key, value)

    def _is_new(self, found: _Found) -> bool:
        """Whether the thing is met for the first time; otherwise its key becomes a link."""
        first, _ = self._met.setdefault(id(found.value), (found.key, found.value))
        if first != found.key:
            self._leaves.add("links", found.key, first)
        return first == found.key

    def _look_at_array(self, found: _Found) -> None:
        value, key = found.value, found.key
        if found.is_optional and isinstance(value, np.ndarray) and value.dtype.kind in _NO_NUMBERS:
            return
        # Arrays of a list or dict that is given are made anew, one by one, where they lack; and which immutable arrays
        # are one object means nothing.
        if found.is_optional and not is_jax(value) and not self._is_new(found):
            return
        if not is_torch(value) and not is_jax(value):
            check_transportable(value.dtype, f"checkpoint object {key!r}")
        array = to_array(value, f"checkpoint object {key!r}")
        # Of a matrix, which is no vector even when it is asked to be one, the array whose memory it shows.
        array = np.asarray(array) if isinstance(array, np.ndarray) else array
        check_transportable(array.dtype, f"checkpoint object {key!r}")
        self._leaves.add("arrays", key, array)
        if is_jax(value):
            self._leaves.replaced[key] = _required(found)

    def _look_at_children(self, found: _Found) -> None:
        value, key = found.value, found.key
        if not self._is_new(found):
            return
        if hasattr(value, "_checkpoint_defer"):
            self._leaves.deferring[key] = value
        for name, child in value._checkpoint_children().items():
            self.add(_Found(child, f"{key}/{name}"))

    def _look_at_container(self, found: _Found) -> None:
        value, key, above = found.value, found.key, found.outer
        while above is not None:
            if above.value is value:
                raise ValueError(
                    f"checkpoint object {key!r} is {above.key!r} itself, a {type(value).__name__}, which so would have "
                    "no end; expected lists, tuples and dicts that do not hold themselves"
                )
            above = above.outer
        if not found.is_optional:
            self._leaves.add("containers", key, value)
        for name, child in value.items() if isinstance(value, Mapping) else enumerate(value):
            if isinstance(name, (str, int)):
                place = entry_of(value, name, found.place)
                self.add(_Found(child, child_key(key, name), place, found.is_optional, found))
            elif found.is_optional:
                self._without_key.append((found, name))
            else:
                raise _wrong_dict_key(key, name)

    def _look_at_attributes(self, found: _Found) -> None:
        value, key = found.value, found.key
        if not self._is_new(found):
            return
        self._leaves.objects[key] = value
        if not found.is_optional:
            self._leaves.given.add(key)
        for name in sorted(vars(value).keys() - {WAITING_ATTRIBUTE}):
            place = attribute_of(value, name, found.place)
            self.add(_Found(vars(value)[name], child_key(key, name), place, is_optional=True))


def _links_to_something(leaves: Leaves) -> dict[str, str]:
    """Return the links to what is saved, and to objects in which something is or has such a link in its turn."""
    links_to: dict[str, list[str]] = {}
    for key, to in leaves.links.items():
        links_to.setdefault(to, []).append(key)
    kept, queue = set[str](), deque(leaves.saved())
    while queue:
        key = queue.popleft()
        for to in (keys_above(key) | {key}) & links_to.keys():
            further = links_to.pop(to)
            kept.update(further)
            queue.extend(further)
    return {key: to for key, to in leaves.links.items() if key in kept}


def _parts_in(value: Any) -> Iterator[str]:
    """Yield the keys of what would be saved of ``value`` in an attribute."""
    collector = _Collector()
    collector.add(_Found(value, "value", Entry({}, "value"), is_optional=True))
    yield from collector.result().saved()


def _is_walked(value: Any) -> bool:
    """Whether the attributes of an object are looked at: where its class is of the program or a library of its own."""
    if isinstance(value, (type, ModuleType, FunctionType, MethodType)) or not hasattr(value, "__dict__"):
        return False
    return type(value) is SimpleNamespace or type(value).__module__.partition(".")[0] not in _NOT_WALKED


def _required(found: _Found) -> Place:
    if found.place is None:
        what = "a JAX array" if is_jax(found.value) else repr(found.value)
        raise TypeError(
            f"checkpoint object {found.key!r} is {what}, which cannot be replaced where it stands when the "
            "checkpoint is restored; put it in a dict or a list, or give it to Checkpoint(name=value) itself"
        )
    return found.place


def _wrong_object(key: str, value: Any) -> TypeError:
    if is_torch_optimizer(value):
        return TypeError(
            f"checkpoint object {key!r} is a torch optimizer, which makes its state when it first steps; give "
            f"Checkpoint({key.rpartition('/')[2]}=optimizer.state_dict()) after that, and after restore call "
            "optimizer.load_state_dict(...) with it"
        )
    return TypeError(
        f"checkpoint object {key!r} is a {type(value).__name__}; expected a variable, an optimizer, a metric, an array "
        "of NumPy, CuPy, PyTorch or JAX, a torch module, a number, a string, an iterator with state() and restore(), "
        "an object with these in its attributes, or a dict, list or tuple of them"
    )


def _wrong_dict_key(key: str, name: Any) -> TypeError:
    return TypeError(f"checkpoint object {key!r} has the dict key {name!r}; expected a string or an int")


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
