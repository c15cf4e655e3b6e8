"""Transforms: the methods of a dataset that group, keep, join and read ahead its elements."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from mpidist.input.caching import CachedFile, CachedItems, CachedRows
from mpidist.input.combining import Concatenation, Sampling, combined
from mpidist.input.grouping import Unbatched, Windows
from mpidist.input.input_options import common_options
from mpidist.input.item_steps import Batches, Filtered, PrefetchedItems
from mpidist.input.ordering import OrderedElements, seed_or_drawn
from mpidist.input.padding import Padding
from mpidist.input.parallel_calls import AUTOTUNE, checked_calls
from mpidist.input.pipeline import Rows, require_items
from mpidist.input.reordering import INFINITE, Shuffle
from mpidist.input.row_steps import PrefetchedRows

D = TypeVar("D", bound="Transforms")

# How many elements are kept ready where that is left to mpidist: one is used, one is ready, and one is being read.
_READY = 2


class Transforms(OrderedElements):
    """Elements that can be grouped, kept and joined with others."""

    def filter(self: D, predicate: Callable[..., Any]) -> D:
        """Return the dataset of the elements for which ``predicate`` is true.

        How many there are is not known beforehand, and a rank must read all elements to tell.

        Args:
            predicate: Gets an element, a tuple as several arguments; returns something true or false.

        >>> from mpidist.input import Dataset
        >>> [int(x) for x in Dataset.range(6).filter(lambda x: x % 2)]
        [1, 3, 5]
        """
        require_callable("predicate", predicate)
        return self._then(Filtered(self._node, predicate))

    def batch(
        self: D,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> D:
        """Return the dataset of consecutive elements stacked along a new first axis.

        Args:
            batch_size: Elements in a batch; of a dataset that is to be distributed, of all replicas together.
            drop_remainder: Leave out a last batch that is smaller.
            num_parallel_calls: Taken as TensorFlow takes it, without effect: rows are read by the batch, and
                ``map`` and ``prefetch`` have threads.
            deterministic: The same; the order is kept in any case.

        Raises:
            TypeError: ``batch_size`` is no whole number.
            ValueError: ``batch_size`` below 1; while iterating, elements of unlike shapes or structures.

        >>> from mpidist.input import Dataset
        >>> list(Dataset.range(3).batch(2))
        [array([0, 1]), array([2])]
        """
        checked_calls(num_parallel_calls)
        return self._then(Batches(self._node, _batch_size("batch", batch_size), bool(drop_remainder)))

    def padded_batch(
        self: D,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
    ) -> D:
        """Return the dataset of consecutive elements, padded to one shape and stacked along a new first axis.

        Distributed, every rank reads whole global batches, as the longest element of a batch may be another rank's.

        Args:
            batch_size: As that of :meth:`batch`.
            padded_shapes: The shape of each array, in the structure of an element: a list or tuple of sizes, with None
                or -1 for the size of the longest element of the batch. None: that on all axes.
            padding_values: What each array is padded with, in the same structure, or one value for all arrays. None:
                0, or the empty text.
            drop_remainder: Leave out a last batch that is smaller.

        Raises:
            TypeError: ``batch_size`` is no whole number; while iterating, a value that the dtype does not hold.
            ValueError: ``batch_size`` below 1; while iterating, an element larger than its shape, different numbers of
                axes, shapes or values of another structure.

        >>> from mpidist.input import Dataset
        >>> dataset = Dataset.range(1, 4).map(lambda x: [7] * x)
        >>> [batch.tolist() for batch in dataset.padded_batch(2)]
        [[[7, 0], [7, 7]], [[7, 7, 7]]]
        """
        size = _batch_size("padded_batch", batch_size)
        return self._then(Batches(self._node, size, bool(drop_remainder), Padding(padded_shapes, padding_values)))

    def unbatch(self: D) -> D:
        """Return the dataset of the rows of each element: what ``batch`` puts together, one by one.

        Raises:
            ValueError: While iterating, an array without axes, or arrays of one element with different first sizes.

        >>> from mpidist.input import Dataset
        >>> [int(x) for x in Dataset.range(3).batch(2).unbatch()]
        [0, 1, 2]
        """
        return self._then(Unbatched(self._node))

    def window(self: D, size: int, shift: int | None = None, stride: int = 1, drop_remainder: bool = False) -> D:
        """Return the dataset of windows, each a dataset of ``size`` elements.

        Of a structure of arrays a window is the same structure of datasets. ``flat_map`` makes arrays of windows, which
        cannot be distributed as they are.

        Args:
            size: Elements in a window.
            shift: How many elements further the next window begins; None for ``size``.
            stride: How many elements further the next element in a window is.
            drop_remainder: Leave out windows at the end that have fewer elements.

        Raises:
            ValueError: ``size``, ``shift`` or ``stride`` below 1.

        >>> from mpidist.input import Dataset
        >>> windows = Dataset.range(5).window(3, shift=1, drop_remainder=True)
        >>> [batch.tolist() for batch in windows.flat_map(lambda window: window.batch(3))]
        [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
        """
        step = size if shift is None else shift
        if min(map(operator.index, (size, step, stride))) < 1:
            raise ValueError(f"window() got size={size}, shift={shift}, stride={stride}; expected 1 or more for each")
        return self._then(Windows(self._node, size, step, stride, bool(drop_remainder), type(self)))

    def cache(self: D, filename: Any = "") -> D:
        """Return the same dataset, whose elements are computed once and kept: what comes before is done once.

        The order is that of the first pass for ever; shuffle after it. Rows that are read by number are kept one by one
        as they are read, on each rank its own. Other elements are kept when a pass over them has come to its end; what
        a pass has seen that ends earlier is dropped.

        Args:
            filename: Of a file to keep them in, for other programs too; empty for memory. Its name gets an ending
                that differs where the steps before or their data do, as far as the text of a dataset tells: functions
                do not count, so remove ``filename.*`` when one has changed. Every rank reads all of the file. Ranks
                may share it. Shuffles before it that were given no seed have a fixed one. Structure is tuples and
                dicts.

        Raises:
            ValueError: The dataset is endless; while iterating, the file is damaged.
            TypeError: ``filename`` is no path; while iterating, an element that a file cannot keep.
            OSError: While iterating, the file cannot be read or written.

        >>> from mpidist.input import Dataset
        >>> calls = []
        >>> dataset = Dataset.range(2).map(lambda x: calls.append(x) or x).cache()
        >>> [[int(x) for x in dataset] for _ in range(3)], len(calls)
        ([[0, 1], [0, 1], [0, 1]], 2)
        """
        name = os.fsdecode(filename)
        if self.cardinality() == INFINITE:
            raise ValueError(f"cache() of {self._node}, which has no end, would never end; call it before repeat()")
        if name:
            return self._then(CachedFile(self._node, name))
        node = self._node
        return self._then(CachedRows(node) if isinstance(node, Rows) else CachedItems(require_items(node)))

    def concatenate(self: D, dataset: D) -> D:
        """Return the dataset of these elements and then those of another one.

        Args:
            dataset: With elements of the same structure and dtypes.

        Raises:
            TypeError: ``dataset`` is no Dataset; while iterating, elements of another structure or dtype.
            ValueError: The datasets carry different options.

        >>> from mpidist.input import Dataset
        >>> [int(x) for x in Dataset.range(2).concatenate(Dataset.range(7, 9))]
        [0, 1, 7, 8]
        """
        both = [self, self._require("concatenate", dataset)]
        options = common_options((each._options for each in both), "concatenate")
        return type(self)(combined([each._node for each in both], Concatenation()), options)

    @classmethod
    def sample_from_datasets(
        cls: type[D],
        datasets: Sequence[D],
        weights: Sequence[float] | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
    ) -> D:
        """Return the dataset each of whose elements is the next one of a dataset that is drawn.

        Distributed datasets are drawn from in the same order on all ranks, also without a seed.

        Args:
            datasets: With elements of the same structure and dtypes.
            weights: How likely each of them is drawn; None for all alike. They need not sum to 1.
            seed: A whole number that fixes the draws; None draws one (see ``mpidist.set_seed``).
            stop_on_empty_dataset: End when a dataset is drawn that has nothing left; else go on with the others.
            rerandomize_each_iteration: Whether each pass has draws of its own; None: where there is no seed.

        Raises:
            TypeError: Something in it is no Dataset; while iterating, elements of another structure or dtype.
            ValueError: No datasets; other than one weight for each, negative or all 0; datasets with different options;
                a negative seed.

        >>> from mpidist.input import Dataset
        >>> datasets = [Dataset.range(3), Dataset.range(10, 13)]
        >>> sorted(int(x) for x in Dataset.sample_from_datasets(datasets, weights=[0.9, 0.1]))
        [0, 1, 2, 10, 11, 12]
        """
        found = [cls._require("sample_from_datasets", dataset) for dataset in datasets]
        if not found:
            raise ValueError("sample_from_datasets() got no datasets; expected a list of one or more")
        chances = np.ones(len(found)) if weights is None else np.asarray(weights, np.float64)
        if chances.shape != (len(found),) or not np.isfinite(chances).all() or chances.min() < 0 or not chances.any():
            raise ValueError(f"weights is {weights!r}; expected {len(found)} numbers of 0 or more, not all of them 0")
        if seed is not None and operator.index(seed) < 0:
            raise ValueError(f"seed is {seed}; expected 0 or more, or None for one drawn at random")
        again = seed is None if rerandomize_each_iteration is None else bool(rerandomize_each_iteration)
        draws = Shuffle(None, seed_or_drawn(seed), seed is not None, again)
        sampling = Sampling((chances / chances.sum()).tolist(), draws, bool(stop_on_empty_dataset))
        options = common_options((dataset._options for dataset in found), "sample_from_datasets")
        return cls(combined([dataset._node for dataset in found], sampling), options)

    def prefetch(self: D, buffer_size: int) -> D:
        """Return the same dataset, with the next elements read ahead in a thread.

        Elements, their order and which rows are read stay the same. Streams are read ahead up to this point. Rows
        that are read by number are read ahead after a later ``batch`` or ``map`` too; of a distributed dataset each
        rank reads ahead its own rows. The thread begins with the first element of a pass and ends with the pass,
        ``close()`` of the iterator, an error, or when the iterator is dropped. An error in it is raised by
        ``next``, with its own traceback. Functions that run in it are outside of any strategy's scope.

        Args:
            buffer_size: How many elements are kept ready at most; batches, of a dataset of batches. -1
                (``mpidist.input.AUTOTUNE``) for 2.

        Raises:
            ValueError: ``buffer_size`` below 1 and not -1.

        >>> from mpidist.input import Dataset
        >>> [batch.tolist() for batch in Dataset.range(3).batch(2).prefetch(1)]
        [[0, 1], [2]]
        """
        size = _READY if operator.index(buffer_size) == AUTOTUNE else buffer_size
        if size < 1:
            raise ValueError(
                f"buffer_size is {buffer_size}; expected 1 or more elements to keep ready, or -1 to leave that open"
            )
        node = self._node
        return self._then(
            PrefetchedRows(node, size) if isinstance(node, Rows) else PrefetchedItems(require_items(node), size)
        )

    @classmethod
    def _require(cls: type[D], method: str, value: Any) -> D:
        if not isinstance(value, cls):
            raise TypeError(f"{method}() got {value!r} of type {type(value).__name__}; expected Dataset objects")
        return value


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


def require_callable(name: str, value: Any) -> None:
    """Raise TypeError if ``value``, the argument ``name``, is no function."""
    if not callable(value):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}; expected a function")
