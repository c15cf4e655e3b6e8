"""Dataset: a small re-iterable input pipeline in the manner of tf.data, for NumPy and any Python source."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from mpidist.core.seed import next_seed
from mpidist.input import dealing, sources
from mpidist.input.elements import map_leaves
from mpidist.input.input_options import AutoShardPolicy, DatasetOptions
from mpidist.input.iteration import Elements
from mpidist.input.pipeline import (
    Batches,
    Filtered,
    Items,
    Mapped,
    MappedRows,
    Node,
    PrefetchedItems,
    PrefetchedRows,
    ReorderedItems,
    ReorderedRows,
    Rows,
    TableRows,
    Zipped,
)
from mpidist.input.reordering import INFINITE, UNKNOWN, Reordering, Repeat, Shard, Shuffle, Skip, Take
from mpidist.input.streams import Stream
from mpidist.input.tables import RangeTable, ZippedTable, array_table


class Dataset(Elements):
    """Elements that can be gone through again and again, each a nest of arrays and numbers (tf.data.Dataset).

    Build one with :meth:`from_tensor_slices`, :meth:`from_source`, :meth:`from_generator` or :meth:`range`
    and chain transforms; each returns a new dataset. Sources whose rows can be read by number are read by the
    batch, and on several ranks each rank reads only its own rows. Elements and batches are new arrays that the
    caller may change, and that no generator, source or function goes on to write into.

    >>> dataset = Dataset.range(10).shuffle(seed=1).batch(4)
    >>> [len(batch) for batch in dataset]
    [4, 4, 2]
    """

    # Sources

    @staticmethod
    def from_tensor_slices(tensors: Any) -> Dataset:
        """Return the dataset of the rows of arrays.

        Args:
            tensors: A nest of arrays of shape (rows, ...), with the same number of rows each: NumPy arrays,
                ``np.memmap``, arrays of h5py or zarr (read by slices, never whole), whatever ``np.asarray``
                takes. Tuples and dicts are structure; a list, also one of arrays, is one array.

        Raises:
            ValueError: A value without axes, or different numbers of rows.

        >>> [int(element["x"]) for element in Dataset.from_tensor_slices({"x": [1, 2]})]
        [1, 2]
        """
        return Dataset(TableRows(array_table(tensors)))

    @staticmethod
    def from_source(source: Any) -> Dataset:
        """Return the dataset of any object that holds data.

        Args:
            source: An array (its rows); an object with ``__len__`` and ``__getitem__``, such as a PyTorch
                map-style dataset (asked for ``source[i]``, only for the rows that are needed); an object with
                ``__iter__``, such as a PyTorch ``IterableDataset`` (gone through anew in each pass); or a
                Dataset, which is returned.

        Raises:
            TypeError: None of these, or an iterator, which could be read only once.

        >>> [x for x, _ in Dataset.from_source([(1, "a"), (2, "b")])]
        [1, 2]
        """
        return source if isinstance(source, Dataset) else Dataset(sources.node_of(source))

    @staticmethod
    def from_generator(generator: Callable[[], Iterable[Any]], output_signature: Any = None) -> Dataset:
        """Return the dataset of what a generator function yields.

        Args:
            generator: Called without arguments at the start of each pass; returns a new iterable.
            output_signature: The nest of ``ArraySpec`` that every element has; elements are converted to its
                dtypes. None: each element is taken as it comes, and questions about the elements are answered
                from the first one.

        Raises:
            TypeError: ``generator`` is not callable, or the signature holds something else than ArraySpec.

        >>> def squares():
        ...     yield from (0, 1, 4)
        >>> list(Dataset.from_generator(squares).batch(2))
        [array([0, 1]), array([4])]
        """
        return Dataset(sources.generator_node(generator, output_signature))

    @staticmethod
    def from_files(paths: Iterable[Any], reader: Callable[[Any], Iterable[Any]]) -> Dataset:
        """Return the dataset of what a function reads from files, file after file.

        Whole files are not dealt to ranks in this version: distributing it over several ranks needs
        ``with_options(auto_shard_policy=AutoShardPolicy.DATA)``, with which every rank reads all files and keeps
        its part of each batch. On one rank AUTO cuts batches as those of any other source; there TensorFlow cuts
        those from files differently (4 rows for 3 replicas as 2, 1, 1 and not 2, 2, 0).

        Args:
            paths: Of the files, on all ranks the same ones in the same order (sort what ``glob`` finds).
            reader: Called with a path, as it was given, when its turn comes in each pass; returns the elements as
                an iterable, such as a generator.

        Raises:
            TypeError: ``paths`` are no paths; ``reader`` is not callable, or, while iterating, gave no iterable.
            ValueError: There are no paths.

        >>> import tempfile, pathlib
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "numbers.txt")
        ...     _ = path.write_text("1 2 3")
        ...     [x.tolist() for x in Dataset.from_files([path], np.loadtxt).batch(2)]
        [[1.0, 2.0], [3.0]]
        """
        return Dataset(sources.files_node(paths, reader))

    @staticmethod
    def range(*args: int) -> Dataset:
        """Return the dataset of int64 numbers; the arguments are those of Python's ``range``.

        >>> [int(x) for x in Dataset.range(1, 6, 2)]
        [1, 3, 5]
        """
        return Dataset(TableRows(RangeTable(range(*args))))

    @staticmethod
    def zip(*datasets: Any) -> Dataset:
        """Return the dataset whose elements are those of several datasets side by side.

        It ends with the shortest one.

        Args:
            datasets: A tuple or dict of datasets, or several datasets.

        Raises:
            TypeError: Something in it is no Dataset.
            ValueError: No datasets, or datasets that carry different options.

        >>> [(int(a), int(b)) for a, b in Dataset.zip(Dataset.range(3), Dataset.range(5, 9))]
        [(0, 5), (1, 6), (2, 7)]
        """
        structure = datasets[0] if len(datasets) == 1 else datasets
        leaves: list[Dataset] = []

        def number(leaf: Any) -> int:
            leaves.append(_require_dataset(leaf))
            return len(leaves) - 1

        places = map_leaves(number, structure)
        if not leaves:
            raise ValueError("zip() got no datasets; expected a tuple or dict of datasets, or several datasets")
        options = {leaf._options for leaf in leaves if leaf._options != DatasetOptions()}
        if len(options) > 1:
            raise ValueError(f"zip() got datasets with different options: {options}; set them after zip()")
        nodes = [leaf._node for leaf in leaves]

        def build(parts: list[Any]) -> Any:
            return map_leaves(parts.__getitem__, places)

        tables = [node.table for node in nodes if isinstance(node, TableRows)]
        by_row = len(tables) == len(nodes)
        node: Node = TableRows(ZippedTable(tables, build)) if by_row else Zipped(nodes, build)
        return Dataset(node, options.pop() if options else DatasetOptions())

    # Transforms

    def _then(self, node: Node) -> Dataset:
        return Dataset(node, self._options)

    def _reordered(self, reordering: Reordering) -> Dataset:
        if isinstance(self._node, Rows):
            return self._then(ReorderedRows(self._node, reordering))
        assert isinstance(self._node, Items)
        return self._then(ReorderedItems(self._node, reordering))

    def map(self, map_func: Callable[..., Any]) -> Dataset:
        """Return the dataset of ``map_func`` of each element.

        Args:
            map_func: Gets an element as the source gives it; a tuple comes as several arguments. Before
                ``batch`` it is called only for the elements that this rank uses, so its result should depend
                on its arguments alone. After ``batch`` it gets whole batches, and when the dataset is
                distributed every rank computes the whole global batch and then keeps its part: put it before
                where you can.

        >>> [int(x) for x in Dataset.range(3).map(lambda x: x * x)]
        [0, 1, 4]
        """
        _require_callable("map_func", map_func)
        node = self._node
        return self._then(MappedRows(node, map_func) if isinstance(node, Rows) else Mapped(node, map_func))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Return the dataset of the elements for which ``predicate`` is true.

        How many there are is not known beforehand, and a rank must read all elements to tell.

        Args:
            predicate: Gets an element, a tuple as several arguments; returns something true or false.

        >>> [int(x) for x in Dataset.range(6).filter(lambda x: x % 2)]
        [1, 3, 5]
        """
        _require_callable("predicate", predicate)
        return self._then(Filtered(self._node, predicate))

    def shuffle(
        self, buffer_size: int | None = None, seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> Dataset:
        """Return the dataset in random order.

        Distributed datasets come in the same order on all ranks, also without a seed.

        Args:
            buffer_size: Elements of a stream that are held in memory to draw from; None holds all of them.
                Rows that can be read by number are permuted as a whole and need no buffer, except in an
                endless dataset, where it is the number of rows to draw from.
            seed: A whole number that fixes the order; None draws one (see ``mpidist.set_seed``).
            reshuffle_each_iteration: Whether each pass has an order of its own, also each one of a later
                ``repeat``.

        Raises:
            ValueError: ``buffer_size`` below 1, or left out where the number of elements is endless or
                unknown; a negative seed.

        >>> sorted(int(x) for x in Dataset.range(4).shuffle())
        [0, 1, 2, 3]
        """
        if buffer_size is not None and operator.index(buffer_size) < 1:
            raise ValueError(f"buffer_size is {buffer_size}; expected 1 or more, or None for all elements")
        if seed is not None and operator.index(seed) < 0:
            raise ValueError(f"seed is {seed}; expected 0 or more, or None for one drawn at random")
        rows = isinstance(self._node, Rows)
        if buffer_size is None and (self.cardinality() == INFINITE or (self.cardinality() == UNKNOWN and not rows)):
            raise ValueError(
                f"shuffle() of {self._node}, whose number of elements is endless or unknown, got no "
                "buffer_size; say how many elements to draw from, shuffle(buffer_size=1000), or call "
                "shuffle() before repeat()"
            )
        return self._reordered(
            Shuffle(buffer_size, _seed_or_drawn(seed), seed is not None, bool(reshuffle_each_iteration))
        )

    def repeat(self, count: int | None = None) -> Dataset:
        """Return the dataset gone through ``count`` times, without end for None or -1.

        >>> [int(x) for x in Dataset.range(2).repeat(2)]
        [0, 1, 0, 1]
        """
        times = None if count is None or operator.index(count) < 0 else count
        return self._reordered(Repeat(times))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Return the dataset of consecutive elements stacked along a new first axis.

        Args:
            batch_size: Elements in a batch; of a dataset that is to be distributed, of all replicas together.
            drop_remainder: Leave out a last batch that is smaller.

        Raises:
            ValueError: ``batch_size`` below 1; while iterating, elements of unlike shapes or structures.

        >>> list(Dataset.range(3).batch(2))
        [array([0, 1]), array([2])]
        """
        if operator.index(batch_size) < 1:
            raise ValueError(f"batch_size is {batch_size}; expected 1 or more")
        return self._then(Batches(self._node, batch_size, bool(drop_remainder)))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Return the dataset of every ``num_shards``-th element, beginning with element ``index``.

        Raises:
            ValueError: ``num_shards`` below 1, or ``index`` not in 0 ... num_shards - 1.

        >>> [int(x) for x in Dataset.range(5).shard(2, 1)]
        [1, 3]
        """
        if operator.index(num_shards) < 1 or not 0 <= operator.index(index) < num_shards:
            raise ValueError(
                f"num_shards is {num_shards} and index {index}; expected num_shards of at least 1 and 0 <= "
                "index < num_shards, for example shard(ctx.num_input_pipelines, ctx.input_pipeline_id)"
            )
        return self._reordered(Shard(num_shards, index))

    def take(self, count: int) -> Dataset:
        """Return the dataset of the first ``count`` elements, of all for -1.

        >>> [int(x) for x in Dataset.range(5).take(2)]
        [0, 1]
        """
        return self._reordered(Take(operator.index(count)))

    def skip(self, count: int) -> Dataset:
        """Return the dataset without its first ``count`` elements, an empty one for -1.

        >>> [int(x) for x in Dataset.range(5).skip(3)]
        [3, 4]
        """
        return self._reordered(Skip(operator.index(count)))

    def prefetch(self, buffer_size: int) -> Dataset:
        """Return the same dataset, with the next elements read ahead in a thread.

        Elements, their order and which rows are read stay the same. Streams are read ahead up to this point. Rows
        that are read by number are read ahead after a later ``batch`` or ``map`` too; of a distributed dataset each
        rank reads ahead its own rows. The thread begins with the first element of a pass and ends with the pass,
        ``close()`` of the iterator, an error, or when the iterator is dropped. An error in it is raised by
        ``next``, with its own traceback. Functions that run in it are outside of any strategy's scope.

        Args:
            buffer_size: How many elements are kept ready at most; batches, of a dataset of batches.

        Raises:
            ValueError: ``buffer_size`` below 1.

        >>> [batch.tolist() for batch in Dataset.range(3).batch(2).prefetch(1)]
        [[0, 1], [2]]
        """
        if operator.index(buffer_size) < 1:
            raise ValueError(f"buffer_size is {buffer_size}; expected 1 or more elements to keep ready")
        node = self._node
        if isinstance(node, Rows):
            return self._then(PrefetchedRows(node, buffer_size))
        assert isinstance(node, Items)
        return self._then(PrefetchedItems(node, buffer_size))

    def enumerate(self, start: int = 0) -> Dataset:
        """Return the dataset of ``(number, element)`` with int64 numbers from ``start``.

        >>> [(int(i), int(x)) for i, x in Dataset.range(5, 7).enumerate()]
        [(0, 5), (1, 6)]
        """
        length = self.cardinality()
        if length >= 0:
            numbers = Dataset.range(start, start + length)
        else:
            numbers = Dataset(Stream(lambda: map(np.int64, count(start)), "numbers", None, INFINITE))
        return Dataset.zip((numbers, self))

    def with_options(self, auto_shard_policy: AutoShardPolicy | None = None, assignment: str | None = None) -> Dataset:
        """Return the same dataset with options for ``experimental_distribute_dataset``.

        Args:
            auto_shard_policy: How it is divided over ranks; AUTO and DATA can be distributed in this version, and
                what comes from files, on several ranks, only with DATA.
            assignment: Which part of a global batch goes where. ``"tf"``: part j to rank j mod W,
                TensorFlow's way and the default; ``"block"``: part j to replica j, so that the ranks' parts
                are contiguous, and the only way where ranks have different numbers of replicas.

        Raises:
            TypeError: ``auto_shard_policy`` is no AutoShardPolicy.
            ValueError: ``assignment`` is another word.

        >>> Dataset.range(8).batch(4).with_options(assignment="block").cardinality()
        2
        """
        options = self._options
        if auto_shard_policy is not None:
            if not isinstance(auto_shard_policy, AutoShardPolicy):
                raise TypeError(f"auto_shard_policy is {auto_shard_policy!r}; expected AutoShardPolicy.DATA or AUTO")
            options = replace(options, auto_shard_policy=auto_shard_policy)
        if assignment is not None:
            if assignment not in dealing.ASSIGNMENTS:
                raise ValueError(f"assignment is {assignment!r}; expected 'tf' or 'block'")
            options = replace(options, assignment=assignment)
        return Dataset(self._node, options)


def _require_dataset(value: Any) -> Dataset:
    if not isinstance(value, Dataset):
        raise TypeError(f"zip() got {value!r} of type {type(value).__name__}; expected Dataset objects")
    return value


def _seed_or_drawn(seed: int | None) -> int:
    if seed is None:
        seed = next_seed()
    return secrets.randbits(63) if seed is None else seed


def _require_callable(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}; expected a function")
