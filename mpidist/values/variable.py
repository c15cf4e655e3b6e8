"""Variable: what users create, the copies it consists of, and how its creation reaches the current strategy."""

from __future__ import annotations

import copy
from abc import ABCMeta
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpidist.arrays.convert import Array, to_array
from mpidist.arrays.dtypes import DType, check_transportable
from mpidist.core.context import Frame as _Frame
from mpidist.core.context import current_frame, entered, get_strategy, has_strategy, variable_creators
from mpidist.core.enums import VariableAggregation, VariableSynchronization
from mpidist.core.protocols import StrategyLike
from mpidist.values import scatter
from mpidist.values.distributed import DistributedValues
from mpidist.values.indexed_slices import IndexedSlices
from mpidist.values.operators import ReadsAsArray
from mpidist.values.synchronization import ASSIGN, ASSIGN_ADD, ASSIGN_SUB, Policy, policy_for


class _CreatedByStrategy(ABCMeta):
    """Makes ``Variable(...)`` ask the current strategy, through the creators that are active."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not Variable:
            return super().__call__(*args, **kwargs)
        arguments = _variable_arguments(*args, **kwargs)
        create: Callable[..., Any] = _create_under_current_strategy
        for creator in variable_creators():
            create = partial(creator, create)
        return create(**arguments)


def _create_under_current_strategy(**arguments: Any) -> Any:
    frame = current_frame()
    if frame.replica_context is not None and has_strategy():
        raise RuntimeError(
            "a Variable was created inside strategy.run(), where every replica would make its own; "
            "create it before, inside `with strategy.scope():`"
        )
    return get_strategy().extended._create_variable(**arguments)


def _variable_arguments(
    initial_value: Any = None,
    trainable: bool | None = None,
    dtype: Any = None,
    name: str | None = None,
    shape: Sequence[int] | None = None,
    constraint: Callable[[Array], Any] | None = None,
    synchronization: VariableSynchronization = VariableSynchronization.AUTO,
    aggregation: VariableAggregation = VariableAggregation.NONE,
) -> dict[str, Any]:
    """Check what can be checked without knowing the strategy, and fill in the defaults."""
    if initial_value is None:
        raise ValueError("Variable was given no initial_value; expected a number, an array or a callable")
    try:
        synchronization = VariableSynchronization(synchronization)
        aggregation = VariableAggregation(aggregation)
    except ValueError as error:
        raise ValueError(
            f"{error}; expected members of mpidist.VariableSynchronization and mpidist.VariableAggregation"
        ) from None
    if synchronization == VariableSynchronization.NONE:
        raise ValueError(
            "synchronization is VariableSynchronization.NONE, which no strategy offers; use AUTO, ON_WRITE or ON_READ"
        )
    if synchronization == VariableSynchronization.AUTO:
        synchronization = VariableSynchronization.ON_WRITE
    if synchronization == VariableSynchronization.ON_READ and trainable:
        raise ValueError(
            "trainable=True with synchronization ON_READ: an optimizer needs equal copies; "
            "use synchronization=VariableSynchronization.ON_WRITE or trainable=False"
        )
    return {
        "initial_value": initial_value,
        "trainable": synchronization != VariableSynchronization.ON_READ if trainable is None else trainable,
        "dtype": dtype,
        "name": "Variable" if name is None else name,
        "shape": shape,
        "constraint": constraint,
        "synchronization": synchronization,
        "aggregation": aggregation,
    }


def initial_array(initial_value: Any, dtype: Any, shape: Sequence[int] | None, aggregation: Any) -> Array:
    """Evaluate and check an initial value.

    Raises:
        TypeError: It is no array of numbers or bools.
        ValueError: It has another shape than ``shape``, or its mean cannot be formed in its dtype.
    """
    value = initial_value() if callable(initial_value) else initial_value
    array = np.asarray(value) if isinstance(value, (list, tuple)) else to_array(value, "initial_value")
    if dtype is not None:
        array = array.astype(dtype)
    check_transportable(array.dtype, "Variable")
    if shape is not None and tuple(shape) != array.shape:
        raise ValueError(f"initial_value has shape {array.shape}; expected shape={tuple(shape)}, as given")
    if aggregation == VariableAggregation.MEAN and array.dtype.kind in "iub":
        raise ValueError(
            f"aggregation MEAN with dtype {array.dtype}: a mean need not be an integer; "
            "use a floating dtype, SUM or ONLY_FIRST_REPLICA"
        )
    return array


class _Assignable(ReadsAsArray):
    """What variables and their components have in common: reading, and the family of assignments."""

    name: str

    def _assign(self, how: Callable[..., None], value: Any) -> Any:
        raise NotImplementedError

    def _scatter(self, how: scatter.ScatterOp, slices: Any) -> Any:
        raise NotImplementedError

    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Set the value; the table in ``mpidist.values.synchronization`` says what that means where.

        Args:
            value: Array or number of the variable's shape. Its dtype must be the variable's, or convert
                without loss of kind (Python numbers, integers to floats).
            use_locking, name, read_value: Accepted as in TensorFlow, and ignored.

        Returns:
            The variable.

        Raises:
            ValueError: Another shape, or a combination of context and aggregation that has no meaning.
            TypeError: Another dtype, or a distributed value in replica context.
        """
        del use_locking, name, read_value
        return self._assign(ASSIGN, value)

    def assign_add(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Add ``delta``; see :meth:`assign`."""
        del use_locking, name, read_value
        return self._assign(ASSIGN_ADD, delta)

    def assign_sub(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Subtract ``delta``; see :meth:`assign`."""
        del use_locking, name, read_value
        return self._assign(ASSIGN_SUB, delta)

    def scatter_add(self, sparse_delta: IndexedSlices) -> Any:
        """Add rows at positions; repeated positions accumulate.

        In replica context the rows of all replicas are gathered first (collective) by the variable's
        aggregation: SUM takes all of them, MEAN all divided by the number of replicas, ONLY_FIRST_REPLICA those
        of replica 0. The same holds for the other scatter methods.

        Raises:
            TypeError: Not an IndexedSlices.
            NotImplementedError: The variable is synchronized ON_READ.
            ValueError: A position outside the variable, or rows of another shape.
        """
        return self._scatter(scatter.ADD, sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices) -> Any:
        """Subtract rows at positions; see :meth:`scatter_add`."""
        return self._scatter(scatter.SUB, sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices) -> Any:
        """Multiply rows at positions; see :meth:`scatter_add`."""
        return self._scatter(scatter.MUL, sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices) -> Any:
        """Divide rows at positions, integers towards zero; see :meth:`scatter_add`."""
        return self._scatter(scatter.DIV, sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices) -> Any:
        """Take the smaller of each element; only without aggregation or with ONLY_FIRST_REPLICA."""
        return self._scatter(scatter.MIN, sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices) -> Any:
        """Take the larger of each element; only without aggregation or with ONLY_FIRST_REPLICA."""
        return self._scatter(scatter.MAX, sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices) -> Any:
        """Replace rows at positions; only without aggregation or with ONLY_FIRST_REPLICA."""
        return self._scatter(scatter.UPDATE, sparse_delta)

    def gather_nd(self, indices: Any) -> Array:
        """Return the elements at multi-dimensional ``indices``, whose last axis holds the coordinates."""
        return np.array(self._read()[tuple(np.moveaxis(np.asarray(indices), -1, 0))])

    def sparse_read(self, indices: Any) -> Array:
        """Return the rows at ``indices``."""
        return np.asarray(np.take(self._read(), np.asarray(indices), axis=0))

    def value(self) -> Array:
        """Return the value in the current context: a snapshot that later assignments do not change.

        Use the variable itself, or ``numpy.asarray(variable)``, to compute with it without a copy.
        """
        return np.array(self._read())

    def read_value(self) -> Array:
        """Return the same as :meth:`value`."""
        return self.value()

    def numpy(self) -> Array:
        """Return the same as :meth:`value`."""
        return self.value()

    @property
    def dtype(self) -> DType:
        """Dtype of the elements."""
        return self._local_array().dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the variable."""
        return self._local_array().shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._local_array().ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._local_array().size

    def _local_array(self) -> Array:
        raise NotImplementedError

    # NumPy's mixin compares element by element, which would make variables unusable as keys.
    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __ne__ = object.__ne__


class Component(_Assignable):
    """The copy of a variable that belongs to one local replica: what ``extended.update`` gives to its function.

    Assignments act on this copy alone.
    """

    def __init__(self, array: Array, name: str, device: str) -> None:
        self._array = array
        self._view: Array = array.view()
        self._view.flags.writeable = False
        self.name = name
        self.device = device
        self.container: Variable

    def _read(self) -> Array:
        return self._view

    def _local_array(self) -> Array:
        return self._array

    def _assign(self, how: Callable[..., None], value: Any) -> Component:
        how(self._array, as_value_of(self, value))
        return self

    def _scatter(self, how: scatter.ScatterOp, slices: Any) -> Component:
        how.apply(self._array, scatter.check_slices(slices, self))
        return self

    def __repr__(self) -> str:
        return f"<Component {self.name!r} on {self.device}: {self._array!r}>"


class Variable(_Assignable, metaclass=_CreatedByStrategy):
    """A value that lives as long as the program, with a copy per replica (tf.Variable under a strategy).

    Inside ``strategy.scope()`` creation is collective: call it on every rank, in the same order; all copies start
    from the first rank's value. Outside any strategy it is an ordinary variable of this process.

    Reading resolves by context: inside ``run`` this replica's copy; outside, for ``ON_WRITE``, the first local
    copy, and for ``ON_READ`` the aggregate over all replicas (collective). Comparison with ``==`` and hashing are
    by identity. Source: https://www.tensorflow.org/api_docs/python/tf/Variable

    Args:
        initial_value: Array, number, nested list, or a callable without arguments that returns one.
        trainable: Whether optimizers should change it; by default unless ON_READ.
        dtype: Converts ``initial_value``; Python floats are float64 otherwise, as NumPy has it.
        name: For messages and checkpoints.
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

    def __init__(
        self,
        strategy: StrategyLike,
        components: Sequence[Component],
        *,
        initial_value: Any,
        name: str,
        trainable: bool,
        constraint: Callable[[Array], Any] | None,
        synchronization: VariableSynchronization,
        aggregation: VariableAggregation,
    ) -> None:
        self._strategy = strategy
        self._components = tuple(components)
        for component in self._components:
            component.container = self
        self._policy: Policy = policy_for(synchronization)
        self.name = name
        self.trainable = trainable
        self.constraint = constraint
        self.synchronization = synchronization
        self.aggregation = aggregation
        self.initial_value = initial_value

    @property
    def values(self) -> tuple[Component, ...]:
        """The copies of this rank's replicas."""
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
        return self._components[self._local_id() or 0].device

    def is_initialized(self) -> bool:
        """Return True: variables are initialized when they are created.

        >>> Variable(1.0).is_initialized()
        True
        """
        return True

    def ref(self) -> Reference:
        """Return a hashable reference that compares by identity, as in TensorFlow."""
        return Reference(self)

    def _local_array(self) -> Array:
        return self._components[0]._local_array()

    def _local_id(self) -> int | None:
        """Return which local component the context addresses, None in cross-replica context."""
        frame = current_frame()
        if len(self._components) == 1 and self._strategy.num_replicas_in_sync == 1:
            return 0
        if frame.strategy is not self._strategy:
            return None
        if frame.update_replica_id is not None:
            return frame.update_replica_id
        return None if frame.replica_context is None else frame.replica_context.local_replica_id

    def _read(self) -> Array:
        local_id = self._local_id()
        if local_id is not None:
            return self._components[local_id]._read()
        return self._policy.read(self)

    def _assign(self, how: Callable[..., None], value: Any) -> Variable:
        frame = current_frame()
        if len(self._components) == 1 and self._strategy.num_replicas_in_sync == 1:
            self._components[0]._assign(how, _sole_value(value))
        elif frame.update_replica_id is not None:
            self._components[frame.update_replica_id]._assign(how, value)
        elif frame.replica_context is not None and frame.strategy is self._strategy:
            if isinstance(value, DistributedValues):
                raise TypeError(
                    f"{type(value).__name__} was assigned to variable {self.name!r} inside strategy.run(); "
                    "expected this replica's array: pass the value through run(fn, args=(value,))"
                )
            self._policy.assign_in_replica(self, frame.replica_context, how, as_value_of(self, value))
        else:
            with self._strategy.scope():
                self._policy.assign_across(self, how, value)
        return self

    def _scatter(self, how: scatter.ScatterOp, slices: Any) -> Variable:
        frame = current_frame()
        if len(self._components) == 1 and self._strategy.num_replicas_in_sync == 1:
            self._components[0]._scatter(how, slices)
        elif frame.update_replica_id is not None:
            self._components[frame.update_replica_id]._scatter(how, slices)
        else:
            self._policy.check_scatter(self, how)
            slices = scatter.check_slices(slices, self)
            if frame.replica_context is not None and frame.strategy is self._strategy:
                self._policy.scatter_in_replica(self, frame.replica_context, how, slices)
            else:
                with self._strategy.scope():
                    for component in self._components:
                        component._scatter(how, slices)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        frame = current_frame()
        if self._strategy.num_replicas_in_sync > 1 and (
            frame.strategy is not self._strategy or frame.replica_context is not None
        ):
            raise RuntimeError(
                f"variable {self.name!r} was copied outside its strategy; "
                "copy it inside `with strategy.scope():` of the strategy it was created under"
            )
        parts = [Component(c._array.copy(), c.name, c.device) for c in self._components]
        twin: Variable = type.__call__(
            type(self),
            self._strategy,
            parts,
            initial_value=copy.deepcopy(self.initial_value, memo),
            name=self.name,
            trainable=self.trainable,
            constraint=self.constraint,
            synchronization=self.synchronization,
            aggregation=self.aggregation,
        )
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> Any:
        raise TypeError(
            f"variable {self.name!r} cannot be pickled; save it with mpidist.Checkpoint, or pickle v.numpy()"
        )

    def __repr__(self) -> str:
        return (
            f"<Variable {self.name!r} shape={self.shape} dtype={self.dtype} "
            f"{self.synchronization.name}/{self.aggregation.name}>"
        )


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


def make_variable(strategy: StrategyLike, devices: Sequence[str], array: Array, **properties: Any) -> Variable:
    """Return a variable with a copy of ``array`` for each of ``devices``; for the strategies' ``_create_variable``."""
    name = properties["name"]
    components = [
        Component(np.array(array, order="C"), name if i == 0 else f"{name}/replica_{i}", device)
        for i, device in enumerate(devices)
    ]
    variable: Variable = type.__call__(Variable, strategy, components, **properties)
    return variable


def _sole_value(value: Any) -> Any:
    return value.values[0] if isinstance(value, DistributedValues) and len(value.values) == 1 else value


def as_value_of(variable: Component | Variable, value: Any) -> Array:
    """Return ``value`` as an array of the variable's shape and dtype.

    Raises:
        ValueError: Another shape.
        TypeError: A dtype that does not convert without loss of kind.
    """
    array = np.asarray(value) if isinstance(value, (list, tuple)) else to_array(value, f"value for {variable.name!r}")
    if array.shape != variable.shape:
        raise ValueError(
            f"a value of shape {array.shape} was assigned to variable {variable.name!r} of shape {variable.shape}; "
            "expected the same shape"
        )
    dtype = variable.dtype
    if array.dtype == dtype:
        return array
    is_python = isinstance(value, (bool, int, float, complex, list, tuple)) and not isinstance(value, np.generic)
    to_inexact = array.dtype.kind in "iu" and (dtype.kind in "fc" or dtype.name == "bfloat16")
    if is_python and np.can_cast(array.dtype, dtype, "same_kind"):
        return array.astype(dtype)
    if is_python and dtype.name == "bfloat16" and array.dtype.kind in "iuf":
        return array.astype(dtype)
    if to_inexact or np.can_cast(array.dtype, dtype, "safe"):
        return array.astype(dtype)
    raise TypeError(
        f"a value of dtype {array.dtype} was assigned to variable {variable.name!r} of dtype {dtype}; "
        f"convert it first: value.astype({dtype.name!r})"
    )


def update_components(
    variable: Variable, fn: Callable[..., Any], arguments: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
) -> list[Any]:
    """Call ``fn(component, *args_i, **kwargs_i)`` for every local component, each in its update context."""
    results = []
    for i, component in enumerate(variable.values):
        args, kwargs = arguments(i)
        with entered(_Frame(variable.distribute_strategy, None, i)):
            results.append(fn(component, *args, **kwargs))
    return results
