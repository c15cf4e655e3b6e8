"""RemoteComponent: a variable on a server. Reading pulls, assigning pushes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.parameter_server.transport import INDEX, Connection, Request, RequestPart, ask_all
from mpidist.values import IndexedSlices, Variable, scatter
from mpidist.values.component import Assignment, Component, as_value_of, assign
from mpidist.values.indexed_slices import check_positions
from mpidist.values.placement import HOST, Place, array_of, on_host

# Values read in a block of cache_variable_reads(); None outside.
_cached: ContextVar[dict[RemoteComponent, Array] | None] = ContextVar("mpidist_cached_reads", default=None)


class RemoteComponent(Component):
    """The only copy of a variable, on a server, which knows it by ``number``. Each method is one request."""

    def __init__(
        self, connection: Connection, number: int, shape: tuple[int, ...], dtype: DType, name: str, device: str
    ) -> None:
        super().__init__(name, device)
        self.connection = connection
        self.number = number
        # Number of assignments by this process. Values that it remembers may be older.
        self.writes = 0
        # It has the shape and the dtype, but almost no memory.
        self._outline: Array = np.broadcast_to(np.zeros((), dtype), shape)
        self._label = f"variable {name!r}"
        self.reading = self.part("read", "reading")
        self._read_request = Request([self.reading])

    def part(self, method: str, doing: str, *arrays: Array, args: tuple[object, ...] = ()) -> RequestPart:
        """Return a request for a method of ``Store`` on this variable."""
        contiguous = [np.asarray(array, order="C") for array in arrays]
        return RequestPart(method, (self.number, *args), contiguous, f"{doing} {self._label}")

    def update(self, gradient: Any, optimizer: int, step: int, rate: float) -> RequestPart:
        """Return a request for an optimizer's update by an array or IndexedSlices."""
        args = (optimizer, step, rate)
        if isinstance(gradient, IndexedSlices):
            return self.part("update", "an optimizer's sparse update of", *_on_host(gradient), args=args)
        return self.part("update", "an optimizer's update of", on_host(gradient), args=args)

    def gathering(self, indices: Array) -> RequestPart:
        """Return a request for rows."""
        return self.part("gather", "reading rows of", indices.astype(INDEX, copy=False))

    def shaped(self, data: Array, rows: tuple[int, ...] | None = None) -> Array:
        """Return received bytes as the value, or as rows."""
        shape = self._outline.shape if rows is None else (*rows, *self.shape[1:])
        array: Array = np.ndarray(shape, self._outline.dtype, data)
        return array

    def as_array(self) -> Array:
        """See ``ReadsAsArray``."""
        cache = _cached.get() or {}
        return cache[self] if self in cache else _kept(self, self._pull())

    def _pull(self) -> Array:
        return self.shaped(self.connection.ask(self._read_request)[0])

    def assign_by(self, how: Assignment, value: object) -> RemoteComponent:
        """See ``Assignable``."""
        self.writes += 1
        array, doing = on_host(as_value_of(self, value)), f"{how.__name__}() of"
        if how is assign:
            part = self.part("assign", doing, array)
        else:
            part = self.part("add", doing, array, args=(how.__name__,))
        self.connection.ask(Request([part]))
        return self

    def scatter_by(self, how: scatter.ScatterOp, slices: object) -> RemoteComponent:
        """See ``Assignable``."""
        rows = _on_host(scatter.check_slices(slices, self))
        self.connection.ask(Request([self.part("scatter", f"{how.name}() of", *rows, args=(how.name,))]))
        return self

    def value(self) -> Array:
        """See ``Component``. The array belongs to the caller."""
        return self._pull() if _cached.get() is None else self.as_array().copy()

    def sparse_read(self, indices: object, name: str | None = None) -> Array:
        """Return the rows at ``indices``. Only these are sent."""
        del name
        positions = on_host(array_of(indices))
        if positions.size and positions.dtype.kind not in "iu":
            raise TypeError(
                f"sparse_read() of variable {self.name!r} was given indices of dtype {positions.dtype}; expected "
                "integers"
            )
        if not self.shape:
            raise TypeError(f"sparse_read() of variable {self.name!r}, which is a number; expected one that has rows")
        check_positions(positions, self.shape[0])
        (data,) = self.connection.ask(Request([self.gathering(positions.reshape(-1))]))
        return self.shaped(data, positions.shape)

    def copied(self) -> RemoteComponent:
        """See ``Component``."""
        raise RuntimeError(
            f"variable {self.name!r} cannot be copied: it is kept by {self.connection.name} for all workers; create "
            "another one on all of them, inside `with strategy.scope():`, from variable.numpy()"
        )

    def local_array(self) -> Array:
        """See ``Assignable``."""
        return self._outline

    def local_place(self) -> Place:
        """See ``Assignable``."""
        return HOST

    def __repr__(self) -> str:
        return f"<RemoteComponent {self.name!r} on {self.device}>"


def _on_host(slices: IndexedSlices) -> tuple[Array, Array]:
    return on_host(slices.indices).astype(INDEX, copy=False), on_host(slices.values)


def _kept(component: RemoteComponent, array: Array) -> Array:
    array.flags.writeable = False
    cache = _cached.get()
    if cache is not None:
        cache[component] = array
    return array


def component_of(variable: Variable) -> RemoteComponent:
    """Return the copy of a variable that a server keeps."""
    (component,) = variable.values
    assert isinstance(component, RemoteComponent)
    return component


def pull_all(variables: Sequence[Variable]) -> list[Array]:
    """Pull the values from all servers at once, in one message each."""
    components = [component_of(variable) for variable in variables]
    block = _cached.get()
    missing = [component for component in dict.fromkeys(components) if component not in (block or {})]
    data = ask_all([(component.connection, component.reading) for component in missing]) if missing else []
    pulled = {component: component.shaped(each) for component, each in zip(missing, data, strict=True)}
    if block is not None:
        for component, array in pulled.items():
            _kept(component, array)
        return [block[component].copy() for component in components]
    results: list[Array] = []
    given: set[RemoteComponent] = set()
    for component in components:
        results.append(pulled[component].copy() if component in given else pulled[component])
        given.add(component)
    return results


@contextmanager
def cache_variable_reads() -> Iterator[None]:
    """Pull each parameter server variable at most once in the block.

    This applies to reads of this thread, also after an assignment in the block. It saves a round trip per read if a
    function uses its variables several times.

    Raises:
        ValueError: The block is inside another one.

    Source: ``tf.distribute``'s context of the same name for parameter server training.

    >>> with cache_variable_reads():
    ...     Variable(2.0).numpy()
    array(2.)
    """
    if _cached.get() is not None:
        raise ValueError("cache_variable_reads() was entered inside of itself; expected one block around the reads")
    token = _cached.set({})
    try:
        yield
    finally:
        _cached.reset(token)


def read_all(variables: Sequence[Variable]) -> list[Array]:
    """Return the values of ``variables`` of one strategy in the current context. They must not be modified.

    >>> [array.tolist() for array in read_all([Variable([1.0]), Variable([2.0])])]
    [[1.0], [2.0]]
    """
    return pull_all(variables) if _are_remote(variables) else [variable.as_array() for variable in variables]


def read_rows(variables: Sequence[Variable], positions: Sequence[Array]) -> list[Array]:
    """Return the rows of each of ``variables`` at its ``positions``, and read no others.

    >>> [array.tolist() for array in read_rows([Variable([1.0, 2.0])], [np.array([1, 0])])]
    [[2.0, 1.0]]
    """
    if not _are_remote(variables):
        return [variable.sparse_read(rows) for variable, rows in zip(variables, positions, strict=True)]
    asked = [(component_of(variable), rows) for variable, rows in zip(variables, positions, strict=True)]
    data = ask_all([(component.connection, component.gathering(rows)) for component, rows in asked])
    return [component.shaped(each, rows.shape) for (component, rows), each in zip(asked, data, strict=True)]


def _are_remote(variables: Sequence[Variable]) -> bool:
    return bool(variables) and isinstance(variables[0].values[0], RemoteComponent)
