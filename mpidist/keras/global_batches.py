"""The rows of each global batch that a rank computes with."""

from __future__ import annotations

import logging
import math
import multiprocessing
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import keras
import numpy as np

from mpidist.arrays.convert import to_array
from mpidist.input import Dataset, DistributedDataset
from mpidist.input.dataset import graph_and_options
from mpidist.input.nodes import array_samples
from mpidist.keras.rank_sums import RankSums
from mpidist.keras.shares import own_rows, rank_parts, row_order
from mpidist.strategies import Strategy

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from mpidist.arrays.dtypes import Array

_log = logging.getLogger("mpidist")

_ROWS_OF_ITS_OWN = (
    "if each rank has rows of its own, pass mpidist.keras.sharded(x), or a dataset of "
    "strategy.distribute_datasets_from_function()"
)
_KINDS = (
    "expected arrays, a keras.utils.PyDataset, a torch.utils.data.DataLoader or an mpidist.Dataset, which give the "
    "same global batches on all ranks; a generator goes into the __getitem__ of a PyDataset"
)


class Sharded:
    """Sharded data: each rank holds different rows. Made by :func:`sharded`."""

    def __init__(self, data: object) -> None:
        self.data = data


def sharded(x: object) -> Sharded:
    """Declare that each rank passes rows of its own to ``fit`` or ``evaluate`` (local).

    Without this declaration all ranks must pass the same data, and each rank uses its share. Ranks may have different
    numbers of rows.

    Args:
        x: The argument ``x`` of ``fit``: arrays, or an ``mpidist.Dataset`` or a DataLoader in batches of one replica.
            With arrays, pass the rows of this rank as ``y`` and ``sample_weight`` as well. ``batch_size`` counts
            the rows of all replicas.

    Returns:
        A value for ``x``.

    Raises:
        TypeError: ``x`` is None.

    >>> import mpidist
    >>> with mpidist.OneDeviceStrategy("cpu:0").scope():
    ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> history = model.fit(sharded(np.ones((4, 2))), np.ones((4, 1)), batch_size=2, verbose=0)
    """
    if x is None:
        raise TypeError("x is None. Pass the arrays or the mpidist.Dataset of this rank.")
    return Sharded(x)


class GlobalBatches(keras.utils.PyDataset):
    """This rank's part of each global batch. Subclasses read the batches.

    ``seed`` and the number of the epoch give the order of rows or batches, None keeps it. With ``fills``, a part
    without rows gets another rank's row, for models that need one.
    """

    # Whether a stream that ends starts again: only in fit(), because an evaluation would count rows twice.
    starts_again = False

    def __init__(self, strategy: Strategy, count: int | None, seed: int | None, fills: bool) -> None:
        super().__init__()
        self.strategy, self.sums, self.fills = strategy, RankSums(strategy), fills
        self.epoch = 0
        self._count, self._seed = count, seed
        self._sizes: list[int] = []
        self._order: Array | None = None

    @property
    def num_batches(self) -> int | None:
        """The number of global batches; None if unknown."""
        return self._count

    def text(self) -> str:
        """Return the text that ranks compare."""
        raise NotImplementedError

    def share(self, index: int, rows: int) -> slice:
        """Return this rank's rows of batch number ``index``, and record its size."""
        del self._sizes[index:]
        self._sizes.append(rows)
        start, stop = rank_parts(rows, self.sums.replica_counts)[self.sums.rank]
        return slice(0, 1) if self.fills and start == stop else slice(start, stop)

    def order(self, index: int, length: int) -> Array | None:
        """Return the order of the pass, which batch 0 starts."""
        if index == 0 or self._order is None:
            seed = self._seed
            self._order = None if seed is None else np.random.default_rng((seed, self.epoch)).permutation(length)
        return self._order

    def cut(self, index: int, batch: object) -> object:
        """Return this rank's rows of a global batch, the same on all ranks."""
        if index == 0:
            self.strategy.extended.agree_on(
                lambda: f"a first global batch with the checksum {_checksum(batch):08x}; {_ROWS_OF_ITS_OWN}"
            )
        return _rows(batch, self.share(index, rows_of(batch)))

    def predictions(self, outputs: object) -> object:
        """Return the outputs of all ranks in the order of rows, given this rank's (collective)."""
        counts = self.sums.replica_counts
        own = _rows(outputs, own_rows(self._sizes, counts, self.sums.rank))
        return _rows(self.sums.concatenate(own), row_order(self._sizes, counts))


class ArrayBatches(GlobalBatches):
    """Parts of batches of arrays. Reads only this rank's rows."""

    def __init__(self, strategy: Strategy, arrays: object, batch_size: int, seed: int | None, fills: bool) -> None:
        self._arrays, self._batch_size, self._rows = arrays, batch_size, rows_of(arrays)
        super().__init__(strategy, math.ceil(self._rows / batch_size), seed, fills)

    def text(self) -> str:
        """See the base class."""
        first = _checksum(_rows(self._arrays, slice(self._batch_size)))
        rows = f"{self._rows} rows in batches of {self._batch_size}"
        return f"{rows}, the first with the checksum {first:08x} ({_ROWS_OF_ITS_OWN})"

    def __getitem__(self, index: int) -> object:
        order, first = self.order(index, self._rows), index * self._batch_size
        share = self.share(index, min(self._batch_size, self._rows - first))
        rows = slice(first + share.start, first + share.stop)
        return _rows(self._arrays, rows if order is None else order[rows])


class PyDatasetBatches(GlobalBatches):
    """Parts of the batches of a PyDataset, which every rank reads."""

    def __init__(
        self, strategy: Strategy, dataset: keras.utils.PyDataset, seed: int | None = None, fills: bool = False
    ) -> None:
        self._dataset = dataset
        super().__init__(strategy, dataset.num_batches, seed, fills)
        if dataset.workers > 1 and self.sums.rank == 0:
            _log.warning("mpidist: workers=%d of %r are not used: ranks read side by side", dataset.workers, dataset)

    @property
    def num_batches(self) -> int | None:
        """The number of global batches, which may change."""
        count: int | None = self._dataset.num_batches
        return count

    def text(self) -> str:
        """See the base class."""
        return f"{self.num_batches} batches of a {type(self._dataset).__name__}"

    def __getitem__(self, index: int) -> object:
        order = None if self.num_batches is None else self.order(index, self.num_batches)
        return self.cut(index, _as_tuple(self._dataset[index if order is None else int(order[index])]))

    def on_epoch_begin(self) -> None:
        """See Keras."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """See Keras."""
        self._dataset.on_epoch_end()


class StreamBatches(GlobalBatches):
    """Parts of batches that are read in order. ``part`` returns this rank's part of batch number i."""

    def __init__(
        self,
        strategy: Strategy,
        source: Iterable[object],
        part: Callable[[int, object], object] | None = None,
        fills: bool = False,
        contents: str = "",
    ) -> None:
        try:
            count = len(source)  # type: ignore[arg-type]
        except TypeError:
            count = None
        super().__init__(strategy, count, None, fills)
        self._source, self._part, self._contents = source, part or self.cut, contents
        self._iterator: Iterator[object] | None = None

    def text(self) -> str:
        """See the base class."""
        return f"{self.num_batches} batches of a {type(self._source).__name__}{self._contents}"

    def __getitem__(self, index: int) -> object:
        if index == 0 or self._iterator is None:
            self._iterator = iter(self._source)
        batch = next(self._iterator, None)
        if batch is None and self.starts_again and index > 0:
            self._iterator = iter(self._source)
            batch = next(self._iterator, None)
        if batch is None:
            raise ValueError(f"{self._source!r} ended after {index} batches; expected at least one for each step")
        return keras.tree.map_structure(_as_floatx, self._part(index, _as_tuple(batch)))


def global_batches(
    strategy: Strategy,
    x: object,
    y: object = None,
    sample_weight: object = None,
    batch_size: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    fills: bool = False,
) -> GlobalBatches:
    """Return the batches of the arguments of ``fit``, ``evaluate`` or ``predict``."""
    if isinstance(x, Sharded):
        if fills:
            raise TypeError("predict() of sharded(x) has no order of rows. Pass the rows of all ranks on every rank.")
        x, y, sample_weight, batch_size = _of_shards(strategy, x.data, y, sample_weight, batch_size, seed)
    if isinstance(x, (Dataset, DistributedDataset, keras.utils.PyDataset)) or _is_data_loader(x):
        given = {"y": y, "sample_weight": sample_weight, "batch_size": batch_size}
        named = [name for name, value in given.items() if value is not None]
        if named:
            raise ValueError(f"{', '.join(named)} beside a {type(x).__name__}, which gives batches of its own")
        batches = _batches_of(strategy, x, seed, fills)
        if isinstance(batches, StreamBatches) and batches.num_batches is None and not steps:
            raise ValueError(
                f"The number of batches of {x!r} is unknown; expected steps_per_epoch=... in fit(), which needs no "
                ".repeat(), validation_steps=... for validation_data, and steps=... in evaluate() and predict()."
            )
        return batches
    if y is None and sample_weight is not None:
        raise ValueError("sample_weight was given without y")
    arrays = _as_arrays(x, y, sample_weight)
    leaves = [leaf for leaf in keras.tree.flatten(arrays) if leaf is not None]
    if not leaves or any(not getattr(leaf, "shape", ()) for leaf in leaves):
        raise TypeError(f"x is a {type(x).__name__}; {_KINDS}")
    if len({len(leaf) for leaf in leaves}) > 1:
        raise ValueError(f"arrays of {[len(leaf) for leaf in leaves]} rows; expected equally many in all")
    size = batch_size or (math.ceil(len(leaves[0]) / steps) if steps else 32)
    return ArrayBatches(strategy, arrays, size, seed, fills)


def _of_shards(
    strategy: Strategy, data: object, y: object, sample_weight: object, batch_size: int | None, seed: int | None
) -> tuple[object, object, object, int | None]:
    """Return the arguments of ``global_batches`` for sharded data."""
    if isinstance(data, Dataset) or _is_data_loader(data):
        return strategy.distribute_datasets_from_function(lambda _: data), y, sample_weight, batch_size
    arrays = _as_arrays(data, y, sample_weight)
    rows = Dataset.from_tensor_slices(arrays)
    if seed is not None:
        rows = rows.shuffle(rows_of(arrays), seed=seed)
    dataset = strategy.distribute_datasets_from_function(
        lambda context: rows.batch(context.get_per_replica_batch_size(batch_size or 32))
    )
    return dataset, None, None, None


def _batches_of(strategy: Strategy, x: object, seed: int | None, fills: bool) -> GlobalBatches:
    if isinstance(x, keras.utils.PyDataset):
        return PyDatasetBatches(strategy, x, seed, fills)
    if _is_data_loader(x):
        _require_no_fork(x)
    if _is_data_loader(x) or (fills and isinstance(x, Dataset)):
        return StreamBatches(strategy, x, fills=fills)
    if fills:
        raise TypeError(f"predict() of {x!r}, because no order is known of its rows. Pass the mpidist.Dataset itself.")
    contents, source = "", cast("Iterable[object]", x)
    if isinstance(x, Dataset):
        samples = zlib.crc32(str([*array_samples(graph_and_options(x)[0])]).encode())
        contents = f" of arrays with the checksum {samples:08x} ({_ROWS_OF_ITS_OWN})"
        source = strategy.experimental_distribute_dataset(x)

    def part(_: int, batch: object) -> object:
        replicas = strategy.experimental_local_results(batch)
        return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *replicas)

    return StreamBatches(strategy, source, part, contents=contents)


def split(arrays: tuple[object, ...], share: float) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Return the first rows of arrays, and a share of them at their end."""
    if isinstance(arrays[0], Sharded):
        (x, *others), (tested, *others_tested) = split((arrays[0].data, *arrays[1:]), share)
        return (Sharded(x), *others), (Sharded(tested), *others_tested)
    arrays = tuple(keras.tree.map_structure(_as_floatx, arrays))
    at = math.floor(rows_of(arrays) * (1 - share))
    return tuple(_rows(arrays, slice(at))), tuple(_rows(arrays, slice(at, None)))


def rows_of(batch: object) -> int:
    """Return how many rows a batch has."""
    return int(next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None).shape[0])


def _rows(nest: object, picked: slice | Array) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[picked], nest)


def _as_tuple(batch: object) -> tuple[object, ...]:
    return tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)


def _as_arrays(*values: object) -> tuple[object, ...]:
    return tuple(keras.tree.map_structure(_as_floatx, value) for value in values if value is not None)


def _as_floatx(value: object) -> object:
    if value is None or not hasattr(value, "__array__"):
        return value
    array = to_array(value)
    is_real = array.dtype.kind == "f" and array.dtype != keras.config.floatx()
    return array.astype(keras.config.floatx()) if is_real else array


def _is_data_loader(value: object) -> TypeGuard[DataLoader[object]]:
    return any(kind.__module__ == "torch.utils.data.dataloader" for kind in type(value).__mro__)


def _require_no_fork(loader: DataLoader[object]) -> None:
    """Raise ValueError if a DataLoader forks this process for its workers."""
    context = loader.multiprocessing_context
    # If the program has set no start method, multiprocessing uses the first one.
    method = (context or multiprocessing).get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[
        0
    ]
    if loader.num_workers and method == "fork":
        raise ValueError(
            f"the DataLoader has num_workers={loader.num_workers}, which it forks, and a process in which MPI runs "
            "must not be forked; expected num_workers=0, or multiprocessing_context='forkserver' or 'spawn'"
        )


def _checksum(batch: object) -> int:
    code = 0
    for leaf in keras.tree.flatten(batch):
        if leaf is not None:
            code = zlib.crc32(np.ascontiguousarray(to_array(leaf)).view(np.uint8).data, code)
    return code
