"""collect: takes objects, and nests and attributes of them, apart into named variables, arrays and values."""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from mpidist.arrays.convert import (
    is_jax,
    is_sparse,
    is_torch,
    is_torch_module,
    is_torch_optimizer,
    is_writable,
    others_of_module,
    to_array,
)
from mpidist.arrays.device_ops import is_device_array
from mpidist.arrays.dtypes import check_transportable, is_transportable
from mpidist.checkpoint.format_rules import DEEPEST
from mpidist.checkpoint.leaves import (
    WAITING_ATTRIBUTE,
    Leaves,
    ValueRef,
    attribute_of,
    child_key,
    entry_of,
    escaped,
    is_on_read,
    keys_above,
)
from mpidist.core.enums import VariableAggregation
from mpidist.values.composite import AnyVariable

_PLAIN = (bool, int, float, str, type(None), np.bool_, np.integer, np.floating)
# What most long lists hold, told by type alone.
_PLAIN_TYPES = {bool, int, float, str, type(None)}
# Objects of these are no one's model. Those of mpidist that have something to save say so themselves.
_NOT_WALKED = {*sys.stdlib_module_names, "builtins", "mpidist", "torch", "jax", "jaxlib", "numpy", "cupy"}


def collect(objects: dict[str, Any], *, is_complete: bool = True) -> Leaves:
    """Return the parts of named objects.

    An object takes part by a method ``_checkpoint_children()`` that returns its parts by name. If it also has
    ``_checkpoint_defer(values)``, it is given, when a checkpoint is restored, a dict of the arrays under its key that
    it has no part for yet, and takes out those that it comes to use. An iterator takes part by ``state()``, which
    returns something that JSON has, and ``restore(state)``.

    Any other object of a class of the program takes part by its attributes at any depth, as tf.Module does: numbers,
    strings and things that cannot be saved are its settings. The shortest path to an object, and of those the first
    by name, is its key; others are links to it. So they are the same on all ranks that have the same objects.

    Args:
        objects: By name.
        is_complete: Whether things that cannot be in a checkpoint are an error. Otherwise they are passed over.

    Raises:
        TypeError: Something that a checkpoint cannot hold.
        ValueError: A variable that has no value across replicas, two objects of one name, or a nest without end.
    """
    collector = _Collector(is_complete)
    for name in sorted(objects):
        collector.add(_Found(objects[name], escaped(name), entry_of(objects, name, None)))
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
        lost: The error if a variable is found here or in it, which no key would lead to.
    """

    value: Any
    key: str
    place: ValueRef | None = None
    is_optional: bool = False
    outer: _Found | None = None
    lost: Exception | None = None

    def part(
        self,
        value: Any,
        name: str | int,
        place: ValueRef | None = None,
        *,
        is_optional: bool = False,
        is_entry: bool = False,
    ) -> _Found:
        """Return a part of the thing, as found."""
        # What has no key does not need longer and longer ones.
        key = self.key if self.lost is not None else child_key(self.key, name)
        return _Found(value, key, place, is_optional, self if is_entry else None, self.lost)


class _Collector:
    """Looks at everything, level by level, and at each object once."""

    def __init__(self, is_complete: bool = True) -> None:
        self._is_complete = is_complete
        self._leaves = Leaves()
        self._queue: deque[_Found] = deque()
        # What was met, by id. The things are kept, as another one could get the id of one that is gone.
        self._met: dict[int, tuple[str, Any]] = {}
        # What no key leads to: looked at last, as a variable that has one elsewhere is not lost.
        self._without_key: deque[_Found] = deque()

    def add(self, found: _Found) -> None:
        (self._queue if found.lost is None else self._without_key).append(found)

    def result(self) -> Leaves:
        while self._queue:
            try:
                self._look_at(self._queue.popleft())
            except (TypeError, ValueError):
                # Of what is only looked for nothing is saved: saving and restoring tell of it.
                if self._is_complete:
                    raise
        while self._without_key and self._is_complete:
            self._look_at(self._without_key.popleft())
        leaves = self._leaves
        leaves.links = _links_to_something(leaves)
        return leaves

    def _look_at(self, found: _Found) -> None:
        value, key = found.value, found.key
        if found.lost is None and key.count("/") >= DEEPEST:
            error = ValueError(f"checkpoint object {key!r} is nested more than {DEEPEST} deep; expected a flatter nest")
            self._pass_over(found, error)
        elif isinstance(value, AnyVariable):
            _check_readable(value, key)
            if self._is_new(found):
                self._take("variables", found, value)
        elif isinstance(value, np.ndarray) or is_device_array(value) or is_torch(value) or is_jax(value):
            self._look_at_array(found)
        elif _has_methods(value, "_checkpoint_children") and not isinstance(value, type):
            self._look_at_children(found)
        elif isinstance(value, (Mapping, list, tuple)):
            self._look_at_container(found)
        elif isinstance(value, _PLAIN):
            if not found.is_optional:
                self._take("places", found, _required(found))
        elif is_torch_module(value):
            self._look_at_module(found)
        elif _has_methods(value, "state", "restore"):
            self._take("iterators", found, value)
        elif _is_walked(value):
            self._look_at_attributes(found)
        elif not found.is_optional or (found.lost is None and is_torch_optimizer(value)):
            raise _wrong_object(key, value)

    def _pass_over(self, found: _Found, error: Exception) -> None:
        """Look after all else at something without a key; in attributes, only variables make it an error."""
        if not found.is_optional:
            raise error
        self.add(replace(found, lost=error))

    def _take(self, kind: str, found: _Found, value: Any) -> None:
        if found.lost is not None:
            raise found.lost
        self._leaves.add(kind, found.key, value)

    def _is_new(self, found: _Found) -> bool:
        """Return whether the thing is met for the first time; otherwise its key becomes a link."""
        if id(found.value) not in self._met:
            self._met[id(found.value)] = (found.key, found.value)
            return True
        if found.lost is None:
            self._leaves.add("links", found.key, self._met[id(found.value)][0])
        return False

    def _look_at_array(self, found: _Found) -> None:
        value, key = found.value, found.key
        if found.lost is not None or (found.is_optional and _is_setting(value)):
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
        self._take("arrays", found, array)
        if is_torch(value):
            self._leaves.tensors[key] = value
        if is_jax(value):
            self._leaves.replaced[key] = _required(found)

    def _look_at_children(self, found: _Found) -> None:
        value, key = found.value, found.key
        if not self._is_new(found):
            return
        if found.lost is not None:
            raise found.lost
        if hasattr(value, "_checkpoint_defer"):
            self._leaves.deferring[key] = value
        for name, child in value._checkpoint_children().items():
            self.add(_Found(child, f"{key}/{name}"))

    def _look_at_container(self, found: _Found) -> None:
        value, key, above = found.value, found.key, found.outer
        entries = value.values() if isinstance(value, Mapping) else value
        if found.is_optional and set(map(type, entries)) <= _PLAIN_TYPES:
            return
        while above is not None:
            if above.value is value:
                if found.is_optional:
                    return
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
                self.add(found.part(child, name, place, is_optional=found.is_optional, is_entry=True))
            else:
                inner = found.part(child, "", is_optional=found.is_optional, is_entry=True)
                error = TypeError(f"checkpoint object {key!r} has the dict key {name!r}; expected a string or an int")
                self._pass_over(inner, error)

    def _look_at_module(self, found: _Found) -> None:
        if not self._is_new(found):
            return
        if found.lost is None:
            for name, tensor in found.value.state_dict().items():
                self.add(found.part(tensor, name))
        for name, other in others_of_module(found.value):
            part = found.part(other, name, is_optional=True)
            self.add(part if found.lost else replace(part, lost=_beside_state_dict(part.key)))

    def _look_at_attributes(self, found: _Found) -> None:
        value, key = found.value, found.key
        if not self._is_new(found):
            return
        if found.lost is None:
            self._leaves.objects[key] = value
        if not found.is_optional:
            self._leaves.given.add(key)
        for name in sorted(vars(value).keys() - {WAITING_ATTRIBUTE}):
            place = attribute_of(value, name, found.place)
            self.add(found.part(vars(value)[name], name, place, is_optional=True))


def _links_to_something(leaves: Leaves) -> dict[str, str]:
    """Return the links that lead to something saved, at once or by further links."""
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


def _has_methods(value: Any, *names: str) -> bool:
    """Return whether an object has methods of its own, and is no mock that answers to any name."""
    return all(
        inspect.getattr_static(value, name, None) is not None and callable(getattr(value, name, None)) for name in names
    )


def _is_setting(value: Any) -> bool:
    """Return whether an array in an attribute cannot be saved or filled, as text or a constant."""
    if isinstance(value, np.ndarray) and (isinstance(value, np.ma.MaskedArray) or not is_transportable(value.dtype)):
        return True
    return (is_torch(value) and is_sparse(value)) or (not is_jax(value) and not is_writable(value))


def _is_walked(value: Any) -> bool:
    """Return whether to look at the attributes of an object, whose class is the program's own."""
    if isinstance(value, (type, ModuleType, FunctionType, MethodType)) or not hasattr(value, "__dict__"):
        return False
    return type(value) is SimpleNamespace or type(value).__module__.partition(".")[0] not in _NOT_WALKED


def _required(found: _Found) -> ValueRef:
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


def _beside_state_dict(key: str) -> TypeError:
    return TypeError(
        f"checkpoint object {key!r} is an attribute of a torch module with a variable in it, which state_dict() of the "
        "module leaves out; give the variable to Checkpoint(name=variable), too"
    )


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
