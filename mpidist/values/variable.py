"""Variable: created by the current strategy, read and assigned by context."""

from __future__ import annotations

import inspect
import threading
import weakref
from abc import ABCMeta
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import DTypeLike

from mpidist.arrays.convert import is_keras_layer, is_torch_module, is_torch_optimizer
from mpidist.arrays.device_ops import is_device_array
from mpidist.arrays.dtypes import Array, as_dtype, check_transportable
from mpidist.core import context
from mpidist.core.context import Frame, ReplicaContextLike, StrategyLike, current_frame, is_default
from mpidist.core.options import VariableAggregation, VariableSynchronization
from mpidist.values import scatter
from mpidist.values.component import Assignable, Assignment, Component, as_value_of
from mpidist.values.distributed import DistributedValues, ReplicaValues
from mpidist.values.indexed_slices import IndexedSlices
from mpidist.values.placement import Place, array_of, checksum, content, place_at, place_of

Instance = TypeVar("Instance")
# Names of a variable that strategies, optimizers and checkpoints use, and programs do not.
_FOR_LIBRARY = {
    "as_array", "assemble", "assign_by", "differs", "here", "is_compared", "is_copy", "is_named", "is_unused", "label",
    "local_array", "local_place", "scatter_by", "whole",
}  # fmt: skip


# Advice for objects that have several parameters and cannot become one variable.
_GRADIENTS = 'in strategy.run, context.all_reduce("MEAN", [p.grad for p in module.parameters()])'
_MODELS: tuple[tuple[Callable[[object], bool], str, str], ...] = (
    (
        is_torch_module,
        "a torch module",
        "[mpidist.Variable(p) for p in module.parameters()], one for each parameter, or keep the module's own "
        f"parameters and reduce their gradients: {_GRADIENTS}",
    ),
    (
        is_torch_optimizer,
        "a torch optimizer",
        "an optimizer of mpidist.optimizers for variables, or keep the torch optimizer and reduce the gradients before "
        f"its step(): {_GRADIENTS}",
    ),
    (is_keras_layer, "a Keras layer", "[mpidist.Variable(w) for w in layer.get_weights()], one for each weight"),
)


def variable_arguments(
    initial_value: Any = None,
    trainable: bool | None = None,
    dtype: DTypeLike | None = None,
    name: str | None = None,
    shape: Sequence[int] | None = None,
    constraint: Callable[[Array], object] | None = None,
    synchronization: VariableSynchronization = VariableSynchronization.AUTO,
    aggregation: VariableAggregation = VariableAggregation.NONE,
) -> dict[str, Any]:
    """Check the arguments as far as no strategy is needed, and fill in the defaults."""
    if initial_value is None:
        raise ValueError("Variable was given no initial_value; expected a number, an array or a callable")
    _check_is_no_model(initial_value)
    try:
        synchronization = VariableSynchronization(synchronization)
        aggregation = VariableAggregation(aggregation)
    except ValueError as error:
        raise ValueError(
            f"{error}; expected members of mpidist.VariableSynchronization "
            f"({', '.join(how.name for how in VariableSynchronization)}) and of mpidist.VariableAggregation "
            f"({', '.join(how.name for how in VariableAggregation)}), such as mpidist.VariableAggregation.MEAN"
        ) from None
    if synchronization == VariableSynchronization.NONE:
        raise ValueError(
            "synchronization is VariableSynchronization.NONE, which no strategy offers; use AUTO, ON_WRITE or ON_READ"
        )
    if synchronization == VariableSynchronization.AUTO:
        synchronization = VariableSynchronization.ON_WRITE
    return {
        "initial_value": initial_value,
        "trainable": synchronization != VariableSynchronization.ON_READ if trainable is None else trainable,
        "dtype": dtype,
        "name": name,
        "shape": shape,
        "constraint": constraint,
        "synchronization": synchronization,
        "aggregation": aggregation,
    }


def _check_is_no_model(initial_value: object) -> None:
    """Raise TypeError for modules and optimizers, which have many values.

    They can often be called, as functions that make a value can.
    """
    for is_one, name, instead in _MODELS:
        if is_one(initial_value):
            raise TypeError(
                f"initial_value is {name}, a {type(initial_value).__name__}; expected a number, an array or a function "
                f"that returns one: use {instead}"
            )


def initial_array(
    initial_value: object, dtype: DTypeLike | None, shape: Sequence[int] | None, aggregation: object
) -> Array:
    """Evaluate and check an initial value.

    Raises:
        TypeError: It is no array of numbers or bools.
        ValueError: It has another shape than ``shape``, or its mean cannot be formed in its dtype.
    """
    value = initial_value() if callable(initial_value) else initial_value
    array = value.as_array() if isinstance(value, Assignable) else array_of(value, "initial_value")
    if dtype is not None:
        array = place_of(array).casts(array, as_dtype(dtype))
    check_transportable(array.dtype, "Variable")
    if shape is not None and tuple(shape) != array.shape:
        raise ValueError(f"initial_value has shape {array.shape}; expected shape={tuple(shape)}, as given")
    if aggregation == VariableAggregation.MEAN and array.dtype.kind in "iub":
        raise ValueError(
            f"aggregation MEAN with dtype {array.dtype}: a mean need not be an integer; "
            "use a floating dtype, SUM or ONLY_FIRST_REPLICA"
        )
    return array


class VariableNames:
    """The names of a strategy's variables, in order of creation.

    The order is the same on all ranks.

    A rank that lists its variables in another order than the others would add up gradients of different variables. So
    their labels travel with the gradients, and no two variables of a strategy have the same label.

    >>> names = VariableNames()
    >>> [names.label(name) for name in ("kernel", "bias", "kernel")]
    ['kernel', 'bias', 'kernel (number 2 of this name)']
    """

    def __init__(self) -> None:
        self._unnamed = 0
        self._taken: Counter[str] = Counter()

    def default(self) -> str:
        """Return the name of the next unnamed variable, as TensorFlow 1 counts them.

        >>> names = VariableNames()
        >>> names.default()
        'Variable'
        >>> names.took_default()
        >>> names.default()
        'Variable_1'
        """
        return f"Variable_{self._unnamed}" if self._unnamed else "Variable"

    def took_default(self) -> None:
        """Note that a variable has the name ``default()``.

        Its creation could have failed, on all ranks.
        """
        self._unnamed += 1

    def label(self, name: str) -> str:
        """Return a label that no other variable has, and note the name."""
        self._taken[name] += 1
        return name if self._taken[name] == 1 else f"{name} (number {self._taken[name]} of this name)"


class _CreatedByStrategy(ABCMeta):
    """Makes ``Variable(...)`` ask the current strategy, through the creators that are active."""

    # Type checkers take the arguments from ``__init__``, as this returns an instance of the class.
    def __call__(cls: type[Instance], *args: Any, **kwargs: Any) -> Instance:
        if cls is not Variable:
            instance: Instance = type.__call__(cls, *args, **kwargs)
            return instance
        arguments = variable_arguments(*args, **kwargs)
        create: Callable[..., Any] = _create_under_current_strategy
        for creator in context.variable_creators():
            create = partial(creator, create)
        created: Instance = create(**arguments)
        return created


def _create_under_current_strategy(**arguments: Any) -> Any:
    frame = current_frame()
    if frame.replica_context is not None and context.has_strategy():
        raise RuntimeError(
            "a Variable was created inside strategy.run(), where every replica would make its own; "
            "create it before, inside `with strategy.scope():`"
        )
    extended = context.get_strategy().extended
    is_named = arguments["name"] is not None
    name = arguments["name"] if is_named else extended.variable_names.default()
    dtype, shape = arguments.pop("dtype"), arguments.pop("shape")
    with extended.shared_errors(f"creating variable {name!r}"):
        # A single copy needs no mean until replicas assign to it.
        aggregation = VariableAggregation.NONE if extended.is_central else arguments["aggregation"]
        array = initial_array(arguments["initial_value"], dtype, shape, aggregation)
    variable = extended.create_variable(array, **{**arguments, "name": name})
    variable.is_named = is_named
    if not is_named:
        extended.variable_names.took_default()
    return variable


class Policy:
    """The rules by which a variable is read and written: see ``mpidist.values.synchronization``.

    Attributes:
        combines: Whether copies may differ, and are combined when they are read together, by ``read``.
        check_scatter: Raises NotImplementedError if a scatter operation is not supported.
    """

    combines = False
    read: Callable[[Variable], Array]
    assign_in_replica: Callable[[Variable, ReplicaContextLike, Assignment, Array], None]
    assign_across: Callable[[Variable, Assignment, object], None]
    check_scatter: Callable[[Variable, scatter.ScatterOp], None]
    scatter_in_replica: Callable[[Variable, ReplicaContextLike, scatter.ScatterOp, IndexedSlices], None]


class Variable(Assignable, DistributedValues, metaclass=_CreatedByStrategy):
    """A value that outlives a step, with a copy per replica (tf.Variable).

    Inside ``strategy.scope()`` creation is collective: call it on every rank, in the same order; all copies start
    from the first rank's value. Outside any strategy it is an ordinary variable of this process.

    Reading resolves by context: inside ``run`` this replica's copy; outside, for ``ON_WRITE``, the first local
    copy, and for ``ON_READ`` the aggregate over all replicas (collective). Comparison with ``==`` and hashing are
    by identity. Source: https://www.tensorflow.org/api_docs/python/tf/Variable

    Each copy is on its replica's device, wherever ``initial_value`` is: NumPy arrays on a CPU, CuPy arrays on a
    GPU, from which ``variable.numpy()`` copies to the host.

    Args:
        initial_value: Array, number, nested list, or a callable without arguments that returns one.
        trainable: Whether optimizers should change it; by default unless ON_READ.
        dtype: Converts ``initial_value``; Python floats are float64 otherwise, as NumPy has it.
        name: For messages; "Variable", "Variable_1", ... in order of creation, where none is given.
        shape: Checked against that of ``initial_value``.
        constraint: Applied by optimizers after each update.
        synchronization: When copies are brought together.
        aggregation: How values that differ between replicas become one.

    Raises:
        ValueError: An argument, or a combination of them, without meaning.
        TypeError: An initial value that is no array of numbers.
        RuntimeError: Created inside ``strategy.run``.
        MismatchError: Ranks gave different shapes or dtypes.

    >>> v = Variable([1.0, 2.0], name="v")
    >>> v.assign_add([1.0, 1.0]).numpy()
    array([2., 3.])
    >>> v * 2
    array([4., 6.])
    """

    if TYPE_CHECKING:

        def __init__(
            self,
            initial_value: Any = None,
            trainable: bool | None = None,
            dtype: DTypeLike | None = None,
            name: str | None = None,
            shape: Sequence[int] | None = None,
            constraint: Callable[[Array], object] | None = None,
            synchronization: VariableSynchronization = VariableSynchronization.AUTO,
            aggregation: VariableAggregation = VariableAggregation.NONE,
        ) -> None: ...

    __signature__ = inspect.signature(variable_arguments).replace(return_annotation=None)
    # What it is a part of; see ``whole_of``.
    whole: Assignable | None = None
    # Whether it may still be given a restored value that waits for it, when it comes to its place.
    is_unused = True
    # Whether the program chose the name.
    is_named = False

    def assemble(
        self,
        strategy: StrategyLike,
        components: Sequence[Component],
        *,
        policy: Policy,
        initial_value: object,
        name: str,
        trainable: bool,
        constraint: Callable[[Array], object] | None,
        synchronization: VariableSynchronization,
        aggregation: VariableAggregation,
        label: str | None = None,
    ) -> None:
        """Take the copies and the properties of a new variable."""
        self._strategy = strategy
        self._components = tuple(components)
        self._has_one_value = len(components) == 1 and strategy.num_replicas_in_sync == 1
        # The copy that every context reads.
        self._only = components[0] if len(components) == 1 and (self._has_one_value or not policy.combines) else None
        for component in self._components:
            component.container = self
        self._policy = policy
        self.name = name
        self.label = strategy.extended.variable_names.label(name) if label is None else label
        self.is_copy = label is not None
        # Whether the copies were given values that differ.
        self.differs = False
        self._copies = 0
        self.trainable = trainable
        self.constraint = constraint
        self.synchronization = synchronization
        self.aggregation = aggregation
        self._initial_value = _weakly(initial_value)

    @property
    def values(self) -> tuple[Component, ...]:
        """The copies of this rank's replicas."""
        if self.is_unused:
            before_first_use(self)
        return self._components

    @property
    def distribute_strategy(self) -> StrategyLike:
        """The strategy that the variable was created under."""
        return self._strategy

    @property
    def devices(self) -> tuple[str, ...]:
        """Where the copies of this rank are."""
        return tuple(component.device for component in self._components)

    @property
    def device(self) -> str:
        """Where the copy is that the current context reads."""
        return self.here().device

    @property
    def initial_value(self) -> Any:
        """The value or array that the variable was created from on this rank.

        Raises:
            RuntimeError: It was an array that the program has let go of since; variables do not keep it alive.
        """
        value = self._initial_value()
        if value is None:
            raise RuntimeError(
                f"the initial value of variable {self.name!r} is gone: variables do not keep the array they were "
                "created from; keep it yourself, or copy variable.numpy() before it changes"
            )
        return value

    def is_initialized(self) -> bool:
        """Return True: variables are initialized when they are created.

        >>> Variable(1.0).is_initialized()
        True
        """
        return True

    def ref(self) -> Reference:
        """Return a hashable reference that compares by identity, as in TensorFlow."""
        return Reference(self)

    def local_array(self) -> Array:
        """See ``Assignable``."""
        return self._components[0].local_array()

    def local_place(self) -> Place:
        """See ``Assignable``."""
        return self.here().local_place()

    def here(self) -> Component:
        """Return the copy that the context addresses, the first one in cross-replica context."""
        return self._component(self._local_id() or 0)

    def _component(self, local_id: int) -> Component:
        """Return the copy of a local replica, or the one that all share."""
        return self._components[local_id if len(self._components) > 1 else 0]

    def _local_id(self) -> int | None:
        """Return which local component the context addresses, None in cross-replica context."""
        if self._has_one_value:
            return 0
        frame = current_frame()
        if frame.strategy is not self._strategy:
            return None
        if frame.update_replica_id is not None:
            return frame.update_replica_id
        return None if frame.replica_context is None else frame.replica_context.local_replica_id

    def _source(self) -> Component | None:
        """Return the copy that the context reads, or None if the copies are combined."""
        if self.is_unused:
            before_first_use(self)
        if self._only is not None:
            return self._only
        local_id = self._local_id()
        return None if local_id is None and self._policy.combines else self._component(local_id or 0)

    def as_array(self) -> Array:
        """See ``ReadsAsArray``."""
        source = self._source()
        return self._policy.read(self) if source is None else source.as_array()

    def value(self) -> Array:
        """Return the value in the current context; see ``Assignable.value``."""
        source = self._source()
        return super().value() if source is None else source.value()

    def sparse_read(self, indices: object, name: str | None = None) -> Array:
        """Return the rows at ``indices``. From another process only these rows travel. ``name`` is ignored."""
        del name
        source = self._source()
        return super().sparse_read(indices) if source is None else source.sparse_read(indices)

    def assign_by(self, how: Assignment, value: object) -> Variable:
        """See ``Assignable``."""
        if self.is_unused:
            before_first_use(self)
        frame = current_frame()
        self._check_belongs_here(frame)
        if self._has_one_value:
            self._components[0].assign_by(how, _sole_value(value))
        elif frame.update_replica_id is not None and frame.strategy is self._strategy:
            self._component(frame.update_replica_id).assign_by(how, value)
        elif frame.replica_context is not None and frame.strategy is self._strategy:
            try:
                checked = as_value_of(self, value)
            except (TypeError, ValueError) as error:
                self._strategy.extended.announce(error, f"assigning to variable {self.label!r}")
                raise
            self._policy.assign_in_replica(self, frame.replica_context, how, checked)
        else:
            with self._strategy.scope(), self._components[0].shared_errors(f"assigning to variable {self.label!r}"):
                self._policy.assign_across(self, how, value)
        return self

    def scatter_by(self, how: scatter.ScatterOp, slices: object) -> Variable:
        """See ``Assignable``."""
        if self.is_unused:
            before_first_use(self)
        frame = current_frame()
        self._check_belongs_here(frame)
        if self._has_one_value:
            self._components[0].scatter_by(how, slices)
        elif frame.update_replica_id is not None and frame.strategy is self._strategy:
            self._component(frame.update_replica_id).scatter_by(how, slices)
        else:
            with self._components[0].shared_errors(f"{how.name} of variable {self.label!r}"):
                self._policy.check_scatter(self, how)
                slices = scatter.check_slices(slices, self)
            if frame.replica_context is not None and frame.strategy is self._strategy:
                self._policy.scatter_in_replica(self, frame.replica_context, how, slices)
            else:
                doing = f"{how.name} outside of strategy.run()"
                with self._strategy.scope(), changing(self, doing):
                    for component in self._components:
                        component.scatter_by(how, slices)
                if self.is_compared:
                    # The rows by themselves: the pieces of a large variable may miss them.
                    parts = checksum(slices.values), checksum(slices.indices)
                    what = f"{doing} of variable {self.label!r}"
                    self._strategy.extended.done(f"rows of {self.label}", what, lambda: hash(parts))
        return self

    @property
    def is_compared(self) -> bool:
        """Whether copies must be equal: no ON_READ, PerReplica or copy of one rank alone."""
        return not (self.synchronization == VariableSynchronization.ON_READ or self.is_copy or self.differs)

    def _check_belongs_here(self, frame: Frame) -> None:
        if frame.strategy is self._strategy or is_default(frame.strategy):
            return
        if not is_default(self._strategy):
            raise RuntimeError(
                f"variable {self.name!r} of {type(self._strategy).__name__} was assigned inside the scope of another "
                f"strategy, {type(frame.strategy).__name__}, where it can only be read. Leave that scope first"
            )
        if frame.replica_context is not None and frame.strategy.num_replicas_in_sync > 1:
            raise RuntimeError(
                f"variable {self.name!r} was created outside the scope of {type(frame.strategy).__name__} and assigned "
                "in its run(), where every rank would change a value of its own; create it inside "
                "`with strategy.scope():`"
            )

    def __deepcopy__(self, memo: dict[int, object]) -> Variable:
        if self.is_unused:
            before_first_use(self)
        frame = current_frame()
        is_outside = is_default(frame.strategy)
        is_in_scope = frame.strategy is self._strategy and frame.replica_context is None
        if self._strategy.num_replicas_in_sync > 1 and not (is_outside or is_in_scope):
            raise RuntimeError(
                f"variable {self.name!r} was copied inside strategy.run(), or inside the scope of another strategy. "
                "Copy it outside"
            )
        parts = [component.copied() for component in self._components]
        self._copies += 1
        twin: Variable = object.__new__(type(self))
        twin.assemble(
            self._strategy,
            parts,
            policy=self._policy,
            initial_value=self._initial_value(),
            name=self.name,
            trainable=self.trainable,
            constraint=self.constraint,
            synchronization=self.synchronization,
            aggregation=self.aggregation,
            # Not counted among those of the strategy: a copy may be made on one rank alone.
            label=f"{self.label} (copy {self._copies})",
        )
        twin.is_named = self.is_named
        memo[id(self)] = twin
        return twin

    def __dir__(self) -> list[str]:
        """Return the names for programs."""
        return sorted(set(super().__dir__()) - _FOR_LIBRARY)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"variable {self.name!r} cannot be pickled; save it with mpidist.Checkpoint, or pickle v.numpy()"
        )

    def __repr__(self) -> str:
        copies = [component.shown() for component in self._components]
        if len(copies) > 1:
            ids = self._strategy.extended.local_replica_ids
            shown = "{" + ", ".join(f"{i}: {copy}" for i, copy in zip(ids, copies, strict=True)) + "}"
        else:
            (shown,) = copies
        return (
            f"<Variable {self.name!r} shape={self.shape} dtype={self.dtype} "
            f"{self.synchronization.name}/{self.aggregation.name}: {shown}>"
        )


def changing(variable: Variable, how: str) -> AbstractContextManager[None]:
    """Return a block that changes this rank's copies alone. The ranks compare them at the next collective."""
    if not variable.is_compared:
        return nullcontext()
    array, what = variable.local_array(), f"{how} of variable {variable.label!r}"
    extended, label = variable.distribute_strategy.extended, variable.label
    block: AbstractContextManager[None] = extended.changing(label, what, lambda: content(array))
    return block


def _weakly(value: object) -> Callable[[], object]:
    """Return a function that returns ``value``, without keeping an array alive."""
    return weakref.ref(value) if isinstance(value, np.ndarray) or is_device_array(value) else lambda: value


class Reference:
    """A hashable stand-in for a variable (``tf.Variable.ref``)."""

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    def deref(self) -> Variable:
        """Return the variable."""
        return self._variable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and other._variable is self._variable

    def __hash__(self) -> int:
        return id(self._variable)


def _sole_value(value: object) -> object:
    return value.values[0] if isinstance(value, ReplicaValues) and len(value.values) == 1 else value


def update_components(
    variable: Variable,
    fn: Callable[..., object],
    arguments: Callable[[int], tuple[tuple[object, ...], dict[str, object]]],
) -> list[object]:
    """Call ``fn(component, *args_i, **kwargs_i)`` for every local component, each in its update context.

    The replica's device is current, also where ``variable`` itself is on the host.
    """
    results = []
    strategy = variable.distribute_strategy
    devices = strategy.extended.worker_devices_by_replica
    for i, (component, (device,)) in enumerate(zip(variable.values, devices, strict=True)):
        args, kwargs = arguments(i)
        with place_at(device).current(), context.entered(Frame(strategy, None, i)):
            results.append(fn(component, *args, **kwargs))
    return results


# Restored values that wait for variables are looked for when a variable is first used: by then the program has put it
# where it belongs, which it has not when the variable is made.


class LooksForVariables(Protocol):
    """Holds values for variables that do not exist yet."""

    def look(self, used: Variable | None = None) -> None:
        """Give each unused variable that has come to its place its value; local. Errors are those of ``used``."""


_waiting: WeakValueDictionary[int, LooksForVariables] = WeakValueDictionary()
_numbers = count()
# Replicas of one process run in threads.
_lock = threading.RLock()


def begin_to_wait(waiting: LooksForVariables) -> None:
    """Let ``waiting`` look before each first use of a variable, while it lives."""
    _waiting[next(_numbers)] = waiting


def stop_waiting(waiting: LooksForVariables) -> None:
    """Let ``waiting`` look no more."""
    for number in [number for number, those in _waiting.items() if those is waiting]:
        del _waiting[number]


def before_first_use(variable: Variable) -> None:
    """Let all that wait look, as they may wait for ``variable``."""
    with _lock:
        give_restored_values(variable)
        variable.is_unused = False


def give_restored_values(used: Variable | None = None) -> None:
    """Let all that wait look, the latest first.

    A variable that one fills is not looked at by the next.
    """
    with _lock:
        for _, waiting in sorted(_waiting.items(), reverse=True):
            waiting.look(used)
