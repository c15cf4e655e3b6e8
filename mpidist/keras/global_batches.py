"""The rows of each global batch that a rank computes with."""

from __future__ import annotations

import logging
import math
import multiprocessing
import zlib
from collections.abc import Callable, Iterable, Iterator

import keras
import numpy as np

from mpidist.arrays.convert import to_array
from mpidist.input import Dataset, DistributedDataset
from mpidist.input.dataset import graph_and_options
from mpidist.input.nodes import array_samples
from mpidist.keras.rank_sums import RankSums
from mpidist.keras.shares import own_rows, rank_parts, row_order
from mpidist.keras.untyped import KerasObject, Tensors
from mpidist.strategies import Strategy

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

    def __init__(self, data: Tensors) -> None:
        self.data = data


def sharded(x: Tensors) -> Sharded:
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
    """This rank's part of each global batch.

    Args:
        strategy: The strategy that the batches are cut for.
        seed: Of the order of rows or batches, with the number of the epoch; None for the order in which they come.
        fills: Whether a part without rows gets one of another rank, for models that cannot do without any.
    """

    def __init__(self, strategy: Strategy, seed: int | None = None, fills: bool = False) -> None:
        super().__init__()
        self.strategy = strategy
        self.sums = RankSums(strategy)
        self.seed = seed
        self.fills = fills
        self.epoch = 0
        self.sizes: list[int] = []
        # Whether a stream that ends begins again: in fit() alone, as an evaluation would count rows twice.
        self.begins_again = False
        self._order: Tensors = None

    @property
    def text(self) -> str:
        """The text that ranks compare."""
        raise NotImplementedError

    def share(self, index: int, rows: int) -> tuple[int, int]:
        """Return this rank's rows of batch number ``index``, and take its size down."""
        del self.sizes[index:]
        self.sizes.append(rows)
        start, stop = rank_parts(rows, self.sums.replica_counts)[self.sums.rank]
        return (0, 1) if self.fills and start == stop else (start, stop)

    def order(self, index: int, length: int) -> Tensors:
        """Return the order of the pass, which batch 0 begins."""
        if index == 0 or self._order is None:
            seed = self.seed
            self._order = None if seed is None else np.random.default_rng((seed, self.epoch)).permutation(length)
        return self._order

    def cut(self, index: int, batch: Tensors) -> Tensors:
        """Return this rank's rows of a global batch, the same on all ranks."""
        if index == 0:
            self.strategy.extended.agree_on(
                lambda: f"a first global batch with the checksum {_checksum(batch):08x}; {_ROWS_OF_ITS_OWN}"
            )
        start, stop = self.share(index, rows_of(batch))
        return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[start:stop], batch)

    def without_fillers(self, outputs: Tensors) -> Tensors:
        """Return the outputs of this rank's own rows."""
        kept = own_rows(self.sizes, self.sums.replica_counts, self.sums.rank)
        return keras.tree.map_structure(lambda output: output[kept], outputs)

    def in_order(self, outputs: Tensors) -> Tensors:
        """Return outputs of all ranks, one after the other, in the order of rows."""
        order = row_order(self.sizes, self.sums.replica_counts)
        return keras.tree.map_structure(lambda output: output[order], outputs)


class ArrayBatches(GlobalBatches):
    """Parts of batches of arrays; no more rows are read than this rank's."""

    def __init__(
        self, strategy: Strategy, arrays: Tensors, batch_size: int, seed: int | None = None, fills: bool = False
    ) -> None:
        super().__init__(strategy, seed, fills)
        self._arrays = arrays
        self._batch_size = batch_size
        self._rows = rows_of(arrays)

    @property
    def num_batches(self) -> int:
        """The number of global batches."""
        return math.ceil(self._rows / self._batch_size)

    @property
    def text(self) -> str:
        """See the base class."""
        first = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[: self._batch_size], self._arrays)
        rows = f"{self._rows} rows in batches of {self._batch_size}"
        return f"{rows}, the first with the checksum {_checksum(first):08x} ({_ROWS_OF_ITS_OWN})"

    def __getitem__(self, index: int) -> Tensors:
        order, first = self.order(index, self._rows), index * self._batch_size
        start, stop = self.share(index, min(self._batch_size, self._rows - first))
        rows = slice(first + start, first + stop)
        picked = rows if order is None else order[rows]
        return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[picked], self._arrays)


class PyDatasetBatches(GlobalBatches):
    """Parts of the batches of a PyDataset, which every rank asks for."""

    def __init__(self, strategy: Strategy, dataset: KerasObject, seed: int | None = None, fills: bool = False) -> None:
        super().__init__(strategy, seed, fills)
        self._dataset = dataset
        if dataset.workers > 1 and self.sums.rank == 0:
            _log.warning("mpidist: workers=%d of %r are not used: ranks read side by side", dataset.workers, dataset)

    @property
    def num_batches(self) -> int | None:
        """The number of global batches."""
        count: int | None = self._dataset.num_batches
        return count

    @property
    def text(self) -> str:
        """See the base class."""
        return f"{self.num_batches} batches of a {type(self._dataset).__name__}"

    def __getitem__(self, index: int) -> Tensors:
        order = None if self.num_batches is None else self.order(index, self.num_batches)
        batch = self._dataset[index if order is None else int(order[index])]
        return self.cut(index, tuple(batch) if isinstance(batch, (list, tuple)) else (batch,))

    def on_epoch_begin(self) -> None:
        """See Keras."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """See Keras."""
        self._dataset.on_epoch_end()


class StreamBatches(GlobalBatches):
    """Parts of batches that come one after the other.

    Args:
        strategy: The strategy that the batches are cut for.
        source: Begins anew each time it is iterated over.
        part: Makes this rank's part of batch number i; by default it is cut.
        fills: See the base class.
        contents: The text of the data that ranks compare, if it is known before the first batch.
    """

    def __init__(
        self,
        strategy: Strategy,
        source: Iterable[Tensors],
        part: Callable[[int, Tensors], Tensors] | None = None,
        fills: bool = False,
        contents: str = "",
    ) -> None:
        super().__init__(strategy, None, fills)
        self._contents = contents
        self._source = source
        self._part = part or self.cut
        self._iterator: Iterator[Tensors] | None = None

    @property
    def num_batches(self) -> int | None:
        """The number of global batches; None where nobody knows."""
        try:
            return len(self._source)  # type: ignore[arg-type]
        except TypeError:
            return None

    @property
    def text(self) -> str:
        """See the base class."""
        return f"{self.num_batches} batches of a {type(self._source).__name__}{self._contents}"

    def __getitem__(self, index: int) -> Tensors:
        if index == 0 or self._iterator is None:
            self._iterator = iter(self._source)
        batch = next(self._iterator, None)
        if batch is None and self.begins_again and index > 0:
            self._iterator = iter(self._source)
            batch = next(self._iterator, None)
        if batch is None:
            raise ValueError(f"{self._source!r} ended after {index} batches; expected at least one for each step")
        batch = tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
        return keras.tree.map_structure(_as_floatx, self._part(index, batch))


def global_batches(
    strategy: Strategy,
    x: Tensors,
    y: Tensors = None,
    sample_weight: Tensors = None,
    batch_size: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    fills: bool = False,
) -> GlobalBatches:
    """Return the batches of the arguments of ``fit``, ``evaluate`` or ``predict``.

    Args:
        strategy: The strategy that they are cut for.
        x, y, sample_weight, batch_size, steps: Those of Keras.
        seed, fills: Those of :class:`GlobalBatches`.

    Raises:
        TypeError: ``x`` is something else than these take.
        ValueError: Arrays with unequal numbers of rows; ``y``, ``sample_weight`` or ``batch_size`` beside a dataset; a
            DataLoader that forks; a dataset of unknown length without ``steps``.
    """
    if isinstance(x, Sharded):
        if fills:
            raise TypeError("predict() of sharded(x) has no order of rows. Pass the rows of all ranks on every rank.")
        x, y, sample_weight, batch_size = _of_shards(strategy, x.data, y, sample_weight, batch_size, seed)
    given = {"y": y, "sample_weight": sample_weight, "batch_size": batch_size}
    if isinstance(x, (Dataset, DistributedDataset, keras.utils.PyDataset)) or _is_data_loader(x):
        named = [name for name, value in given.items() if value is not None]
        if named:
            raise ValueError(f"{', '.join(named)} beside a {type(x).__name__}, which gives batches of its own")
        batches = _batches_of(strategy, x, seed, fills)
        if isinstance(batches, StreamBatches) and batches.num_batches is None and not steps:
            raise ValueError(
                f"nobody knows of how many batches {x!r} is; expected steps_per_epoch=... in fit(), which needs no "
                ".repeat(), validation_steps=... for validation_data, and steps=... in evaluate() and predict()"
            )
        return batches
    arrays = tuple(keras.tree.map_structure(_as_floatx, value) for value in (x, y, sample_weight) if value is not None)
    if y is None and sample_weight is not None:
        raise ValueError("sample_weight was given without y")
    leaves = [leaf for leaf in keras.tree.flatten(arrays) if leaf is not None]
    if not leaves or any(not getattr(leaf, "shape", ()) for leaf in leaves):
        raise TypeError(f"x is a {type(x).__name__}; {_KINDS}")
    if len({len(leaf) for leaf in leaves}) > 1:
        raise ValueError(f"arrays of {[len(leaf) for leaf in leaves]} rows; expected equally many in all")
    size = batch_size or (math.ceil(len(leaves[0]) / steps) if steps else 32)
    return ArrayBatches(strategy, arrays, size, seed, fills)


def _of_shards(
    strategy: Strategy,
    data: Tensors,
    y: Tensors,
    sample_weight: Tensors,
    batch_size: int | None,
    seed: int | None,
) -> tuple[Tensors, Tensors, Tensors, int | None]:
    """Return the arguments of ``global_batches`` for sharded data."""
    if isinstance(data, Dataset) or _is_data_loader(data):
        return strategy.distribute_datasets_from_function(lambda _: data), y, sample_weight, batch_size
    arrays = tuple(
        keras.tree.map_structure(_as_floatx, value) for value in (data, y, sample_weight) if value is not None
    )
    rows = Dataset.from_tensor_slices(arrays)
    if seed is not None:
        rows = rows.shuffle(rows_of(arrays), seed=seed)
    dataset = strategy.distribute_datasets_from_function(
        lambda context: rows.batch(context.get_per_replica_batch_size(batch_size or 32))
    )
    return dataset, None, None, None


def _batches_of(strategy: Strategy, x: Tensors, seed: int | None, fills: bool) -> GlobalBatches:
    if isinstance(x, keras.utils.PyDataset):
        return PyDatasetBatches(strategy, x, seed, fills)
    if _is_data_loader(x):
        _require_no_fork(x)
    if _is_data_loader(x) or (fills and isinstance(x, Dataset)):
        return StreamBatches(strategy, x, fills=fills)
    if fills:
        raise TypeError(f"predict() of {x!r}, of whose rows no order is known; expected the mpidist.Dataset itself")
    source = strategy.experimental_distribute_dataset(x) if isinstance(x, Dataset) else x

    def part(_: int, batch: Tensors) -> Tensors:
        locals_ = strategy.experimental_local_results(batch)
        return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *locals_)

    contents = ""
    if isinstance(x, Dataset):
        samples = zlib.crc32(str([*array_samples(graph_and_options(x)[0])]).encode())
        contents = f" of arrays with the checksum {samples:08x} ({_ROWS_OF_ITS_OWN})"
    return StreamBatches(strategy, source, part, contents=contents)


def split(arrays: tuple[Tensors, ...], share: float) -> tuple[tuple[Tensors, ...], tuple[Tensors, ...]]:
    """Return the first rows of arrays, and a share of them at their end."""
    if isinstance(arrays[0], Sharded):
        (x, *others), (tested, *others_tested) = split((arrays[0].data, *arrays[1:]), share)
        return (Sharded(x), *others), (Sharded(tested), *others_tested)
    arrays = keras.tree.map_structure(_as_floatx, arrays)
    at = math.floor(rows_of(arrays) * (1 - share))

    def rows(which: slice) -> tuple[Tensors, ...]:
        return tuple(keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[which], arrays))

    return rows(slice(at)), rows(slice(at, None))


def rows_of(batch: Tensors) -> int:
    """Return how many rows a batch has."""
    return int(next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None).shape[0])


def _as_floatx(value: Tensors) -> Tensors:
    if value is None or not hasattr(value, "__array__"):
        return value
    array = to_array(value)
    is_real = array.dtype.kind == "f" and array.dtype != keras.config.floatx()
    return array.astype(keras.config.floatx()) if is_real else array


def _is_data_loader(value: object) -> bool:
    return any(kind.__module__ == "torch.utils.data.dataloader" for kind in type(value).__mro__)


def _require_no_fork(loader: KerasObject) -> None:
    """Raise ValueError if a DataLoader forks this process for its workers."""
    context = loader.multiprocessing_context
    if context is not None:
        method = context.get_start_method()
    else:
        # The first of all is the one that is taken where none is set.
        method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if loader.num_workers and method == "fork":
        raise ValueError(
            f"the DataLoader has num_workers={loader.num_workers}, which it forks, and a process in which MPI runs "
            "must not be forked; expected num_workers=0, or multiprocessing_context='forkserver' or 'spawn'"
        )


def _checksum(batch: Tensors) -> int:
    code = 0
    for leaf in keras.tree.flatten(batch):
        if leaf is not None:
            code = zlib.crc32(np.ascontiguousarray(to_array(leaf)).view(np.uint8).data, code)
    return code
