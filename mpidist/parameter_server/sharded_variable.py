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

# Rows in rising order, each once.
Rows = range | Array
_DEFAULT_NAME = "ShardedVariable"


def div_sizes(rows: int, shards: int) -> list[int]:
    """Return the rows of each of ``shards`` shards, of ``rows`` in all.

    Sizes differ by at most one, larger ones first ("div").

    Raises:
        ValueError: Fewer than no rows, or no shard.

    >>> div_sizes(13, 5)
    [3, 3, 3, 2, 2]
    """
    if rows < 0 or shards < 1:
        raise ValueError(f"{rows} rows were to be dealt to {shards} shards; expected rows >= 0 and shards >= 1")
    quotient, larger = divmod(rows, shards)
    return [quotient + 1] * larger + [quotient] * (shards - larger)


def offsets_of(sizes: Sequence[int]) -> list[int]:
    """Return the first row of each shard, and behind them the number of all rows.

    >>> offsets_of(div_sizes(10, 4))
    [0, 3, 6, 8, 10]
    """
    return [0, *accumulate(sizes)]


def cut(array: Array, variables: Sequence[Variable]) -> list[Array]:
    """Return the rows of ``array`` that belong to each of ``variables``: views, where it lies.

    Args:
        array: Of shape (rows, ...), with as many rows as the variables have together.
        variables: Of shapes (rows of the shard, ...).

    Raises:
        ValueError: Another number of rows.

    >>> [part.tolist() for part in cut(np.arange(5), [Variable([0, 0, 0]), Variable([0, 0])])]
    [[0, 1, 2], [3, 4]]
    """
    offsets = offsets_of([variable.shape[0] for variable in variables])
    if array.ndim == 0 or array.shape[0] != offsets[-1]:
        raise ValueError(
            f"an array of shape {array.shape} was to be cut for {len(variables)} variables of {offsets[-1]} rows "
            f"together; expected the shape ({offsets[-1]}, ...)"
        )
    return [array[start:stop] for start, stop in pairwise(offsets)]


def select_rows(key: object, shape: tuple[int, ...]) -> tuple[Rows, tuple[object, ...]]:
    """Return the rows that ``array[key]`` needs, and the key for these rows alone.

    Args:
        key: Whatever NumPy takes as an index.
        shape: Of the array; at least one axis.

    Raises:
        IndexError: NumPy's, for a key that does not fit the shape.

    >>> rows, rest = select_rows([5, 2, 5], (10, 3))
    >>> array = np.arange(30).reshape(10, 3)
    >>> rows, np.array_equal(array[rows][rest], array[[5, 2, 5]])
    (array([2, 5]), True)
    """
    items = [_plain(item) for item in (key if isinstance(key, tuple) else (key,))]
    # An array of this shape without memory: NumPy's own errors, before anything is read.
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
    """Return one item of a key in plain form.

    That is a slice, None, Ellipsis, bool, int, or NumPy array of at least one axis.
    """
    if item is None or item is Ellipsis or isinstance(item, (slice, bool, int)):
        return item
    array = on_host(array_of(as_operand(item)))
    if array.size == 0 and isinstance(item, (list, tuple)):
        array = array.astype(np.intp)
    return array.item() if array.ndim == 0 and array.dtype.kind in "biu" else array


def _axes(item: object) -> int:
    """Return how many axes of the array an item of a key speaks of."""
    if isinstance(item, np.ndarray):
        return item.ndim if item.dtype.kind == "b" else 1
    return 0 if item is None or item is Ellipsis or isinstance(item, bool) else 1


def _taken(item: int | slice | Array, count: int) -> tuple[Rows, tuple[object, ...]]:
    """Return an item's rows, of ``count``, and its replacement for these rows alone."""
    if isinstance(item, int):
        row = range(count)[item]
        return range(row, row + 1), (0,)
    if isinstance(item, slice):
        rows = range(*item.indices(count))
        return (rows, (slice(None),)) if rows.step > 0 else (rows[::-1], (slice(None, None, -1),))
    # A mask stands for the positions of what is true in it, of which the first are rows.
    first, *others = item.nonzero() if item.dtype.kind == "b" else (item,)
    positions = first.astype(np.intp, copy=False)
    taken, numbers = np.unique(np.where(positions < 0, positions + count, positions), return_inverse=True)
    return taken, (numbers.reshape(positions.shape), *others)


class ShardedVariable(CompositeVariable):
    """Variables that hold consecutive rows of one value, seen as one variable.

    A partitioner makes them of a variable. It reads as the rows of all its shards. An index, ``sparse_read`` and the
    scatter methods touch only the shards they are about, and of a shard, where few rows are asked for, only these.
    Reading and writing are as for each shard, collective or not; where writing in replica context is, every shard takes
    part.

    Optimizers take it in the place of a variable and change each shard by its part of the gradient, dense or sparse. A
    checkpoint holds it as one array, and so an optimizer's slots of it: it is restored to any number of shards, or to a
    Variable.

    Args:
        variables: The shards in order: variables of one strategy, of shapes (rows of the shard, ...), synchronized
            ON_WRITE.
        name: For messages.

    Raises:
        TypeError: ``variables`` is no list or tuple, is empty, or holds something else.
        ValueError: Shards that differ in dtype, in the shape of their rows, or in their strategy; numbers.

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
        """Shape of the whole."""
        return self._shape

    @property
    def dtype(self) -> DType:
        """Dtype of the elements."""
        return self._dtype

    @property
    def trainable(self) -> bool:
        """Whether optimizers should change it: whether all its shards say so."""
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
        """Return the value as a NumPy array of the caller's own."""
        return on_host(self.value())

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, key: object) -> Any:
        rows, rest = select_rows(key, self._shape)
        return picked(self._rows(rows), rest)

    def gather_nd(self, indices: object, name: str | None = None) -> Array:
        """Return the elements at multi-dimensional ``indices``, whose last axis holds the coordinates."""
        del name
        return copy_of(array_of(self[tuple(np.moveaxis(on_host(array_of(indices)), -1, 0))]))

    def sparse_read(self, indices: object, name: str | None = None) -> Array:
        """Return the rows at ``indices`` (an embedding lookup), in their order; each is fetched once.

        Args:
            indices: Integers, of any shape; negative ones count from the end.
            name: Accepted as in TensorFlow, and ignored.

        Returns:
            Of the shape of ``indices`` and, behind it, of a row.

        Raises:
            IndexError: A position outside the variable.
            TypeError: Not integers.
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
        """Return rows of the whole, not to be written, from the shards that hold them."""
        array = self._joined(self._pieces(rows))
        if not is_device_array(array):  # CuPy's have no such flag
            array = array.view()
            array.flags.writeable = False
        return array

    def _pieces(self, rows: Rows) -> list[Array]:
        """Return each shard's part of ``rows``, where there is one. Nothing else is read, or little."""
        asked = [(v, part) for v, part in zip(self._variables, self._dealt(rows), strict=True) if len(part)]
        # Positions cost more than they spare where most rows of a shard are wanted.
        wholly = [isinstance(part, range) and 2 * len(part) >= v.shape[0] for v, part in asked]
        some = [(v, np.asarray(part)) for (v, part), whole in zip(asked, wholly, strict=True) if not whole]
        whole_ones = iter(read_all([v for (v, _), whole in zip(asked, wholly, strict=True) if whole]))
        few_rows = iter(read_rows([v for v, _ in some], [part for _, part in some]))
        return [
            next(whole_ones)[_slice_of(part)] if whole else next(few_rows)
            for (_, part), whole in zip(asked, wholly, strict=True)
        ]

    def _dealt(self, rows: Rows) -> list[Rows]:
        """Return for each shard which of ``rows`` are its own, counted from its first."""
        parts: list[Rows] = []
        for start, stop in pairwise(self._offsets):
            part = rows[bisect_left(rows, start) : bisect_left(rows, stop)]
            moved = range(part.start - start, part.stop - start, part.step) if isinstance(part, range) else part - start
            parts.append(moved)
        return parts

    def _joined(self, pieces: list[Array]) -> Array:
        """Return pieces one behind the other; a lone one itself."""
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
        """Return the shards' shares of an array, IndexedSlices, or a distributed value.

        Raises:
            ValueError: Another number of rows, or a position outside the variable.
        """
        if isinstance(value, ReplicaValues):
            shares = zip(*(self.cut(part) for part in value.values), strict=True)
            return [type(value)(parts, value.replica_ids) for parts in shares]
        if not isinstance(value, IndexedSlices):
            return cut(value, self._variables)
        check_indices(value.indices, self._shape[0])
        return [_rows_between(value, start, stop) for start, stop in pairwise(self._offsets)]

    def assign_by(self, how: Assignment, value: object) -> ShardedVariable:
        """See ``Assignable``."""
        with self._telling_others(f"assigning to variable {self.name!r}"):
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
        with self._telling_others(f"{how.name} of variable {self.name!r}"):
            parts = self.cut(scatter.check_slices(slices, self))
        # Replicas that scatter together must all name the same shards.
        takes_all = self._is_in_run() and self.distribute_strategy.num_replicas_in_sync > 1
        for variable, part in zip(self._variables, parts, strict=True):
            if takes_all or len(part.indices):
                variable.scatter_by(how, part)
        return self

    @contextmanager
    def _telling_others(self, doing: str) -> Iterator[None]:
        """Tell ranks that write the first shard together why this one does not."""
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
        # By its constructor, which tells the shards of it: a deep copy too, and where variables travel by name.
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
    """Return the rows of ``slices`` at positions from ``start`` to below ``stop``, in their order."""
    shape = None if slices.dense_shape is None else (stop - start, *slices.dense_shape[1:])
    place = place_of(slices.values)
    with place.current():
        mine = np.flatnonzero((slices.indices >= start) & (slices.indices < stop))
        return IndexedSlices(slices.values[mine], slices.indices[mine] - start, shape)
