"""Dataset: a re-iterable input pipeline like tf.data's, for NumPy and any Python source."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Generic, NoReturn, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike

from mpidist.arrays.dtypes import DType, as_dtype
from mpidist.core import nest
from mpidist.input import rules, sources
from mpidist.input.batching import Batched, Padding, Unbatched, Windows
from mpidist.input.caching import CachedFile
from mpidist.input.combining import Concatenated, Interleaved, Sampled, Zipped
from mpidist.input.distribution import Distribution
from mpidist.input.elements import as_numpy, dataset_as_array, map_leaves
from mpidist.input.input_options import (
    SHARD_HINT,
    AutoShardPolicy,
    DatasetOptions,
    InputWorkers,
    Options,
    common_options,
)
from mpidist.input.iteration import DatasetIterator, E_co, S, reduce_elements, spec_of_elements
from mpidist.input.local_batches import DealtBatches, batches_of_worker
from mpidist.input.nodes import INFINITE, ArrayRows, GraphNode, RangeRows, Seed
from mpidist.input.steps import (
    Cached,
    Enumerated,
    Filtered,
    Mapped,
    Prefetched,
    Repeated,
    Shard,
    ShardHint,
    Shuffled,
    check_shuffle,
    skip,
    take,
)
from mpidist.input.threads import AUTOTUNE, checked_calls

_ALONE = InputWorkers(1, 0, (1,), None, wrap=False)
# The default number of elements kept ready: while one is used, one is ready and one is being read.
_READY = 2

P = TypeVar("P")


class Dataset(Generic[E_co]):
    """A re-iterable collection of elements (tf.data.Dataset).

    An element is a nest of arrays and numbers. Build a dataset with :meth:`from_tensor_slices`, :meth:`from_source`,
    :meth:`from_generator`, :meth:`from_files`, :meth:`list_files` or :meth:`range`, and chain transforms. Each returns
    a new dataset. If rows can be read by number, they are read by the batch, and each rank reads only its own rows.
    Elements and batches are new arrays. You may modify them.

    For type checkers, ``Dataset[T]`` has elements of type T, such as ``map_func`` returns. A list becomes an array.

    >>> dataset = Dataset.range(10).shuffle(seed=1).batch(4)
    >>> [len(batch) for batch in dataset]
    [4, 4, 2]
    """

    def __init__(self, node: GraphNode, options: DatasetOptions = DatasetOptions()) -> None:  # noqa: B008 - frozen
        self._node = node
        self._options = options

    @cached_property
    def _passes(self) -> Distribution:
        node, options = self._node, self._options
        deal = partial(batches_of_worker, node, options)
        return Distribution(DealtBatches(_ALONE, node, "block"), _ALONE, deal, options.assignment)

    def _then(self, node: GraphNode) -> Dataset:
        return Dataset(node, self._options)

    # Sources

    @staticmethod
    def from_tensor_slices(tensors: object) -> Dataset:
        """Return the dataset of the rows of arrays.

        Args:
            tensors: A nest of arrays of shape (rows, ...), with the same number of rows each: NumPy arrays,
                ``np.memmap``, arrays of h5py or zarr (read by slices), anything that ``np.asarray`` accepts. Tuples and
                dicts are structure. A list, even of arrays, is one array.

        Raises:
            ValueError: A value without axes, or different numbers of rows.

        >>> [int(element["x"]) for element in Dataset.from_tensor_slices({"x": [1, 2]})]
        [1, 2]
        """
        return Dataset(ArrayRows.of_slices(tensors))

    @staticmethod
    def from_tensors(tensors: object) -> Dataset:
        """Return the dataset of one element, ``tensors``.

        Args:
            tensors: A nest of arrays and numbers. Tuples and dicts are structure, a list is one array.

        >>> list(Dataset.from_tensors([1, 2]))
        [array([1, 2])]
        """
        return Dataset(ArrayRows.of_element(tensors))

    @staticmethod
    def from_source(source: object, columns: Sequence[str] | None = None) -> Dataset:
        """Return the dataset of any object that holds data.

        Args:
            source: An array (its rows); a table, record batch, dataset or Parquet file of pyarrow (a row is a dict
                of its columns; only row groups with requested rows are read); an
                object with ``__len__`` and ``__getitem__``, such as a PyTorch map-style dataset, a Hugging Face
                dataset or a grain ``MapDataset`` (only necessary rows are read, by ``source[i]``, or by
                ``__getitems__`` for all rows of a batch); an object with ``__iter__``,
                such as a PyTorch ``IterableDataset`` (iterated once in each pass); a PyTorch ``DataLoader`` (its
                batches, in the order of its sampler, as its ``collate_fn`` makes them); or a Dataset, which is
                returned.
            columns: The columns to read from a source of pyarrow. None: all.

        Raises:
            TypeError: Another object, or an iterator, which could be read only once; ``columns`` for a source that is
                not of pyarrow.
            ValueError: An unknown name in ``columns``.

        >>> [x for x, _ in Dataset.from_source([(1, "a"), (2, "b")])]
        [1, 2]
        """
        if isinstance(source, Dataset) and columns is None:
            return source
        return Dataset(sources.node_of(source, columns))

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[object]],
        output_types: object = None,
        output_shapes: object = None,
        args: Sequence[object] | None = None,
        output_signature: object = None,
    ) -> Dataset:
        """Return the dataset of the elements that a generator function yields.

        Args:
            generator: Called at the start of each pass; returns a new iterable.
            output_types: With ``output_shapes``, the older form of a signature: the nest of dtypes of an element.
            output_shapes: The shape for each of them, with None for sizes that differ.
            args: The arguments of ``generator``.
            output_signature: The nest of ``ArraySpec`` of every element. Elements are converted to its
                dtypes. None: elements are not converted, and the first element determines ``element_spec``.

        Raises:
            TypeError: ``generator`` is not callable; the signature is invalid, given in both forms, or in the older
                form without shapes.
            ValueError: Types and shapes that do not fit together; while iterating, it returned the same exhausted
                iterator again.

        >>> def squares():
        ...     yield from (0, 1, 4)
        >>> list(Dataset.from_generator(squares).batch(2))
        [array([0, 1]), array([4])]
        """
        signature = sources.signature_of(output_types, output_shapes, output_signature)
        return Dataset(sources.generator_node(generator, signature, () if args is None else tuple(args)))

    @staticmethod
    def from_files(paths: Iterable[P], reader: Callable[[P], Iterable[S]]) -> Dataset[S]:
        """Return the dataset of the elements that a function reads from files, in their order.

        When distributed, file i goes to rank i mod W, and there must be at least W files. With
        ``with_options(auto_shard_policy=AutoShardPolicy.DATA)`` every rank reads all files and keeps its part of
        each batch.

        Args:
            paths: The paths of the files, the same on all ranks in the same order (sort the result of ``glob``).
            reader: Called with a path in each pass; returns the elements as an iterable, such as a generator.

        Raises:
            TypeError: ``paths`` are no paths; ``reader`` is not callable, or, while iterating, returned no iterable.
            ValueError: ``paths`` is empty.

        >>> import tempfile, pathlib
        >>> import numpy as np
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "numbers.txt")
        ...     _ = path.write_text("1 2 3")
        ...     [x.tolist() for x in Dataset.from_files([path], np.loadtxt).batch(2)]
        [[1.0, 2.0], [3.0]]
        """
        return Dataset(sources.files_node(paths, reader))

    @staticmethod
    def list_files(
        file_pattern: sources.Pattern | Iterable[sources.Pattern], shuffle: bool | None = None, seed: int | None = None
    ) -> Dataset[str]:
        """Return the dataset of the paths of files. Read them with ``map`` or ``interleave``.

        When distributed, file i of the sorted names goes to rank i mod W in every pass, and shuffles order each rank's
        own files.

        Args:
            file_pattern: One or several patterns for ``glob``, which are resolved now.
            shuffle: Whether each pass has another order. None means True, as in TensorFlow. False sorts by name.
            seed: The seed of that order.

        Raises:
            TypeError: Something else than a pattern.
            ValueError: No file matches, or ``seed`` without ``shuffle``.

        >>> import tempfile, pathlib
        >>> import numpy as np
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "a.txt").write_text("1 2 3")
        ...     dataset = Dataset.list_files(folder + "/*.txt")
        ...     [x.tolist() for x in dataset.map(np.loadtxt)]
        [[1.0, 2.0, 3.0]]
        """
        names: Dataset[str] = Dataset(sources.names_node(file_pattern))
        if shuffle is None or shuffle:
            return names.shuffle(seed=seed)
        if seed is not None:
            raise ValueError(f"list_files() got seed={seed} with shuffle={shuffle}. Use shuffle=True with a seed")
        return names

    @overload
    @staticmethod
    def range(*args: int) -> Dataset[np.int64]: ...

    @overload
    @staticmethod
    def range(*args: int, output_type: DTypeLike) -> Dataset: ...

    @staticmethod
    def range(*args: int, output_type: DTypeLike = np.int64) -> Dataset:
        """Return the dataset of the numbers of Python's ``range`` with the same arguments.

        Args:
            args: Start, stop and step.
            output_type: The dtype of the numbers.

        Raises:
            TypeError: ``output_type`` is no dtype of numbers.
            ValueError: The numbers do not fit ``output_type``.

        >>> [int(x) for x in Dataset.range(1, 6, 2)]
        [1, 3, 5]
        >>> Dataset.range(3, output_type="float32").element_spec
        ArraySpec(shape=(), dtype=dtype('float32'))
        """
        numbers = range(*args)
        return Dataset(RangeRows(numbers, _dtype_of_range(numbers, output_type)))

    @staticmethod
    def zip(*datasets: object) -> Dataset:
        """Return the dataset of tuples or dicts of elements. It ends with the shortest dataset.

        Args:
            datasets: A tuple or dict of datasets, or several datasets.

        Raises:
            TypeError: Something else than a Dataset.
            ValueError: No datasets, or datasets with different options.

        >>> [(int(a), int(b)) for a, b in Dataset.zip(Dataset.range(3), Dataset.range(5, 9))]
        [(0, 5), (1, 6), (2, 7)]
        """
        structure = datasets[0] if len(datasets) == 1 else datasets
        leaves: list[object] = []

        def number(leaf: object) -> int:
            leaves.append(leaf)
            return len(leaves) - 1

        numbers = map_leaves(number, structure)
        nodes, options = _together("zip", leaves, "a tuple or dict of datasets, or several datasets")
        return Dataset(Zipped(nodes, lambda parts: map_leaves(parts.__getitem__, numbers)), options)

    # Transforms

    def map(
        self, map_func: Callable[..., S], num_parallel_calls: int | None = None, deterministic: bool | None = None
    ) -> Dataset[S]:
        """Return the dataset of ``map_func`` of each element, in the same order.

        Args:
            map_func: Receives an element, a tuple as several arguments. Before ``batch`` it is called only for the
                elements that this rank uses, so its result should depend only on its arguments. After ``batch`` it
                receives whole batches, and every rank computes the whole global batch and then keeps its part. Call
                ``map`` before ``batch`` if you can.
            num_parallel_calls: The number of calls at once, each in a thread; -1 for one for each core. Threads help
                if the function waits or leaves Python (reading, decoding, NumPy on large arrays). Before ``batch``
                they share the rows of a batch. None: the reading thread makes the calls.
            deterministic: Accepted as in TensorFlow, and ignored: the order never changes.

        Raises:
            TypeError: ``map_func`` is not callable.
            ValueError: ``num_parallel_calls`` below 1 and not -1.

        >>> [int(x) for x in Dataset.range(3).map(lambda x: x * x)]
        [0, 1, 4]
        """
        _require_callable("map_func", map_func)
        return self._then(Mapped((self._node,), map_func, checked_calls(num_parallel_calls)))

    def interleave(
        self,
        map_func: Callable[..., Dataset[S]],
        cycle_length: int | None = None,
        block_length: int = 1,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset[S]:
        """Return the elements of several datasets in turn, each made by ``map_func``.

        The order is that of tf.data's deterministic ``interleave``: ``block_length`` elements of the first open
        dataset, then of the next. When a dataset ends, the dataset of the next element takes its position, and begins
        in the next round. Shuffles without a seed in these datasets have different orders, the same on all ranks. The
        elements of :meth:`list_files` are dealt as files, and so are other elements if the first dataset reads files.

        Args:
            map_func: Receives an element, a tuple as several arguments; returns a Dataset.
            cycle_length: The number of open datasets; None or -1 for 4, the same on every machine.
            block_length: The number of elements of one dataset in a round.
            num_parallel_calls: The number of threads that call ``map_func`` and read the next block of each open
                dataset, and the first block of as many next ones; -1 for one for each core. None: no threads.
            deterministic: Accepted as in TensorFlow, and ignored: the order never changes.

        Raises:
            TypeError: ``map_func`` is no function; while iterating, it returned no Dataset.
            ValueError: ``cycle_length``, ``block_length`` or ``num_parallel_calls`` below 1, and not -1.

        >>> dataset = Dataset.range(1, 4).interleave(lambda x: Dataset.range(x * 10, x * 10 + 3), cycle_length=2)
        >>> [int(x) for x in dataset]
        [10, 20, 11, 21, 12, 22, 30, 31, 32]
        """
        _require_callable("map_func", map_func)
        cycle = 4 if cycle_length in (None, AUTOTUNE) else operator.index(cycle_length)
        if cycle < 1 or operator.index(block_length) < 1:
            raise ValueError(f"cycle_length is {cycle_length} and block_length {block_length}; expected 1 or more")

        def node_of(*element: object) -> GraphNode:
            made = map_func(*element)
            if not isinstance(made, Dataset):
                raise TypeError(
                    f"map_func of interleave() returned {made!r} of type {type(made).__name__}; expected a Dataset, "
                    "for example lambda path: Dataset.from_files([path], reader)"
                )
            return graph_and_options(made)[0]

        calls = checked_calls(num_parallel_calls)
        return self._then(Interleaved((self._node,), node_of, cycle, block_length, Seed.of(None, True), calls))

    def flat_map(self, map_func: Callable[..., Dataset[S]]) -> Dataset[S]:
        """Return the elements of several datasets in order, each made by ``map_func`` of an element.

        Args:
            map_func: See :meth:`interleave`. This is its case ``cycle_length=1``.

        >>> [int(x) for x in Dataset.range(1, 4).flat_map(Dataset.range)]
        [0, 0, 1, 0, 1, 2]
        """
        return self.interleave(map_func, cycle_length=1)

    def enumerate(self, start: int = 0) -> Dataset[tuple[np.int64, E_co]]:
        """Return the dataset of ``(number, element)`` with int64 numbers from ``start``.

        >>> [(int(i), int(x)) for i, x in Dataset.range(5, 7).enumerate()]
        [(0, 5), (1, 6)]
        """
        if self._node.is_source:
            return Dataset.zip((Dataset.range(start, start + self.cardinality()), self))
        return self._then(Enumerated((self._node,), operator.index(start)))

    def filter(self, predicate: Callable[..., object]) -> Dataset[E_co]:
        """Return the dataset of the elements for which ``predicate`` is true.

        The number of elements is unknown. Each rank calls ``predicate`` for all elements, also for those of other
        ranks.

        Args:
            predicate: Receives an element, a tuple as several arguments.

        >>> [int(x) for x in Dataset.range(6).filter(lambda x: x % 2)]
        [1, 3, 5]
        """
        _require_callable("predicate", predicate)
        return self._then(Filtered((self._node,), predicate))

    def take_while(self, predicate: Callable[..., object]) -> Dataset[E_co]:
        """Return the dataset of the elements before the first one for which ``predicate`` is false.

        The number of elements is unknown. Each rank calls ``predicate`` for all elements up to the first false one,
        also for those of other ranks. If whole files go to the ranks, each rank stops in its own files.

        Args:
            predicate: Receives an element, a tuple as several arguments.

        >>> [int(x) for x in Dataset.range(10).take_while(lambda x: x < 3)]
        [0, 1, 2]
        """
        _require_callable("predicate", predicate)
        return self._then(Filtered((self._node,), predicate, "take_while"))

    def apply(self, transformation_func: Callable[[Dataset[E_co]], Dataset[S]]) -> Dataset[S]:
        """Return ``transformation_func(self)``, for your own chains of transformations.

        Args:
            transformation_func: Receives this dataset and returns another.

        Raises:
            TypeError: ``transformation_func`` is not callable, or returns something else than a Dataset.

        >>> def odd(dataset):
        ...     return dataset.filter(lambda x: x % 2)
        >>> [int(x) for x in Dataset.range(10).apply(odd).take(2)]
        [1, 3]
        """
        _require_callable("transformation_func", transformation_func)
        dataset = transformation_func(self)
        if not isinstance(dataset, Dataset):
            raise TypeError(f"transformation_func returned {dataset!r}. Return a Dataset")
        return dataset

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Return the dataset of consecutive elements stacked along a new first axis.

        Args:
            batch_size: Elements in a batch. Before distribution: rows for all replicas together.
            drop_remainder: Drop a smaller last batch.
            num_parallel_calls: Accepted as in TensorFlow, and ignored: use the threads of ``map`` and ``prefetch``.
            deterministic: Accepted as in TensorFlow, and ignored: the order never changes.

        Raises:
            TypeError: ``batch_size`` is no whole number.
            ValueError: ``batch_size`` below 1; while iterating, elements of different shapes or structures.

        >>> list(Dataset.range(3).batch(2))
        [array([0, 1]), array([2])]
        """
        checked_calls(num_parallel_calls)
        return self._then(Batched((self._node,), _batch_size("batch", batch_size), bool(drop_remainder)))

    def padded_batch(
        self, batch_size: int, padded_shapes: object = None, padding_values: object = None, drop_remainder: bool = False
    ) -> Dataset:
        """Return the dataset of consecutive elements, padded to one shape and stacked.

        When distributed, every rank reads whole global batches, because the longest element may be another rank's.

        Args:
            batch_size: See :meth:`batch`.
            padded_shapes: The shape of each array, in the structure of an element: a list or tuple of sizes, with None
                or -1 for the size of the longest element of the batch. None: the longest on all axes.
            padding_values: The padding of each array in the same structure, or one value for all arrays.
                None: 0, or the empty text.
            drop_remainder: Drop a smaller last batch.

        Raises:
            TypeError: ``batch_size`` is no whole number; while iterating, a value that the dtype cannot hold.
            ValueError: ``batch_size`` below 1; while iterating, an element larger than its shape, different numbers of
                axes, shapes or values of another structure.

        >>> dataset = Dataset.range(1, 4).map(lambda x: [7] * x)
        >>> [batch.tolist() for batch in dataset.padded_batch(2)]
        [[[7, 0], [7, 7]], [[7, 7, 7]]]
        """
        size = _batch_size("padded_batch", batch_size)
        return self._then(Batched((self._node,), size, bool(drop_remainder), Padding(padded_shapes, padding_values)))

    def unbatch(self) -> Dataset:
        """Return the dataset of the rows of each element; the opposite of ``batch``.

        Raises:
            ValueError: While iterating, an array without axes, or arrays of one element with different first sizes.

        >>> [int(x) for x in Dataset.range(3).batch(2).unbatch()]
        [0, 1, 2]
        """
        return self._then(Unbatched((self._node,)))

    def window(self, size: int, shift: int | None = None, stride: int = 1, drop_remainder: bool = False) -> Dataset:
        """Return the dataset of windows, each a dataset of ``size`` elements.

        Of a structure of arrays a window is the same structure of datasets. Windows cannot be distributed. Convert
        them to arrays with ``flat_map``.

        Args:
            size: Elements in a window.
            shift: The distance in elements between the starts of two windows. None: ``size``.
            stride: The distance in elements between neighbors in a window.
            drop_remainder: Drop incomplete windows at the end.

        Raises:
            ValueError: ``size``, ``shift`` or ``stride`` below 1.

        >>> windows = Dataset.range(5).window(3, shift=1, drop_remainder=True)
        >>> [batch.tolist() for batch in windows.flat_map(lambda window: window.batch(3))]
        [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
        """
        step = size if shift is None else shift
        if min(map(operator.index, (size, step, stride))) < 1:
            raise ValueError(f"window() got size={size}, shift={shift}, stride={stride}; expected 1 or more for each")
        return self._then(Windows((self._node,), size, step, stride, bool(drop_remainder), type(self)))

    def cache(self, filename: sources.FilePath = "") -> Dataset[E_co]:
        """Return the same dataset, whose elements are computed once and kept.

        The order is always that of the first pass, so shuffle after it. Rows with numbers are kept when they are read,
        on each rank its own. Other elements are kept after a complete pass.

        Args:
            filename: A file that keeps them, also for other programs. Empty: memory. The file name gets a suffix
                that depends on the steps before, and for arrays in memory on some rows. It does not depend on
                functions: remove ``filename.*`` after changing one. Every rank reads the whole file. Ranks
                may share it. Shuffles before it without a seed get a fixed one. Structure is tuples and dicts.

        Raises:
            ValueError: The dataset is endless; while iterating, the file is damaged.
            TypeError: ``filename`` is no path; while iterating, an element that a file cannot keep.
            OSError: While iterating, the file cannot be read or written.

        >>> calls = []
        >>> dataset = Dataset.range(2).map(lambda x: calls.append(x) or x).cache()
        >>> [[int(x) for x in dataset] for _ in range(3)], len(calls)
        ([[0, 1], [0, 1], [0, 1]], 2)
        """
        name = os.fsdecode(filename)
        if self.cardinality() == INFINITE:
            raise ValueError(f"cache() of {self._node} would never end. Call cache() before repeat()")
        return self._then(CachedFile((self._node,), name) if name else Cached((self._node,)))

    def concatenate(self, dataset: Dataset[E_co]) -> Dataset[E_co]:
        """Return the dataset of these elements and then those of another dataset.

        Args:
            dataset: With elements of the same structure and dtypes.

        Raises:
            TypeError: ``dataset`` is no Dataset; while iterating, elements of another structure or dtype.
            ValueError: The datasets have different options.

        >>> [int(x) for x in Dataset.range(2).concatenate(Dataset.range(7, 9))]
        [0, 1, 7, 8]
        """
        nodes, options = _together("concatenate", [self, dataset])
        return type(self)(Concatenated(nodes), options)

    @staticmethod
    def sample_from_datasets(
        datasets: Sequence[Dataset[S]],
        weights: Sequence[float] | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
    ) -> Dataset[S]:
        """Return the dataset whose elements come from randomly drawn datasets. All ranks draw the same ones.

        Args:
            datasets: With elements of the same structure and dtypes.
            weights: The likelihood of each dataset. They need not sum to 1. None: all equal.
            seed: A whole number that determines the draws; None draws one (see ``mpidist.set_seed``).
            stop_on_empty_dataset: End when a dataset without more elements is drawn, instead of using the others.
            rerandomize_each_iteration: Whether each pass has other draws. None: if there is no seed.

        Raises:
            TypeError: Something else than a Dataset; while iterating, elements of another structure or dtype.
            ValueError: No datasets; not one weight for each, negative weights or only zeros; datasets with different
                options; a negative seed.

        >>> datasets = [Dataset.range(3), Dataset.range(10, 13)]
        >>> sorted(int(x) for x in Dataset.sample_from_datasets(datasets, weights=[0.9, 0.1]))
        [0, 1, 2, 10, 11, 12]
        """
        nodes, options = _together("sample_from_datasets", list(datasets))
        chances = np.ones(len(nodes)) if weights is None else np.asarray(weights, np.float64)
        if chances.shape != (len(nodes),) or not np.isfinite(chances).all() or chances.min() < 0 or not chances.any():
            raise ValueError(f"weights is {weights!r}; expected {len(nodes)} numbers of 0 or more, not all of them 0")
        again = seed is None if rerandomize_each_iteration is None else bool(rerandomize_each_iteration)
        shares = (chances / chances.sum()).tolist()
        return Dataset(Sampled(nodes, shares, Seed.of(seed, again), bool(stop_on_empty_dataset)), options)

    def prefetch(self, buffer_size: int) -> Dataset[E_co]:
        """Return the same dataset, with the next elements read ahead in a thread.

        Streams are read ahead up to this step. Rows with numbers are read ahead after a later ``batch`` or ``map``
        too, on each rank its own rows. The thread begins with the first element of a pass. It ends with the pass,
        with ``close()`` of the iterator, after an error, or when the iterator is dropped. ``next`` raises its errors,
        with the traceback of the thread. Functions in the thread are outside of any strategy's scope.

        Args:
            buffer_size: The largest number of elements kept ready. -1 (``mpidist.input.AUTOTUNE``) means 2.

        Raises:
            ValueError: ``buffer_size`` below 1 and not -1.

        >>> [batch.tolist() for batch in Dataset.range(3).batch(2).prefetch(1)]
        [[0, 1], [2]]
        """
        size = _READY if operator.index(buffer_size) == AUTOTUNE else buffer_size
        if size < 1:
            raise ValueError(f"buffer_size is {buffer_size}; expected 1 or more elements to keep ready, or -1 for 2")
        return self._then(Prefetched((self._node,), size))

    def shuffle(
        self,
        buffer_size: int | None = None,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = True,
        *,
        block_size: int | None = None,
    ) -> Dataset[E_co]:
        """Return the dataset in random order, the same on all ranks.

        Args:
            buffer_size: Elements of a stream in the buffer from which they are drawn. None: all.
                Rows with numbers need no buffer, except in an endless dataset: only their numbers are permuted, in
                at most 32 MiB for any number of rows.
            seed: A whole number that determines the order; None draws one (see ``mpidist.set_seed``).
            reshuffle_each_iteration: Whether each pass, and each repetition of a later ``repeat``, has another order.
                None means True, as in TensorFlow.
            block_size: For disks with slow random access: blocks of this many consecutive rows come in
                random order, and the rows of ``buffer_size // block_size`` blocks at a time are mixed. Use the rows
                of a chunk or row group, or of about a MiB.

        Raises:
            ValueError: ``buffer_size`` below 1, or missing for an endless or unknown number of elements; a negative
                seed; ``block_size`` below 1, without ``buffer_size``, or for elements that are no rows of a finite
                dataset.

        >>> sorted(int(x) for x in Dataset.range(4).shuffle())
        [0, 1, 2, 3]
        """
        check_shuffle(self._node, buffer_size, block_size)
        reshuffles = reshuffle_each_iteration is None or bool(reshuffle_each_iteration)
        return self._then(Shuffled((self._node,), buffer_size, Seed.of(seed, reshuffles), block_size))

    def repeat(self, count: int | None = None) -> Dataset[E_co]:
        """Return the dataset repeated ``count`` times, without end for None or -1.

        >>> [int(x) for x in Dataset.range(2).repeat(2)]
        [0, 1, 0, 1]
        """
        times = None if count is None or operator.index(count) < 0 else count
        return self._then(Repeated((self._node,), times))

    def shard(self, num_shards: int, index: int) -> Dataset[E_co]:
        """Return the dataset of every ``num_shards``-th element, beginning with element ``index``.

        ``shard(SHARD_HINT, SHARD_HINT)`` becomes ``shard(W, rank)`` when the dataset is
        distributed with ``AutoShardPolicy.HINT``.

        Raises:
            ValueError: ``num_shards`` below 1, or ``index`` not in 0 ... num_shards - 1.

        >>> [int(x) for x in Dataset.range(5).shard(2, 1)]
        [1, 3]
        """
        if num_shards == index == SHARD_HINT:
            return self._then(ShardHint((self._node,)))
        if operator.index(num_shards) < 1 or not 0 <= operator.index(index) < num_shards:
            raise ValueError(
                f"num_shards is {num_shards} and index {index}; expected num_shards of at least 1 and 0 <= "
                "index < num_shards, for example shard(ctx.num_input_pipelines, ctx.input_pipeline_id)"
            )
        return self._then(Shard.of(self._node, num_shards, index))

    def take(self, count: int) -> Dataset[E_co]:
        """Return the dataset of the first ``count`` elements, of all for -1.

        >>> [int(x) for x in Dataset.range(5).take(2)]
        [0, 1]
        """
        return self._then(take(self._node, operator.index(count)))

    def skip(self, count: int) -> Dataset[E_co]:
        """Return the dataset without its first ``count`` elements, an empty one for -1.

        >>> [int(x) for x in Dataset.range(5).skip(3)]
        [3, 4]
        """
        return self._then(skip(self._node, operator.index(count)))

    def with_options(
        self,
        options: Options | None = None,
        *,
        auto_shard_policy: AutoShardPolicy | None = None,
        assignment: str | None = None,
    ) -> Dataset[E_co]:
        """Return the same dataset with options for ``experimental_distribute_dataset``.

        Args:
            options: TensorFlow's form, ``Options`` with the policy.
            auto_shard_policy: The division over ranks; see ``AutoShardPolicy``.
            assignment: The ranks of the parts of a global batch (DATA). ``"tf"``, the default: part j to rank
                j mod W. ``"block"``: part j to replica j, so that the parts of a rank are contiguous. It is
                the only one if ranks have different numbers of replicas.

        Raises:
            TypeError: ``options`` are no Options, or the policy is no AutoShardPolicy.
            ValueError: ``assignment`` is unknown, or a policy in both forms.

        >>> Dataset.range(8).batch(4).with_options(assignment="block").cardinality()
        2
        """
        if options is not None:
            if not isinstance(options, Options):
                raise TypeError(f"options is {options!r}. Use Options, or with_options(auto_shard_policy=...)")
            if auto_shard_policy is not None:
                raise ValueError(f"with_options() got {options!r} and {auto_shard_policy=}. Pass only one of them")
            auto_shard_policy = options.experimental_distribute.auto_shard_policy
        chosen = self._options
        if auto_shard_policy is not None:
            if not isinstance(auto_shard_policy, AutoShardPolicy):
                raise TypeError(f"auto_shard_policy is {auto_shard_policy!r}; expected AutoShardPolicy.DATA or another")
            chosen = replace(chosen, auto_shard_policy=auto_shard_policy)
        if assignment is not None:
            if assignment not in rules.ASSIGNMENTS:
                raise ValueError(f"assignment is {assignment!r}; expected 'tf' or 'block'")
            chosen = replace(chosen, assignment=assignment)
        return Dataset(self._node, chosen)

    # Elements

    def __iter__(self) -> DatasetIterator[E_co]:
        return DatasetIterator(self._passes, self._passes.next_pass())

    def reduce(self, initial_state: S, reduce_func: Callable[[S, E_co], S]) -> S:
        """Return the result of ``reduce_func`` over all elements of one pass.

        Args:
            initial_state: The first state, of any kind; returned if there are no elements.
            reduce_func: Receives the state and an element, a tuple as one argument; returns the next state.

        Raises:
            TypeError: ``reduce_func`` is not callable.
            ValueError: The dataset is endless.

        >>> int(Dataset.range(5).reduce(0, lambda total, x: total + x))
        10
        """
        return reduce_elements(self, initial_state, reduce_func)

    @property
    def element_spec(self) -> Any:
        """The nest of ``ArraySpec`` of an element. May read an element.

        Raises:
            ValueError: The dataset is empty, so its spec is unknown.

        >>> Dataset.range(5).batch(2).element_spec
        ArraySpec(shape=(None,), dtype=dtype('int64'))
        """
        return spec_of_elements(self._node)

    def cardinality(self) -> int:
        """Return the number of elements in a pass: -1 without end, -2 unknown.

        >>> Dataset.range(5).batch(2).cardinality(), Dataset.range(5).repeat().cardinality()
        (3, -1)
        """
        return self._node.cardinality

    def __len__(self) -> int:
        length = self.cardinality()
        if length < 0:
            kind = "endless" if length == INFINITE else "not known beforehand"
            raise TypeError(f"the number of elements of {self._node} is {kind}. Use cardinality()")
        return length

    def as_numpy_iterator(self) -> Iterator[Any]:
        """Return an iterator over the elements of a pass as NumPy arrays and scalars.

        Raises:
            TypeError: While iterating, an element with something else than arrays, numbers, text and bytes.

        >>> list(Dataset.from_source([(1, [2.0, 3.0])]).as_numpy_iterator())
        [(np.int64(1), array([2., 3.]))]
        """
        return (nest.map_structure(as_numpy, element) for element in iter(self))

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        raise dataset_as_array()

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._node}>"


def _dtype_of_range(numbers: range, output_type: DTypeLike) -> DType:
    """Return the dtype of a range of numbers, after checking that they fit."""
    dtype = None if output_type is None else as_dtype(output_type)
    if dtype is None or not (dtype.kind in "iuf" or dtype.name == "bfloat16"):
        raise TypeError(f"output_type is {output_type!r}. Pass a dtype of numbers, such as 'float32'")
    for number in (numbers[0], numbers[-1]) if numbers else ():
        if dtype.kind in "iu":
            fits = np.iinfo(dtype).min <= number <= np.iinfo(dtype).max
        else:
            with np.errstate(over="ignore"):
                fits = bool(np.isfinite(np.float64(number).astype(dtype)))
        if not fits:
            raise ValueError(f"{number} of {numbers} does not fit output_type {dtype}. Pass a larger dtype")
    return dtype


class TextLineDataset(Dataset[str]):
    """The lines of text files, without their ends (tf.data.TextLineDataset).

    Lines are ``str`` (TensorFlow's are bytes), decoded as UTF-8, and end at a line feed. A carriage return before it is
    removed. Whole files go to the ranks, as with :meth:`Dataset.from_files`.

    Args:
        filenames: A path, several, or a dataset of paths such as :meth:`Dataset.list_files` returns.
        compression_type: None or ``""`` for plain files, ``"GZIP"`` or ``"ZLIB"``.
        buffer_size, num_parallel_reads, name: Accepted as in TensorFlow, and ignored: files are read in their order.

    Raises:
        TypeError: ``filenames`` holds something else than paths.
        ValueError: There are no files, or ``compression_type`` is unknown. While iterating, a file is not compressed in
            that way, or not UTF-8.

    Source: https://www.tensorflow.org/api_docs/python/tf/data/TextLineDataset

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "words.txt")
    ...     _ = path.write_text("one\\ntwo\\n")
    ...     list(TextLineDataset(path))
    ['one', 'two']
    """

    def __init__(
        self,
        filenames: sources.FilePath | Iterable[sources.FilePath] | Dataset[str],
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ) -> None:
        del buffer_size, num_parallel_reads, name
        lines_of = sources.line_reader(compression_type)
        if isinstance(filenames, Dataset):
            dataset: Dataset = filenames.flat_map(lambda path: Dataset.from_files([path], lines_of))
        else:
            paths = [filenames] if isinstance(filenames, (str, bytes, os.PathLike)) else filenames
            if not isinstance(paths, Iterable):
                raise TypeError(f"filenames is {filenames!r}. Pass a path, several paths, or a dataset of paths")
            paths = list(paths)
            if not paths:
                raise ValueError("filenames is empty. Pass at least one path")
            dataset = Dataset.from_files(paths, lines_of)
        super().__init__(*graph_and_options(dataset))


def graph_and_options(dataset: Dataset) -> tuple[GraphNode, DatasetOptions]:
    """Return the graph and the options of a dataset."""
    return dataset._node, dataset._options


def _together(
    method: str, datasets: Sequence[object], expected: str = "a list of one or more"
) -> tuple[tuple[GraphNode, ...], DatasetOptions]:
    """Return the nodes and the options of datasets that ``method`` combines."""
    parts: list[tuple[GraphNode, DatasetOptions]] = []
    for dataset in datasets:
        if not isinstance(dataset, Dataset):
            raise TypeError(f"{method}() got {dataset!r} of type {type(dataset).__name__}; expected Dataset objects")
        parts.append(graph_and_options(dataset))
    if not parts:
        raise ValueError(f"{method}() got no datasets; expected {expected}")
    nodes, options = zip(*parts, strict=True)
    return nodes, common_options(options, method)


def _batch_size(method: str, batch_size: int) -> int:
    try:
        size = operator.index(batch_size)
    except TypeError:
        raise TypeError(
            f"batch_size is {batch_size!r} of type {type(batch_size).__name__}; expected a whole number, such as "
            f"{method}(32), or a quotient by //"
        ) from None
    if size < 1:
        raise ValueError(f"batch_size is {batch_size}; expected 1 or more")
    return size


def _require_callable(name: str, value: object) -> None:
    """Raise TypeError unless ``value``, the argument ``name``, is a function."""
    if not callable(value):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}; expected a function")
