"""Traverse tracked objects: find their variables, arrays and values, named by their paths."""

from __future__ import annotations

import dataclasses
import inspect
import json
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np

from mpidist.arrays import convert
from mpidist.arrays.convert import is_jax, is_torch
from mpidist.arrays.device_ops import is_device_array
from mpidist.arrays.dtypes import Array, check_transportable, is_transportable
from mpidist.checkpoint.format import DEEPEST, Manifest, Tensor, describe, is_state
from mpidist.core import nest
from mpidist.core.context import StrategyLike
from mpidist.core.lazy import imported
from mpidist.core.nest import NestKind
from mpidist.core.options import VariableAggregation, VariableSynchronization
from mpidist.values.composite import AnyVariable, Slots, slot_keys

if TYPE_CHECKING:
    import torch

# Attribute of an object whose variables do not exist yet: their restored values.
WAITING_ATTRIBUTE = "_mpidist_waiting"
_PLAIN = (bool, int, float, str, type(None), np.bool_, np.integer, np.floating)
# Types of most entries of long lists, which are skipped at once.
_PLAIN_TYPES = {bool, int, float, str, type(None)}
# Do not descend into these packages' objects. mpidist's own implement _checkpoint_children().
_NOT_WALKED = {*sys.stdlib_module_names, "builtins", "mpidist", "torch", "jax", "jaxlib", "numpy", "cupy"}


V = TypeVar("V")
Container: TypeAlias = Mapping[str | int, object] | list[object] | tuple[object, ...]


class Stateful(Protocol):
    """An iterator, or another object whose state is saved."""

    def state(self) -> object:
        """Return the state, in types that JSON can hold."""

    def restore(self, state: object) -> None:
        """Continue from a state."""


class Deferring(Protocol):
    """An object that keeps restored values for variables that it creates later."""

    def _checkpoint_defer(self, values: dict[str, Array]) -> None: ...


@runtime_checkable
class Owned(Protocol):
    """An object without variables that belongs to a strategy."""

    @property
    def distribute_strategy(self) -> StrategyLike:
        """The strategy."""


@dataclass(frozen=True)
class ValueRef:
    """The location of a number or an immutable array."""

    get: Callable[[], Any]
    put: Callable[[object], None]


def _inner_ref(
    outer: ValueRef | None, get: Callable[[V], object], rebuild: Callable[[V, object], object]
) -> ValueRef | None:
    """Return a reference to a part of an immutable object, which is replaced too."""
    if outer is None:
        return None
    return ValueRef(lambda: get(outer.get()), lambda value: outer.put(rebuild(outer.get(), value)))


def _entry_ref(container: object, name: str | int, outer: ValueRef | None) -> ValueRef | None:
    """Return a reference to an entry of a container, if it can be replaced."""
    if isinstance(container, (dict, list)):
        return ValueRef(partial(operator.getitem, container, name), partial(operator.setitem, container, name))
    if not isinstance(container, tuple) or not isinstance(name, int):
        return None

    def rebuild(before: tuple[object, ...], value: object) -> object:
        # Named tuples have another constructor.
        make: Callable[[list[object]], object] = getattr(before, "_make", type(before))
        return make([*before[:name], value, *before[name + 1 :]])

    return _inner_ref(outer, operator.itemgetter(name), rebuild)


def _child_ref(kind: NestKind, index: int, outer: ValueRef | None) -> ValueRef | None:
    """Return a reference to a child of a structure of another library."""

    def children(tree: object) -> list[object]:
        return [child for _, child in kind.children(tree)]

    def rebuild(tree: object, value: object) -> object:
        before = children(tree)
        return kind.rebuild(tree, [*before[:index], value, *before[index + 1 :]])

    return _inner_ref(outer, lambda tree: children(tree)[index], rebuild)


def _attribute_ref(holder: Any, name: str, outer: ValueRef | None) -> ValueRef | None:
    """Return a reference to an attribute of an object, if it can be replaced."""
    params = getattr(holder, "__dataclass_params__", None)
    if params is None or not params.frozen:
        return ValueRef(lambda: vars(holder)[name], partial(setattr, holder, name))
    if not any(field.name == name and field.init for field in dataclasses.fields(holder)):
        return None

    def rebuild(before: Any, value: object) -> object:
        return replace(before, **{name: value})

    return _inner_ref(outer, operator.attrgetter(name), rebuild)


@dataclass
class Leaves:
    """The parts of a checkpoint by key. Keys are names and positions joined by "/".

    Attributes:
        variables: Variables and composites.
        arrays: NumPy or CuPy arrays, and NumPy views of tensors of PyTorch and arrays of JAX.
        tensors: The tensors of PyTorch among the arrays.
        replaced: References to the arrays of JAX among the arrays.
        awaited: Policies of variables that do not exist yet, whose values are among the arrays.
        places: References to numbers, strings and None.
        iterators: Objects with ``state()`` and ``restore(state)``.
        deferring: Objects that keep values for variables that they create later.
        slots: Slots by key of the optimizer.
        containers: Dicts, lists and tuples.
        objects: Objects that take part by their attributes.
        given: Keys of these objects that are not in an attribute of another one.
        links: Further keys of variables, arrays in attributes, and objects, with the key that holds them.
    """

    variables: dict[str, AnyVariable] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    replaced: dict[str, ValueRef] = field(default_factory=dict)
    awaited: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)
    places: dict[str, ValueRef] = field(default_factory=dict)
    iterators: dict[str, Stateful] = field(default_factory=dict)
    deferring: dict[str, Deferring] = field(default_factory=dict)
    slots: dict[str, Slots] = field(default_factory=dict)
    containers: dict[str, Container] = field(default_factory=dict)
    objects: dict[str, object] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    links: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        yield from (*self.variables, *self.arrays, *self.places, *self.iterators)

    def saved(self) -> Iterator[str]:
        """Yield the keys of all that is saved, and of objects that create parts later."""
        yield from (*self, *self.deferring)

    def values(self) -> dict[str, object]:
        """Return numbers, strings, None and states. Raise TypeError if JSON cannot hold a state."""
        values = {}
        for key, place in self.places.items():
            value = place.get()
            values[key] = value.item() if isinstance(value, np.generic) else value
        for key, iterator in self.iterators.items():
            values[key] = _checked_state(key, iterator)
        return values

    def paths(self) -> dict[AnyVariable, str]:
        """Return the key of each variable."""
        return {variable: key for key, variable in self.variables.items()}

    def classes(self) -> dict[str, str]:
        """Return the class names of optimizers, which give their values a meaning."""
        return {key: type(owner).__name__ for key, owner in self.deferring.items()}

    def describe(self) -> dict[str, Tensor]:
        """Return the manifest's entries for the variables and arrays, without parts."""
        policies = dict(self.awaited)
        for key, variable in self.variables.items():
            policies[key] = variable.synchronization.name, variable.aggregation.name
        those = {**self.variables, **self.arrays}
        return {key: describe(each.shape, each.dtype, *policies.get(key, ())) for key, each in those.items()}

    def manifest(self, tensors: dict[str, Tensor], values: dict[str, object], number: int, run_calls: int) -> Manifest:
        """Return the manifest of the objects, without sequence and files."""
        containers = {key: describe_container(container) for key, container in self.containers.items()}
        known = Manifest(0, number, tensors, values, containers, tuple(self.iterators), run_calls=run_calls)
        return replace(known, classes=self.classes(), links=self.links)

    def names_of_all_ranks(self) -> list[str]:
        """Return the keys that every rank must have, because their values travel between ranks.

        Arrays in lists and dicts may exist on one rank alone, because a restore creates them.
        """
        growing = {key for key, container in self.containers.items() if isinstance(container, (list, dict))}
        names = [*self.variables, *self.iterators]
        for key in self.arrays:
            above = keys_above(key)
            if not growing & above or self.deferring.keys() & above:
                names.append(key)
        return names

    def check_given(self) -> None:
        """Raise TypeError for an object with nothing to save in its attributes."""
        for key in sorted(self.given):
            if not any(is_within(name, key) for name in (*self.saved(), *self.links)):
                raise TypeError(
                    f"checkpoint object {key!r} is a {type(self.objects[key]).__name__} with nothing to save in its "
                    "attributes; expected variables, optimizers, metrics or arrays there: make them before saving, or "
                    "give numbers to Checkpoint(name=value) itself"
                )

    def add(self, kind: str, key: str, value: object) -> None:
        """Add a part of one kind; raise ValueError if its name is in use."""
        kinds = self.variables, self.arrays, self.places, self.iterators, self.containers, self.links
        if any(key in known for known in kinds):
            raise ValueError(f"two checkpoint objects are called {key!r}; expected dict keys that differ as text")
        getattr(self, kind)[key] = value


def describe_container(container: Container) -> list[object]:
    """Return the kind of a container, and its keys or its length."""
    if isinstance(container, Mapping):
        return ["dict", list(container)]
    return ["list" if isinstance(container, list) else "tuple", len(container)]


def _checked_state(key: str, iterator: Stateful) -> object:
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
    """Return whether reading the variable is collective."""
    return variable.synchronization == VariableSynchronization.ON_READ


def _escaped(name: str) -> str:
    return name.replace("%", "%25").replace("/", "%2F")


def keys_above(key: str) -> set[str]:
    """Return the keys of the objects that hold ``key``."""
    names = key.split("/")
    return {"/".join(names[:end]) for end in range(1, len(names))}


def is_within(key: str, outer: str) -> bool:
    """Return whether ``key`` is ``outer`` or within it."""
    return key == outer or key.startswith(f"{outer}/")


def follow(key: str, links: Mapping[str, str]) -> str:
    """Return the key that holds an object, after all links.

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
    return f"{key}/{_escaped(str(name))}"


# Traversal --------------------------------------------------------------------------------------------------------


def collect(objects: dict[str, object], *, is_complete: bool = True) -> Leaves:
    """Return the parts of named objects.

    An object with a method ``_checkpoint_children()`` takes part by the parts that it returns, by name. If it also has
    ``_checkpoint_defer(values)``, a restore calls it with a dict of the arrays under its key without a part, and it
    pops each one when it creates that part. An object with ``state()`` and ``restore(state)`` takes part by its state.

    Any other object of a class of the program takes part by its attributes at any depth, as in tf.Module. Numbers,
    strings and unknown objects there are settings. The shortest path to an object, and of those the first by name, is
    its key. The others are links to it. So all ranks with the same objects have the same keys.

    Args:
        objects: Objects by name.
        is_complete: Raise an error for objects that a checkpoint cannot hold. Otherwise they are skipped.

    Raises:
        TypeError: An object that a checkpoint cannot hold.
        ValueError: A variable without a value across replicas, two objects of one name, or an endless nest.
    """
    traversal = _Traversal(is_complete)
    for name in sorted(objects):
        traversal.add(_Found(objects[name], _escaped(name), _entry_ref(objects, name, None)))
    return traversal.result()


@dataclass(frozen=True)
class _Found:
    """An object on the way.

    Attributes:
        value: The object.
        key: Its path.
        place: Reference to it, if it can be replaced.
        is_optional: Whether it is in an attribute, where unknown objects are settings.
        outer: The container that it is an entry of.
        lost: Error to raise if it holds a variable, because no key can lead there.
    """

    value: Any
    key: str
    place: ValueRef | None = None
    is_optional: bool = False
    outer: _Found | None = None
    lost: Exception | None = None

    def part(self, value: object, name: str | int, place: ValueRef | None = None, is_optional: bool = False) -> _Found:
        # Without a key, its parts need no longer ones.
        key = self.key if self.lost is not None else child_key(self.key, name)
        return _Found(value, key, place, is_optional, lost=self.lost)


class _Traversal:
    """A breadth-first search, each object once."""

    def __init__(self, is_complete: bool = True) -> None:
        self._is_complete = is_complete
        self._leaves = Leaves()
        self._queue: deque[_Found] = deque()
        # Keys of visited objects by id, and the objects, because the id of a dead one is reused.
        self._met: dict[int, tuple[str, object]] = {}
        # Visited last: a variable without a key here may have one elsewhere.
        self._without_key: deque[_Found] = deque()

    def add(self, found: _Found) -> None:
        (self._queue if found.lost is None else self._without_key).append(found)

    def result(self) -> Leaves:
        self._look_at_queue()
        # Last, because their keys contain the paths of their variables.
        self._queue_slots()
        self._look_at_queue()
        while self._without_key and self._is_complete:
            self._look_at(self._without_key.popleft())
        leaves = self._leaves
        leaves.links = _links_to_something(leaves)
        return leaves

    def _look_at_queue(self) -> None:
        while self._queue:
            try:
                self._look_at(self._queue.popleft())
            except (TypeError, ValueError):
                # Only saving and restoring report it.
                if self._is_complete:
                    raise

    def _queue_slots(self) -> None:
        paths = self._leaves.paths()
        for owner, slots in self._leaves.slots.items():
            for (group, *_), held in zip(slot_keys(list(slots.of), paths), slots.of.values(), strict=True):
                for name, slot in held.items():
                    key = f"{owner}/{group}/{name}"
                    # A restored value still waits if the slot was created before its variable had a path.
                    self._leaves.arrays.pop(key, None)
                    self.add(_Found(slot, key))

    def _look_at(self, found: _Found) -> None:
        value, key = found.value, found.key
        if found.lost is None and key.count("/") >= DEEPEST:
            error = ValueError(f"checkpoint object {key!r} is nested more than {DEEPEST} deep; expected a flatter nest")
            self._pass_over(found, error)
        elif isinstance(value, AnyVariable):
            _check_readable(value, key)
            if self._is_new(found):
                self._take("variables", found, value)
        elif isinstance(value, Slots):
            self._leaves.slots[key.rpartition("/")[0]] = value
        elif isinstance(value, np.ndarray) or is_device_array(value) or is_torch(value) or is_jax(value):
            self._look_at_array(found)
        elif _has_methods(value, "_checkpoint_children") and not isinstance(value, type):
            if self._is_new(found):
                self._look_at_children(found)
        elif (kind := nest.registered_kind(value)) is not None:
            self._look_at_tree(found, kind)
        elif isinstance(value, (Mapping, list, tuple)):
            self._look_at_container(found)
        elif isinstance(value, _PLAIN):
            if not found.is_optional:
                self._take("places", found, _required(found))
        elif convert.is_torch_module(value):
            if self._is_new(found):
                self._look_at_module(found)
        elif convert.is_torch_scheduler(value):
            states = imported("mpidist.torch.optimizer_state")
            self._take("iterators", found, states.SchedulerState(value))
        elif _has_methods(value, "state", "restore"):
            self._take("iterators", found, value)
        elif _is_walked(value):
            if self._is_new(found):
                self._look_at_attributes(found)
        elif not found.is_optional or (found.lost is None and convert.is_torch_optimizer(value)):
            raise _wrong_object(key, value)

    def _pass_over(self, found: _Found, error: Exception) -> None:
        """Queue an object without a key. In an attribute, only a variable in it is an error."""
        if not found.is_optional:
            raise error
        self.add(replace(found, lost=error))

    def _take(self, kind: str, found: _Found, value: object) -> None:
        if found.lost is not None:
            raise found.lost
        self._leaves.add(kind, found.key, value)

    def _is_new(self, found: _Found) -> bool:
        """Return whether an object is visited for the first time; otherwise add a link."""
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
        # A restore creates missing arrays of given lists and dicts one by one. Immutable arrays need no identity.
        if found.is_optional and not is_jax(value) and not self._is_new(found):
            return
        if not is_torch(value) and not is_jax(value):
            check_transportable(value.dtype, f"checkpoint object {key!r}")
        array = convert.to_array(value, f"checkpoint object {key!r}")
        # A matrix cannot be reshaped to a vector. Its base array can.
        array = np.asarray(array) if isinstance(array, np.ndarray) else array
        check_transportable(array.dtype, f"checkpoint object {key!r}")
        self._take("arrays", found, array)
        if is_torch(value):
            self._leaves.tensors[key] = value
        if is_jax(value):
            self._leaves.replaced[key] = _required(found)

    def _look_at_children(self, found: _Found) -> None:
        value, key = found.value, found.key
        if found.lost is not None:
            raise found.lost
        if hasattr(value, "_checkpoint_defer"):
            self._leaves.deferring[key] = value
        # An optimizer's names are paths. Names of a module are not, so their slashes are escaped.
        is_module = convert.is_torch_module(value)
        for name, child in value._checkpoint_children().items():
            self.add(found.part(child, name) if is_module else _Found(child, f"{key}/{name}"))

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
                part = found.part(child, name, _entry_ref(value, name, found.place), found.is_optional)
                self.add(replace(part, outer=found))
            else:
                inner = replace(found.part(child, "", is_optional=found.is_optional), outer=found)
                error = TypeError(f"checkpoint object {key!r} has the dict key {name!r}; expected a string or an int")
                self._pass_over(inner, error)

    def _look_at_tree(self, found: _Found, kind: NestKind) -> None:
        for index, (name, child) in enumerate(kind.children(found.value)):
            # Its numbers are state. Other leaves that are no arrays, such as activation functions, are settings.
            part = found.part(child, "", _child_ref(kind, index, found.place), not isinstance(child, _PLAIN))
            self.add(part if found.lost else replace(part, key=f"{found.key}/{name}"))

    def _look_at_module(self, found: _Found) -> None:
        if found.lost is None:
            for name, tensor in found.value.state_dict().items():
                self.add(found.part(tensor, name))
        for name, other in convert.others_of_module(found.value):
            part = found.part(other, name, is_optional=True)
            error = TypeError(
                f"checkpoint object {part.key!r} is an attribute of a torch module with a variable in it, which "
                "state_dict() of the module leaves out; give the variable to Checkpoint(name=variable), too"
            )
            self.add(part if found.lost else replace(part, lost=error))

    def _look_at_attributes(self, found: _Found) -> None:
        value = found.value
        if found.lost is None:
            self._leaves.objects[found.key] = value
        if not found.is_optional:
            self._leaves.given.add(found.key)
        for name in sorted(vars(value).keys() - {WAITING_ATTRIBUTE}):
            place = _attribute_ref(value, name, found.place)
            self.add(found.part(vars(value)[name], name, place, is_optional=True))


def _links_to_something(leaves: Leaves) -> dict[str, str]:
    """Return the links that lead to a saved object, directly or through other links."""
    if not leaves.links:
        return {}
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


def _has_methods(value: object, *names: str) -> bool:
    """Return whether an object really has methods; mocks have every name."""
    return all(
        inspect.getattr_static(value, name, None) is not None and callable(getattr(value, name, None)) for name in names
    )


def _is_setting(value: object) -> bool:
    """Return whether an attribute's array, such as text, cannot be saved or filled."""
    if isinstance(value, np.ndarray) and (isinstance(value, np.ma.MaskedArray) or not is_transportable(value.dtype)):
        return True
    return (is_torch(value) and convert.is_sparse(value)) or (not is_jax(value) and not convert.is_writable(value))


def _is_walked(value: object) -> bool:
    """Return whether to descend into the attributes of an object."""
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


def _wrong_object(key: str, value: object) -> TypeError:
    if convert.is_torch_optimizer(value):
        return TypeError(
            f"checkpoint object {key!r} is a torch optimizer, which makes its state when it first steps; take "
            "mpidist.torch.Optimizer(model, torch.optim.Adam, ...), which a checkpoint holds as it is; or give "
            f"Checkpoint({key.rpartition('/')[2]}=optimizer.state_dict()) after that, and after restore call "
            "optimizer.load_state_dict(...) with it"
        )
    return TypeError(
        f"checkpoint object {key!r} is a {type(value).__name__}; expected a variable, an optimizer, a metric, an array "
        "of NumPy, CuPy, PyTorch or JAX, a torch module, a number, a string, an iterator with state() and restore(), "
        "an object with these in its attributes, or a dict, list or tuple of them"
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
