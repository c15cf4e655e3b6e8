"""Dataset: a small re-iterable input pipeline in the manner of tf.data, for NumPy and any Python source."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from mpidist.input import dealing, sources
from mpidist.input.elements import map_leaves
from mpidist.input.file_dealing import names_node
from mpidist.input.input_options import AutoShardPolicy, Options, common_options
from mpidist.input.interleaved import Interleaved
from mpidist.input.item_steps import Enumerated, Mapped, Zipped
from mpidist.input.ordering import seed_or_drawn
from mpidist.input.parallel_calls import AUTOTUNE, checked_calls
from mpidist.input.pipeline import Node, Rows
from mpidist.input.reordering import Shuffle
from mpidist.input.row_steps import MappedRows, TableRows
from mpidist.input.tables import RangeTable, ZippedTable, array_table, element_table
from mpidist.input.transforms import Transforms, require_callable


class Dataset(Transforms):
    """Elements that can be gone through again and again, each a nest of arrays and numbers (tf.data.Dataset).

    Build one with :meth:`from_tensor_slices`, :meth:`from_source`, :meth:`from_generator`, :meth:`from_files`,
    :meth:`list_files` or :meth:`range` and chain transforms; each returns a new dataset. Sources whose rows can be read
    by number are read by the batch, and on several ranks each rank reads only its own rows. Elements and batches are
    new arrays that the caller may change, and that no generator, source or function goes on to write into.

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
    def from_tensors(tensors: Any) -> Dataset:
        """Return the dataset of one element, ``tensors`` as they are.

        Args:
            tensors: A nest of arrays and numbers; tuples and dicts are structure, a list is one array.

        >>> list(Dataset.from_tensors([1, 2]))
        [array([1, 2])]
        """
        return Dataset(TableRows(element_table(tensors)))

    @staticmethod
    def from_source(source: Any, columns: Sequence[str] | None = None) -> Dataset:
        """Return the dataset of any object that holds data.

        Args:
            source: An array (its rows); a table, record batch, dataset or Parquet file of pyarrow (each row a dict
                of its columns; of Parquet only the row groups are read that hold rows which are asked for); an
                object with ``__len__`` and ``__getitem__``, such as a PyTorch map-style dataset, a Hugging Face
                dataset or a grain ``MapDataset`` (asked for ``source[i]``, or for all rows of a batch by
                ``__getitems__`` where it has that, only for the rows that are needed); an object with ``__iter__``,
                such as a PyTorch ``IterableDataset`` (gone through anew in each pass); or a Dataset, which is
                returned.
            columns: Of a source of pyarrow, the columns that are read; None for all.

        Raises:
            TypeError: None of these, or an iterator, which could be read only once; ``columns`` of something else
                than a source of pyarrow.
            ValueError: A name in ``columns`` that there is not.

        >>> [x for x, _ in Dataset.from_source([(1, "a"), (2, "b")])]
        [1, 2]
        """
        if isinstance(source, Dataset) and columns is None:
            return source
        return Dataset(sources.node_of(source, columns))

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[Any]],
        output_types: Any = None,
        output_shapes: Any = None,
        args: Sequence[Any] | None = None,
        output_signature: Any = None,
    ) -> Dataset:
        """Return the dataset of what a generator function yields.

        Args:
            generator: Called at the start of each pass; returns a new iterable.
            output_types: The older form of a signature, with ``output_shapes``: the nest of the dtypes of an element.
            output_shapes: The shape for each of them, with None for sizes that differ.
            args: What ``generator`` is called with.
            output_signature: The nest of ``ArraySpec`` that every element has; elements are converted to its
                dtypes. None: each element is taken as it comes, and questions about the elements are answered
                from the first one.

        Raises:
            TypeError: ``generator`` is not callable; the signature holds something else than ArraySpec, or is given in
                both forms, or the older one without shapes.
            ValueError: Types and shapes that do not belong together; while iterating, it returned the same iterator as
                before, which is used up.

        >>> def squares():
        ...     yield from (0, 1, 4)
        >>> list(Dataset.from_generator(squares).batch(2))
        [array([0, 1]), array([4])]
        """
        signature = sources.signature_of(output_types, output_shapes, output_signature)
        return Dataset(sources.generator_node(generator, signature, () if args is None else tuple(args)))

    @staticmethod
    def from_files(paths: Iterable[Any], reader: Callable[[Any], Iterable[Any]]) -> Dataset:
        """Return the dataset of what a function reads from files, file after file.

        Distributed, whole files are dealt to the ranks, file i to rank i mod W, and there must be at least W of them;
        with ``with_options(auto_shard_policy=AutoShardPolicy.DATA)`` every rank reads all files and keeps its part of
        each batch.

        Args:
            paths: Of the files, on all ranks the same ones in the same order (sort what ``glob`` finds).
            reader: Called with a path, as it was given, when its turn comes in each pass; returns the elements as
                an iterable, such as a generator.

        Raises:
            TypeError: ``paths`` are no paths; ``reader`` is not callable, or, while iterating, gave no iterable.
            ValueError: There are no paths.

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
    def list_files(file_pattern: Any, shuffle: bool | None = None, seed: int | None = None) -> Dataset:
        """Return the dataset of the paths of files, for ``map`` or ``interleave`` with what reads one.

        Distributed, whole files are dealt to the ranks as those of :meth:`from_files`: file i of the sorted names goes
        to rank i mod W in every pass, and shuffles order each rank's own files.

        Args:
            file_pattern: A pattern as ``glob`` takes it, or several; looked up now.
            shuffle: Whether each pass has the files in another order; None means True, as in TensorFlow. Without, they
                are sorted by name.
            seed: Of that order.

        Raises:
            TypeError: A pattern is none.
            ValueError: No file matches, or ``seed`` without ``shuffle``.

        >>> import tempfile, pathlib
        >>> import numpy as np
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "a.txt").write_text("1 2 3")
        ...     dataset = Dataset.list_files(folder + "/*.txt")
        ...     [x.tolist() for x in dataset.map(np.loadtxt)]
        [[1.0, 2.0, 3.0]]
        """
        names = Dataset(names_node(file_pattern))
        if shuffle is None or shuffle:
            return names.shuffle(seed=seed)
        if seed is not None:
            raise ValueError(f"list_files() got seed={seed} with shuffle={shuffle}; a seed is for shuffle=True")
        return names

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
            leaves.append(Dataset._require("zip", leaf))
            return len(leaves) - 1

        places = map_leaves(number, structure)
        if not leaves:
            raise ValueError("zip() got no datasets; expected a tuple or dict of datasets, or several datasets")
        options = common_options((leaf._options for leaf in leaves), "zip")
        nodes = [leaf._node for leaf in leaves]

        def build(parts: list[Any]) -> Any:
            return map_leaves(parts.__getitem__, places)

        tables = [node.table for node in nodes if isinstance(node, TableRows)]
        by_row = len(tables) == len(nodes)
        node: Node = TableRows(ZippedTable(tables, build)) if by_row else Zipped(nodes, build)
        return Dataset(node, options)

    # Transforms

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Return the dataset of ``map_func`` of each element.

        Elements keep their order, also with several calls at once.

        Args:
            map_func: Gets an element as the source gives it; a tuple comes as several arguments. Before
                ``batch`` it is called only for the elements that this rank uses, so its result should depend
                on its arguments alone. After ``batch`` it gets whole batches, and when the dataset is
                distributed every rank computes the whole global batch and then keeps its part: put it before
                where you can.
            num_parallel_calls: How many calls may run at once, each in a thread; -1 for as many as there are
                cores. It gains time where the function waits or leaves Python (reading, decoding, NumPy on large
                arrays). Before ``batch`` the rows of a batch are shared among the threads. None: calls run one
                after the other in the thread that reads. Threads end with the pass as those of ``prefetch``.
            deterministic: Taken as TensorFlow takes it, without effect: the order is kept in any case.

        Raises:
            TypeError: ``map_func`` is not callable.
            ValueError: ``num_parallel_calls`` below 1 and not -1.

        >>> [int(x) for x in Dataset.range(3).map(lambda x: x * x)]
        [0, 1, 4]
        """
        require_callable("map_func", map_func)
        node, calls = self._node, checked_calls(num_parallel_calls)
        made: Node = MappedRows(node, map_func, calls) if isinstance(node, Rows) else Mapped(node, map_func, calls)
        return self._then(made)

    def interleave(
        self,
        map_func: Callable[..., Any],
        cycle_length: int | None = None,
        block_length: int = 1,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Return the elements of several datasets in turn, each made by ``map_func`` of an element.

        The order is that of tf.data's deterministic ``interleave``: ``block_length`` elements of the first dataset that
        is open, then of the next; one that ends makes room for the next element's, which begins in the next round.
        Shuffles without a seed in these datasets have an order of their own in each, the same on all ranks. The
        elements of :meth:`list_files` are dealt as files; other elements are, if what ``map_func`` makes of the first
        one reads files.

        Args:
            map_func: Gets an element, a tuple as several arguments; returns a Dataset.
            cycle_length: How many datasets are open at a time; None or -1 for 4, the same on every machine.
            block_length: How many elements come from one dataset in a round.
            num_parallel_calls: How many threads call ``map_func`` and read the datasets, -1 for as many as there are
                cores: the next block of each one that is open, and the first of as many that come next as there are
                threads. The order stays. None: they are read in turn in the thread that reads.
            deterministic: Taken as TensorFlow takes it, without effect: the order is kept in any case.

        Raises:
            TypeError: ``map_func`` is no function; while iterating, it returned no Dataset.
            ValueError: ``cycle_length`` or ``block_length`` below 1, ``num_parallel_calls`` too and not -1.

        >>> dataset = Dataset.range(1, 4).interleave(lambda x: Dataset.range(x * 10, x * 10 + 3), cycle_length=2)
        >>> [int(x) for x in dataset]
        [10, 20, 11, 21, 12, 22, 30, 31, 32]
        """
        require_callable("map_func", map_func)
        cycle = 4 if cycle_length in (None, AUTOTUNE) else operator.index(cycle_length)
        if cycle < 1 or operator.index(block_length) < 1:
            raise ValueError(f"cycle_length is {cycle_length} and block_length {block_length}; expected 1 or more")

        def node_of(*element: Any) -> Node:
            made = map_func(*element)
            if not isinstance(made, Dataset):
                raise TypeError(
                    f"map_func of interleave() returned {made!r} of type {type(made).__name__}; expected a Dataset, "
                    "for example lambda path: Dataset.from_files([path], reader)"
                )
            return made._node

        seeds = Shuffle(None, seed_or_drawn(None), given=False, reshuffle=True)
        calls = checked_calls(num_parallel_calls)
        return self._then(Interleaved(self._node, node_of, cycle, block_length, seeds, calls))

    def flat_map(self, map_func: Callable[..., Any]) -> Dataset:
        """Return the elements of several datasets, one after the other, each made by ``map_func`` of an element.

        Args:
            map_func: As that of :meth:`interleave`, of which this is the case ``cycle_length=1``.

        >>> [int(x) for x in Dataset.range(1, 4).flat_map(Dataset.range)]
        [0, 0, 1, 0, 1, 2]
        """
        return self.interleave(map_func, cycle_length=1)

    def enumerate(self, start: int = 0) -> Dataset:
        """Return the dataset of ``(number, element)`` with int64 numbers from ``start``.

        >>> [(int(i), int(x)) for i, x in Dataset.range(5, 7).enumerate()]
        [(0, 5), (1, 6)]
        """
        if isinstance(self._node, TableRows):
            return Dataset.zip((Dataset.range(start, start + self.cardinality()), self))
        return self._then(Enumerated(self._node, operator.index(start)))

    def with_options(
        self,
        options: Options | None = None,
        *,
        auto_shard_policy: AutoShardPolicy | None = None,
        assignment: str | None = None,
    ) -> Dataset:
        """Return the same dataset with options for ``experimental_distribute_dataset``.

        Args:
            options: TensorFlow's form: ``Options`` with the policy that ``auto_shard_policy`` says without them.
            auto_shard_policy: How it is divided over ranks; see ``AutoShardPolicy``.
            assignment: Which part of a global batch that all ranks share (DATA) goes where. ``"tf"``: part j to rank
                j mod W, TensorFlow's way and the default; ``"block"``: part j to replica j, so that the ranks'
                parts are contiguous, and the only way where ranks have different numbers of replicas.

        Raises:
            TypeError: ``options`` are no Options, or the policy is no AutoShardPolicy.
            ValueError: ``assignment`` is another word; a policy in both forms.

        >>> Dataset.range(8).batch(4).with_options(assignment="block").cardinality()
        2
        """
        if options is not None:
            if not isinstance(options, Options):
                raise TypeError(
                    f"with_options() was given {options!r}; expected Options, or with_options(auto_shard_policy=...)"
                )
            if auto_shard_policy is not None:
                raise ValueError(
                    f"with_options() got {options!r} and auto_shard_policy={auto_shard_policy!r}; give one of them"
                )
            auto_shard_policy = options.experimental_distribute.auto_shard_policy
        chosen = self._options
        if auto_shard_policy is not None:
            if not isinstance(auto_shard_policy, AutoShardPolicy):
                raise TypeError(f"auto_shard_policy is {auto_shard_policy!r}; expected AutoShardPolicy.DATA or another")
            chosen = replace(chosen, auto_shard_policy=auto_shard_policy)
        if assignment is not None:
            if assignment not in dealing.ASSIGNMENTS:
                raise ValueError(f"assignment is {assignment!r}; expected 'tf' or 'block'")
            chosen = replace(chosen, assignment=assignment)
        return Dataset(self._node, chosen)
