"""ShardedVariable: variables that hold consecutive rows of one value, seen as one variable."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from mpidist.arrays.device_ops import is_device_array
from mpidist.arrays.dtypes import Array, DType
from mpidist.core.context import current_frame
from mpidist.core.options import VariableSynchronization
from mpidist.parameter_server.remote import read_all, read_rows
from mpidist.values import CompositeVariable, IndexedSlices, ReplicaValues, Variable, scatter
from mpidist.values.component import Assignment, as_operand, as_value_of, picked
from mpidist.values.indexed_slices import check_indices
from mpidist.values.placement import Place, array_of, copy_of, on_host, place_of

Rows = range | Array
"""Row numbers in rising order, without duplicates."""
_DEFAULT_NAME = "ShardedVariable"


def div_sizes(rows: int, shards: int) -> list[int]:
    """Return the rows of each shard. Sizes differ by at most one, larger ones first ("div").

    >>> div_sizes(13, 5)
    [3, 3, 3, 2, 2]
    """
    quotient, larger = divmod(rows, shards)
    return [quotient + 1] * larger + [quotient] * (shards - larger)


def offsets_of(sizes: Sequence[int]) -> list[int]:
    """Return the first row of each shard, and the number of all rows.

    >>> offsets_of(div_sizes(10, 4))
    [0, 3, 6, 8, 10]
    """
    return [0, *accumulate(sizes)]


def select_rows(key: object, shape: tuple[int, ...]) -> tuple[Rows, tuple[object, ...]]:
    """Return the rows that ``array[key]`` needs, and the key for these rows alone.

    >>> rows, rest = select_rows([5, 2, 5], (10, 3))
    >>> array = np.arange(30).reshape(10, 3)
    >>> rows, np.array_equal(array[rows][rest], array[[5, 2, 5]])
    (array([2, 5]), True)
    """
    items = [_plain(item) for item in (key if isinstance(key, tuple) else (key,))]
    # NumPy raises its own errors for an array of this shape without memory, before anything is read.
    np.broadcast_to(np.False_, shape)[tuple(items)]
    left = len(shape) - sum(map(_axes, items))
    for place, item in enumerate(items):
        if item is Ellipsis and left:
            break
        if _axes(item):
            rows, instead = _taken(item, shape[0])
            return rows, (*items[:place], *instead, *items[place + 1 :])
    return range(shape[0]), tuple(items)


def _plain(item: object) -> Any:
    """Convert an item of a key to a slice, None, Ellipsis, bool, int, or array."""
    if item is None or item is Ellipsis or isinstance(item, (slice, bool, int)):
        return item
    array = on_host(array_of(as_operand(item)))
    if array.size == 0 and isinstance(item, (list, tuple)):
        array = array.astype(np.intp)
    return array.item() if array.ndim == 0 and array.dtype.kind in "biu" else array


def _axes(item: object) -> int:
    """Return the number of axes that an item of a key selects from."""
    if isinstance(item, np.ndarray):
        return item.ndim if item.dtype.kind == "b" else 1
    return 0 if item is None or item is Ellipsis or isinstance(item, bool) else 1


def _taken(item: int | slice | Array, count: int) -> tuple[Rows, tuple[object, ...]]:
    """Return the rows of an item, and its replacement for these rows alone."""
    if isinstance(item, int):
        row = range(count)[item]
        return range(row, row + 1), (0,)
    if isinstance(item, slice):
        rows = range(*item.indices(count))
        return (rows, (slice(None),)) if rows.step > 0 else (rows[::-1], (slice(None, None, -1),))
    # A mask means the positions of its True elements.
    first, *others = item.nonzero() if item.dtype.kind == "b" else (item,)
    positions = first.astype(np.intp, copy=False)
    taken, numbers = np.unique(np.where(positions < 0, positions + count, positions), return_inverse=True)
    return taken, (numbers.reshape(positions.shape), *others)


class ShardedVariable(CompositeVariable):
    """Variables that hold consecutive rows of one value, used as one variable.

    A partitioner creates them. Reading returns the rows of all shards. An index, ``sparse_read`` and the scatter
    methods use only the shards, and if few rows are selected, only the rows that they need. Reads and writes are
    collective if they are for a shard. In replica context a collective write includes every shard.

    Optimizers accept it as a variable, and update each shard by its part of the gradient, dense or sparse. A checkpoint
    stores it as one array, and an optimizer's slots likewise, so you can restore it to any number of shards, or to a
    Variable.

    Args:
        variables: The shards in order: variables of one strategy, of shapes (rows of the shard, ...), synchronized
            ON_WRITE.
        name: Name for messages.

    Raises:
        TypeError: ``variables`` is not a list or tuple of one or more variables.
        ValueError: Shards are scalars, or differ in dtype, in the shape of their rows, or in their strategy.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/ParameterServerStrategy

    >>> v = ShardedVariable([Variable([[0.0], [1.0]]), Variable([[2.0]])])
    >>> v.shape, v[-1], v.sparse_read([2, 0]).tolist()
    ((3, 1), array([2.]), [[2.0], [0.0]])
    >>> _ = v.scatter_add(IndexedSlices([[5.0], [5.0]], [1, 1]))
    >>> v.assign_sub([[0.0], [1.0], [2.0]]).numpy().tolist()
    [[0.0], [10.0], [0.0]]
    """

    def __init__(self, variables: Sequence[Variable], name: str = _DEFAULT_NAME) -> None:
        _check_shards(variables)
        self._variables = list(variables)
        self.name = name
        self.is_named = name != _DEFAULT_NAME
        sizes = [variable.shape[0] for variable in variables]
        self._offsets = offsets_of(sizes)
        self._shape = (self._offsets[-1], *variables[0].shape[1:])
        self._dtype = variables[0].dtype
        self.synchronization = variables[0].synchronization
        self.aggregation = variables[0].aggregation
        self._is_div = sizes == div_sizes(self._shape[0], len(sizes))
        for variable in variables:
            variable.whole = self

    # What it is -----------------------------------------------------------------------------------------------

    @property
    def variables(self) -> list[Variable]:
        """The shards, in order."""
        return list(self._variables)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole variable."""
        return self._shape

    @property
    def dtype(self) -> DType:
        """Dtype of the elements."""
        return self._dtype

    @property
    def trainable(self) -> bool:
        """Whether all shards are trainable."""
        return all(variable.trainable for variable in self._variables)

    def like(self, variables: Sequence[Variable], name: str) -> ShardedVariable:
        """See ``CompositeVariable``."""
        return ShardedVariable(variables, name)

    def local_place(self) -> Place:
        """See ``Assignable``."""
        return self._variables[0].local_place()

    # Reading --------------------------------------------------------------------------------------------------

    def as_array(self) -> Array:
        """See ``ReadsAsArray``."""
        return self._rows(range(self._shape[0]))

    def value(self) -> Array:
        """Return a copy of the value in the current context, on the first shard's device."""
        pieces = self._pieces(range(self._shape[0]))
        return copy_of(pieces[0]) if len(pieces) == 1 else self._joined(pieces)

    def numpy(self) -> Array:
        """Return a NumPy copy of the value."""
        return on_host(self.value())

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, key: object) -> Any:
        rows, rest = select_rows(key, self._shape)
        return picked(self._rows(rows), rest)

    def gather_nd(self, indices: object, name: str | None = None) -> Array:
        """Return the elements at ``indices``, whose last axis holds coordinates."""
        del name
        return copy_of(array_of(self[tuple(np.moveaxis(on_host(array_of(indices)), -1, 0))]))

    def sparse_read(self, indices: object, name: str | None = None) -> Array:
        """Return the rows at ``indices`` (an embedding lookup), in their order. Each is read once.

        Args:
            indices: Integers of any shape. Negative ones count from the end.
            name: Ignored, as in TensorFlow.

        Returns:
            An array of the shape of ``indices``, followed by the shape of a row.

        Raises:
            IndexError: A position is outside the variable.
            TypeError: The indices are not integers.
            NotImplementedError: The shards do not have the "div" layout.
        """
        del name
        self._require_div("sparse_read")
        positions = on_host(array_of(indices))
        if positions.size == 0 and positions.dtype.kind == "f":
            positions = positions.astype(np.intp)
        if positions.dtype.kind not in "iu":
            raise TypeError(f"indices have dtype {positions.dtype}; expected integers")
        rows, numbers = select_rows(positions, self._shape[:1])
        return array_of(picked(self._rows(rows), numbers))

    def _rows(self, rows: Rows) -> Array:
        """Return a read-only array of some rows."""
        array = self._joined(self._pieces(rows))
        if not is_device_array(array):  # CuPy's have no such flag
            array = array.view()
            array.flags.writeable = False
        return array

    def _pieces(self, rows: Rows) -> list[Array]:
        """Read ``rows`` from the shards that hold them. Read few other rows."""
        asked = [(v, part) for v, part in zip(self._variables, self._by_shard(rows), strict=True) if len(part)]
        # If most rows of a shard are needed, reading all of them is faster.
        wholly = [isinstance(part, range) and 2 * len(part) >= v.shape[0] for v, part in asked]
        some = [(v, np.asarray(part)) for (v, part), whole in zip(asked, wholly, strict=True) if not whole]
        whole_ones = iter(read_all([v for (v, _), whole in zip(asked, wholly, strict=True) if whole]))
        few_rows = iter(read_rows([v for v, _ in some], [part for _, part in some]))
        return [
            next(whole_ones)[_slice_of(part)] if whole else next(few_rows)
            for (_, part), whole in zip(asked, wholly, strict=True)
        ]

    def _by_shard(self, rows: Rows) -> list[Rows]:
        """Return the ``rows`` of each shard, relative to its first one."""
        parts: list[Rows] = []
        for start, stop in pairwise(self._offsets):
            part = rows[bisect_left(rows, start) : bisect_left(rows, stop)]
            moved = range(part.start - start, part.stop - start, part.step) if isinstance(part, range) else part - start
            parts.append(moved)
        return parts

    def _joined(self, pieces: list[Array]) -> Array:
        """Concatenate pieces. Return a single piece itself."""
        if not pieces:
            place = self.local_place()
            return place.ops.zeros((0, *self._shape[1:]), self._dtype, place.number)
        if len(pieces) == 1:
            return pieces[0]
        place = place_of(pieces[0])
        with place.current():
            return array_of(np.concatenate([place.brings(piece) for piece in pieces]))

    # Writing --------------------------------------------------------------------------------------------------

    def cut(self, value: Any) -> list[Any]:
        """Split an array, IndexedSlices, or a distributed value by shard."""
        if isinstance(value, ReplicaValues):
            shares = zip(*(self.cut(part) for part in value.values), strict=True)
            return [type(value)(parts, value.replica_ids) for parts in shares]
        if not isinstance(value, IndexedSlices):
            if value.ndim == 0 or len(value) != self._shape[0]:
                raise ValueError(
                    f"an array of shape {value.shape} was to be cut for {len(self._variables)} shards of "
                    f"{self._shape[0]} rows together; expected the shape ({self._shape[0]}, ...)"
                )
            return [value[start:stop] for start, stop in pairwise(self._offsets)]
        check_indices(value.indices, self._shape[0])
        return [_rows_between(value, start, stop) for start, stop in pairwise(self._offsets)]

    def assign_by(self, how: Assignment, value: object) -> ShardedVariable:
        """See ``Assignable``."""
        with self._sharing_errors(f"assigning to variable {self.name!r}"):
            parts = self.cut(self._checked(value))
        for variable, part in zip(self._variables, parts, strict=True):
            variable.assign_by(how, part)
        return self

    def _checked(self, value: object) -> object:
        if isinstance(value, ReplicaValues):
            return type(value)([as_value_of(self, part) for part in value.values], value.replica_ids)
        return as_value_of(self, value)

    def scatter_by(self, how: scatter.ScatterOp, slices: object) -> ShardedVariable:
        """See ``Assignable``."""
        self._require_div(how.name)
        with self._sharing_errors(f"{how.name} of variable {self.name!r}"):
            parts = self.cut(scatter.check_slices(slices, self))
        # Replicas that scatter together must all call the same shards.
        takes_all = self._is_in_run() and self.distribute_strategy.num_replicas_in_sync > 1
        for variable, part in zip(self._variables, parts, strict=True):
            if takes_all or len(part.indices):
                variable.scatter_by(how, part)
        return self

    @contextmanager
    def _sharing_errors(self, doing: str) -> Iterator[None]:
        """Raise an error of this rank on all ranks that write the first shard together."""
        if not self._is_in_run():
            with self._variables[0].values[0].shared_errors(doing):
                yield
            return
        try:
            yield
        except (TypeError, ValueError) as error:
            self.distribute_strategy.extended.announce(error, doing)
            raise

    def _is_in_run(self) -> bool:
        frame = current_frame()
        return frame.replica_context is not None and frame.strategy is self.distribute_strategy

    def _require_div(self, method: str) -> None:
        if not self._is_div:
            sizes = [variable.shape[0] for variable in self._variables]
            raise NotImplementedError(
                f"{method} on variable {self.name!r}, whose shards have {sizes} rows; expected the rows to be dealt "
                f"evenly, larger shards first: {div_sizes(self._shape[0], len(sizes))}"
            )

    def __reduce__(self) -> tuple[object, ...]:
        # The constructor sets `whole` of the shards, also of a deep copy and on other ranks.
        return ShardedVariable, (self._variables, self.name)

    def __repr__(self) -> str:
        return f"<ShardedVariable {self.name!r} shape={self.shape} dtype={self.dtype} in {len(self._variables)} shards>"


def _check_shards(variables: object) -> None:
    if not isinstance(variables, (list, tuple)) or not variables or not all(isinstance(v, Variable) for v in variables):
        raise TypeError(f"variables is {variables!r}; expected a list of one or more mpidist.Variable, the shards")
    first = variables[0]
    for variable in variables:
        if variable.ndim == 0:
            raise ValueError(f"variable {variable.name!r} is a number, without rows; expected shapes (rows, ...)")
        if (variable.dtype, variable.shape[1:]) != (first.dtype, first.shape[1:]):
            raise ValueError(
                f"variable {variable.name!r} has dtype {variable.dtype} and rows of shape {variable.shape[1:]}, and "
                f"variable {first.name!r} dtype {first.dtype} and rows of shape {first.shape[1:]}; expected shards "
                "that differ in their number of rows only"
            )
        if variable.distribute_strategy is not first.distribute_strategy:
            raise ValueError("the variables belong to different strategies; expected shards of one strategy")
        if variable.synchronization == VariableSynchronization.ON_READ:
            raise ValueError(f"variable {variable.name!r} is synchronized ON_READ; expected shards that are ON_WRITE")


def _slice_of(rows: Rows) -> slice:
    assert isinstance(rows, range)
    return slice(rows.start, rows.stop, rows.step)


def _rows_between(slices: IndexedSlices, start: int, stop: int) -> IndexedSlices:
    """Return the rows of ``slices`` at positions from ``start`` to below ``stop``."""
    shape = None if slices.dense_shape is None else (stop - start, *slices.dense_shape[1:])
    place = place_of(slices.values)
    with place.current():
        mine = np.flatnonzero((slices.indices >= start) & (slices.indices < stop))
        return IndexedSlices(slices.values[mine], slices.indices[mine] - start, shape)
