"""ReadsAsArray, Assignable and Component: reading as an array, assignments, and one copy of a variable."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import DTypeLike

from mpidist.arrays.device_ops import device_name, is_device_array
from mpidist.arrays.dtypes import Array, DType
from mpidist.values import scatter
from mpidist.values.indexed_slices import IndexedSlices, check_positions
from mpidist.values.placement import Place, array_of, copy_of, on_host, place_of, place_of_operands

Assignment = Callable[[Array, Array], None]
# Assignments return the variable that they change.
Assigned = TypeVar("Assigned", bound="Assignable")


_WRITERS = {"copyto", "put", "place", "putmask", "put_along_axis", "fill_diagonal"}


def as_operand(value: object) -> Any:
    """Return ``value``, or the array that it stands for."""
    return value.as_array() if isinstance(value, ReadsAsArray) else value


def _as_operands(value: object) -> Any:
    """Return arguments of a NumPy function with arrays in place of their stand-ins."""
    if isinstance(value, (list, tuple)):
        parts = [_as_operands(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: _as_operands(part) for key, part in value.items()}
    return as_operand(value)


class ReadsAsArray(NDArrayOperatorsMixin):
    """Mixin: arithmetic, comparison, indexing and NumPy functions act on ``as_array()``.

    An array on a device is computed with there, and never copied to the host unasked.
    """

    def as_array(self) -> Array:
        """Return the array that stands for this object in the current context."""
        raise NotImplementedError

    def _is_on_device(self) -> bool:
        """Return whether ``as_array()`` returns an array on a device."""
        raise NotImplementedError

    def numpy(self) -> Array:
        """Return the value as a NumPy array of the caller's own, from wherever it is."""
        array = self.as_array()
        return on_host(array) if is_device_array(array) else np.array(array)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        array = self.as_array()
        if is_device_array(array):
            raise TypeError(
                f"{type(self).__name__} is on {device_name(array)}, and NumPy computes on the host; copy it there with "
                "variable.numpy(), or compute on the device: cupy.asarray(variable)"
            )
        if dtype is not None and array.dtype != dtype:
            if copy is False:
                raise ValueError(f"a copy is needed to convert {array.dtype} to {np.dtype(dtype)}")
            return array.astype(dtype)
        return array.copy() if copy else array

    @property
    def __cupy_get_ndarray__(self) -> Callable[[], Array]:
        # CuPy reads this attribute of all arguments. An object with a NumPy array must not have it.
        if not self._is_on_device():
            raise AttributeError(f"{type(self).__name__} is not on a device")
        return self.as_array

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: Any) -> Any:
        if "out" in kwargs and any(isinstance(out, ReadsAsArray) for out in kwargs["out"]):
            raise self._unwritable(f"numpy.{ufunc.__name__}")
        if method == "at" and isinstance(inputs[0], ReadsAsArray):
            raise self._unwritable(f"numpy.{ufunc.__name__}.at")
        operands = [as_operand(value) for value in inputs]
        with place_of_operands(operands).current():
            return getattr(ufunc, method)(*operands, **kwargs)

    def __array_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Any:
        writes = func.__name__ in _WRITERS and args and isinstance(args[0], ReadsAsArray)
        if writes or isinstance(kwargs.get("out"), ReadsAsArray):
            raise self._unwritable(f"numpy.{func.__name__}")
        args, kwargs = _as_operands(args), _as_operands(kwargs)
        # The arrays of np.concatenate and the like come in a list.
        listed = ((value if isinstance(value, (list, tuple)) else (value,)) for value in (*args, *kwargs.values()))
        with place_of_operands(chain.from_iterable(listed)).current():
            return func(*args, **kwargs)

    def _unwritable(self, function: str) -> TypeError:
        return TypeError(
            f"{type(self).__name__} cannot be written by {function}; "
            "use assign(), assign_add() or assign_sub() on the variable"
        )

    def __getitem__(self, key: object) -> Any:
        return picked(self.as_array(), as_operand(key))

    def __len__(self) -> int:
        return len(self.as_array())

    def __iter__(self) -> Iterator[Any]:
        array = self.as_array()
        return iter(array) if not is_device_array(array) else (self[i] for i in range(len(array)))

    def __bool__(self) -> bool:
        return bool(self.as_array())

    def __float__(self) -> float:
        return float(self.as_array())

    def __int__(self) -> int:
        return int(self.as_array())

    def __index__(self) -> int:
        return operator.index(on_host(self.as_array())[()])

    def __format__(self, spec: str) -> str:
        return format(on_host(self.as_array())[()], spec) if spec else str(self)

    def __complex__(self) -> complex:
        return complex(self.as_array())


def picked(array: Array, key: Any) -> Any:
    """Return ``array[key]`` of an array that a variable has given out, which nobody may write."""
    with place_of(array).current():
        part = array[key]
        # CuPy has no read-only views: what shares memory with a variable would be a way around its assign().
        return part.copy() if is_device_array(part) and part.base is not None else part


def assign(array: Array, value: Array) -> None:
    """Set ``array`` to ``value``."""
    np.copyto(array, value)


def assign_add(array: Array, value: Array) -> None:
    """Add ``value`` to ``array``."""
    np.add(array, value, out=array)


def assign_sub(array: Array, value: Array) -> None:
    """Subtract ``value`` from ``array``."""
    np.subtract(array, value, out=array)


class Assignable(ReadsAsArray):
    """The base of variables and their components: reading, and the family of assignments."""

    name: str

    def assign_by(self: Assigned, how: Assignment, value: object) -> Assigned:
        """Change the value by one of the assignments."""
        raise NotImplementedError

    def scatter_by(self: Assigned, how: scatter.ScatterOp, slices: object) -> Assigned:
        """Change rows by one of the scatter operations."""
        raise NotImplementedError

    def assign(
        self: Assigned, value: object, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Assigned:
        """Set the value; see the table in ``mpidist.values.synchronization`` for its meaning by context.

        In cross-replica context give the same value on every rank, or a PerReplica, of which copy r gets the value r.
        Nothing is communicated at once; a checksum travels with the next collective of the strategy, which is a
        MismatchError where ranks differ. But where ranks share one copy (CentralStorageStrategy): there it is
        collective, and the first rank's value counts.

        Args:
            value: Array or number of the variable's shape, on the host or any device: it is copied to where the
                variable is. Its dtype must be the variable's, or convert without loss of kind (Python numbers,
                integers to floats).
            use_locking, name, read_value: Accepted as in TensorFlow, and ignored.

        Returns:
            The variable.

        Raises:
            ValueError: Another shape, or a combination of context and aggregation that has no meaning.
            RuntimeError: Inside the scope of another strategy than the variable's, where it can only be read.
            TypeError: Another dtype.
        """
        del use_locking, name, read_value
        return self.assign_by(assign, value)

    def assign_add(
        self: Assigned, delta: object, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Assigned:
        """Add ``delta``; see :meth:`assign`."""
        del use_locking, name, read_value
        return self.assign_by(assign_add, delta)

    def assign_sub(
        self: Assigned, delta: object, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Assigned:
        """Subtract ``delta``; see :meth:`assign`."""
        del use_locking, name, read_value
        return self.assign_by(assign_sub, delta)

    def scatter_add(
        self: Assigned, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Assigned:
        """Add rows at positions; repeated positions accumulate.

        In replica context the rows of all replicas are gathered first (collective) by the variable's
        aggregation: SUM takes all of them, MEAN all divided by the number of replicas, ONLY_FIRST_REPLICA those
        of replica 0. Where the replicas share one copy (CentralStorageStrategy, parameter servers) all are taken,
        whatever the aggregation. The same holds for the other scatter methods.

        Args:
            sparse_delta: The rows and their positions.
            use_locking, name: Accepted as in TensorFlow, and ignored.

        Raises:
            TypeError: Not an IndexedSlices.
            NotImplementedError: The variable is synchronized ON_READ.
            ValueError: A position outside the variable, or rows of another shape.
        """
        del use_locking, name
        return self.scatter_by(scatter.ADD, sparse_delta)

    def scatter_sub(
        self: Assigned, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Assigned:
        """Subtract rows at positions; see :meth:`scatter_add`."""
        del use_locking, name
        return self.scatter_by(scatter.SUB, sparse_delta)

    def scatter_mul(
        self: Assigned, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Assigned:
        """Multiply rows at positions; see :meth:`scatter_add`."""
        del use_locking, name
        return self.scatter_by(scatter.MUL, sparse_delta)

    def scatter_div(
        self: Assigned, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Assigned:
        """Divide rows at positions, integers towards zero; see :meth:`scatter_add`."""
        del use_locking, name
        return self.scatter_by(scatter.DIV, sparse_delta)

    def scatter_min(
        self: Assigned, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Assigned:
        """Take the smaller of each element; only without aggregation or with ONLY_FIRST_REPLICA."""
        del use_locking, name
        return self.scatter_by(scatter.MIN, sparse_delta)

    def scatter_max(
        self: Assigned, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Assigned:
        """Take the larger of each element; only without aggregation or with ONLY_FIRST_REPLICA."""
        del use_locking, name
        return self.scatter_by(scatter.MAX, sparse_delta)

    def scatter_update(
        self: Assigned, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Assigned:
        """Replace rows at positions; only without aggregation or with ONLY_FIRST_REPLICA."""
        del use_locking, name
        return self.scatter_by(scatter.UPDATE, sparse_delta)

    def gather_nd(self, indices: object, name: str | None = None) -> Array:
        """Return the elements at ``indices``. The last axis of ``indices`` holds the coordinates of one element.

        ``name`` is accepted as in TensorFlow, and ignored.
        """
        del name
        array = self.as_array()
        place = place_of(array)
        with place.current():
            coordinates = tuple(np.moveaxis(place.brings(array_of(indices)), -1, 0))
            for axis, positions in enumerate(coordinates):
                _check_on_device(positions, array.shape[axis])
            return copy_of(array_of(array[coordinates]))

    def sparse_read(self, indices: object, name: str | None = None) -> Array:
        """Return the rows at ``indices``.

        ``name`` is accepted as in TensorFlow, and ignored. Positions on a device are checked first, which waits for the
        device, because CuPy wraps positions outside around. (``cupy.take(variable, indices, axis=0)`` does not wait.)
        """
        del name
        array = self.as_array()
        place = place_of(array)
        with place.current():
            positions = place.brings(array_of(indices))
            _check_on_device(positions, len(array))
            return array_of(np.take(array, positions, axis=0))

    def value(self) -> Array:
        """Return the value in the current context: a snapshot that later assignments do not change.

        It is where the variable is: a NumPy array, or a CuPy array on the variable's device. Use the variable
        itself, ``numpy.asarray(variable)`` or ``cupy.asarray(variable)``, to compute with it without a copy. (CuPy
        has no read-only arrays: those that it makes of a variable are not to be written.)
        """
        return copy_of(self.as_array())

    def read_value(self) -> Array:
        """Return the same as :meth:`value`."""
        return self.value()

    @property
    def initializer(self) -> None:
        """None, because variables are initialized when they are created."""
        return None

    @property
    def dtype(self) -> DType:
        """Dtype of the elements."""
        return self.local_array().dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the variable."""
        return self.local_array().shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def local_array(self) -> Array:
        """Return the first local copy's array, not to be written."""
        raise NotImplementedError

    def local_place(self) -> Place:
        """Return where the copy is that the current context addresses."""
        raise NotImplementedError

    def _is_on_device(self) -> bool:
        return not self.local_place().is_host

    # NumPy's mixin compares element by element, which would make variables unusable as keys.
    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __ne__ = object.__ne__


class Component(Assignable):
    """One copy of a variable, the argument of update functions. Assignments act on this copy alone.

    Args:
        name: Of the copy.
        device: Where it is kept.
    """

    def __init__(self, name: str, device: str) -> None:
        self.name = name
        self.device = device
        # The variable that it is a copy of.
        self.container: Assignable

    def copied(self) -> Component:
        """Return a component of another variable with the same value."""
        raise NotImplementedError

    def shown(self) -> str:
        """Return its value for people, or where it is if that is another process."""
        return f"on {self.device}"

    def start_from(self, value: Array) -> None:
        """Set the initial value from a restored one; local, and the same on every rank."""
        self.assign_by(assign, value)

    def shared_errors(self, doing: str) -> AbstractContextManager[None]:
        """Return a block for work before an assignment.

        Where assigning is collective its errors reach every rank.
        """
        del doing
        return nullcontext()


class ArrayComponent(Component):
    """A copy in memory of this process, that of one local replica.

    Args:
        array: Its memory, which nobody else writes.
        name: Of the copy.
        device: Where ``array`` lies.
    """

    def __init__(self, array: Array, name: str, device: str) -> None:
        super().__init__(name, device)
        self._place = place_of(array)
        self._hold(array)

    def _hold(self, array: Array) -> None:
        """Let ``array``, in the same place, be the memory."""
        self.array = array
        self._view: Array = array.view()
        if not is_device_array(array):
            # CuPy has no such flag; there only snapshots and results are given out.
            self._view.flags.writeable = False

    def as_array(self) -> Array:
        """See ``ReadsAsArray``."""
        return self._view

    def local_array(self) -> Array:
        """See ``Assignable``."""
        return self.array

    def writable(self) -> Array:
        """Return the memory, for an update in place."""
        return self.array

    def local_place(self) -> Place:
        """See ``Assignable``."""
        return self._place

    def assign_by(self, how: Assignment, value: object) -> ArrayComponent:
        """See ``Assignable``."""
        self._place.calls(how, self.writable(), as_value_of(self, value))
        return self

    def scatter_by(self, how: scatter.ScatterOp, slices: object) -> ArrayComponent:
        """See ``Assignable``."""
        self._place.calls(how.apply, self.writable(), scatter.check_slices(slices, self))
        return self

    def shown(self) -> str:
        """See ``Component``."""
        text = np.array2string(on_host(self.array), separator=", ", threshold=10, edgeitems=2)
        return " ".join(text.split())

    def copied(self) -> ArrayComponent:
        """See ``Component``."""
        return ArrayComponent(self._place.copies(self.array), self.name, self.device)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} on {self.device}: {on_host(self.array)!r}>"


def _check_on_device(positions: Array, rows: int) -> None:
    """Raise IndexError unless all positions on a device are in range.

    NumPy does so itself; CuPy would wrap them around.
    """
    if is_device_array(positions):
        check_positions(positions, rows)


def as_value_of(variable: Assignable, value: object) -> Array:
    """Return ``value`` as an array of the variable's shape and dtype, where the variable is.

    Raises:
        ValueError: Another shape.
        TypeError: A dtype that does not convert without loss of kind.
    """
    if type(value) is np.ndarray:
        array: Array = value
    else:
        array = value.as_array() if isinstance(value, ReadsAsArray) else array_of(value, f"value for {variable.name!r}")
    shape, dtype, place = variable.shape, variable.dtype, variable.local_place()
    if array.shape != shape:
        raise ValueError(
            f"a value of shape {array.shape} was assigned to variable {variable.name!r} of shape {shape}; "
            "expected the same shape"
        )
    if array.dtype == dtype:
        return place.brings(array)
    if not _converts(value, array.dtype, dtype):
        raise TypeError(
            f"a value of dtype {array.dtype} was assigned to variable {variable.name!r} of dtype {dtype}. Convert it "
            f"first: value.astype({dtype.name!r}). NumPy makes int64 and float64 of Python numbers"
        )
    source = place_of(array)
    # The cast goes first where that spares bytes on the way.
    if dtype.itemsize < array.dtype.itemsize:
        return place.brings(source.casts(array, dtype))
    return place.casts(place.brings(array), dtype)


def _converts(value: object, given: DType, dtype: DType) -> bool:
    """Return whether a value of dtype ``given`` may be assigned to a variable of ``dtype``."""
    is_python = isinstance(value, (bool, int, float, complex, list, tuple)) and not isinstance(value, np.generic)
    if is_python and (np.can_cast(given, dtype, "same_kind") or (dtype.name == "bfloat16" and given.kind in "iuf")):
        return True
    to_inexact = given.kind in "iu" and (dtype.kind in "fc" or dtype.name == "bfloat16")
    return to_inexact or np.can_cast(given, dtype, "safe")
