"""PyTorch's DataLoader as steps of a dataset.

A sampler says the order of the rows of a table, whose batches ``collate_fn`` makes.

Nothing here imports PyTorch: whoever has a DataLoader has imported it.

Rows are fetched by a DataLoader over the rows of this rank, made anew for each pass, so worker processes, page-locked
memory and all else are PyTorch's own. Only that its processes are not forked from a rank, in which MPI runs.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np

from mpidist.arrays.convert import NUMBERS
from mpidist.input import row_indices
from mpidist.input.batching import Batched
from mpidist.input.element_spec import spec_of, with_rows
from mpidist.input.elements import list_to_array, stopped
from mpidist.input.graph import Form, GraphNode, Pass
from mpidist.input.row_indices import RowIndex
from mpidist.input.sampler_order import SamplerOrder, row_numbers
from mpidist.input.tables import RowTable

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    Loader: TypeAlias = DataLoader[Any]


def is_loader(value: object) -> TypeGuard[Loader]:
    """Return whether ``value`` is a DataLoader of PyTorch."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(value, data.DataLoader)


def unbatched_source(value: object) -> str | None:
    """Return the line that makes batches of a dataset of PyTorch or Hugging Face.

    None for anything else.
    """
    data, hugging_face = sys.modules.get("torch.utils.data"), sys.modules.get("datasets")
    # Programs have modules of that name, too.
    kinds = tuple(getattr(hugging_face, name, type(None)) for name in ("Dataset", "IterableDataset"))
    if isinstance(value, kinds) and hasattr(value, "with_format"):
        return "torch.utils.data.DataLoader(dataset.with_format('torch'), batch_size=global_batch_size)"
    if data is not None and isinstance(value, data.Dataset):
        shuffle = "" if isinstance(value, data.IterableDataset) else ", shuffle=True"
        return f"torch.utils.data.DataLoader(dataset, batch_size=global_batch_size{shuffle})"
    return None


def loader_node(loader: Loader) -> GraphNode:
    """Return the node of the batches of a DataLoader.

    Raises:
        TypeError: A class with an ``__iter__`` of its own; a dataset or sampler without ``__len__``.
        ValueError: Worker processes that would be forked, or that give batches in no order.
    """
    _check(loader)
    if isinstance(loader.dataset, sys.modules["torch.utils.data"].IterableDataset):
        return LoaderStream(loader)
    sampler = _sampler_of(loader)
    batch_sampler = sys.modules["torch.utils.data"].BatchSampler
    if loader.batch_size is not None and type(sampler) is batch_sampler:
        rows = LoaderRows(LoaderTable(loader), SamplerOrder(loader, loader.sampler))
        return Batched((rows,), loader.batch_size, loader.drop_last)
    if loader.batch_sampler is None and not isinstance(sampler, batch_sampler):
        return LoaderRows(LoaderTable(loader, has_batches=True), SamplerOrder(loader, sampler))
    return LoaderBatches(LoaderTable(loader), SamplerOrder(loader, sampler))


def check_shared(node: GraphNode) -> None:
    """Raise ValueError for a DataLoader whose sampler leaves out the rows of other ranks."""
    for step in node.graph():
        order = step.order if isinstance(step, (LoaderRows, LoaderBatches)) else None
        for sampler in order.samplers if order is not None else ():
            if getattr(sampler, "num_replicas", None) not in (None, 1):
                name = type(sampler).__name__
                raise ValueError(
                    f"{node} has a {name} of {sampler.num_replicas} replicas, which leaves out the rows of other ranks "
                    "before the batches are divided over ranks; expected a sampler that is the same on all ranks: "
                    "DataLoader(dataset, batch_size=global_batch_size, shuffle=True); to keep the sampler: strategy."
                    "distribute_datasets_from_function(lambda context: loader)"
                )


def _check(loader: Loader) -> None:
    kind, plain = type(loader), sys.modules["torch.utils.data"].DataLoader
    if kind.__iter__ is not plain.__iter__:
        raise TypeError(
            f"a {kind.__module__}.{kind.__name__} goes through its data in a way of its own; expected a "
            "torch.utils.data.DataLoader with the same dataset and sampler; as a stream, of which every rank reads "
            "all: mpidist.Dataset.from_generator(lambda: iter(loader))"
        )
    is_stream = isinstance(loader.dataset, sys.modules["torch.utils.data"].IterableDataset)
    for name, value in () if is_stream else (("dataset", loader.dataset), ("sampler", _sampler_of(loader))):
        if not _has_length(value):
            raise TypeError(
                f"the {name} of the DataLoader, {value!r} of type {type(value).__name__}, has no __len__; expected "
                "one, since the order of a whole pass is drawn before it begins, the same on all ranks; or an "
                "IterableDataset without a sampler"
            )
    if loader.num_workers and _start_method(loader) == "fork":
        raise ValueError(
            "the DataLoader has multiprocessing_context='fork', and a process in which MPI runs must not be forked; "
            "expected multiprocessing_context='forkserver', which is taken where none is given, or 'spawn'"
        )
    if not getattr(loader, "in_order", True):
        raise ValueError(
            "the DataLoader has in_order=False, so ranks would have parts of different batches in a step; expected "
            "in_order=True, the default"
        )


def _sampler_of(loader: Loader) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _has_length(value: Any) -> bool:
    try:
        len(value)
    except (TypeError, NotImplementedError):  # a BatchSampler whose sampler has none
        return False
    return True


def _start_method(loader: Loader) -> str:
    context: Any = loader.multiprocessing_context
    return "forkserver" if context is None else str(context.get_start_method())


@cache
def _fork_server() -> BaseContext:
    """Return the way to start worker processes where the user gave none."""
    context = multiprocessing.get_context("forkserver")
    # Workers have it as they begin, where each would import it for a second or two. Without the program's own file,
    # which may start MPI.
    context.set_forkserver_preload(["torch.utils.data"])
    return context


class LoaderRows(GraphNode):
    """The rows of a table in the order of a sampler."""

    def __init__(self, table: LoaderTable, order: SamplerOrder) -> None:
        super().__init__(())
        self.form, self.table, self.order, self.own_seed = Form.ROWS, table, order, order.seed
        self.text, self.cardinality = f"from_source({table.text}, {order})", len(order.sampler)
        self.dynamic = True

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the row numbers of a pass in one block."""
        yield row_numbers(self.order.draw(run), self.order.sampler)


class LoaderBatches(GraphNode):
    """The batches of a sampler that gives the rows of each."""

    def __init__(self, table: LoaderTable, order: SamplerOrder) -> None:
        super().__init__(())
        self.form, self.table, self.order, self.own_seed = Form.BATCHES, table, order, order.seed
        self.text, self.cardinality = f"from_source({table.text}, {order})", len(order.sampler)
        self.batched = self.dynamic = True

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the row numbers of each batch."""
        return (row_numbers(keys, self.order.sampler) for keys in self.order.draw(run))

    def spec(self) -> object:
        """Return the spec of a batch."""
        return self.row_table().batch_spec(None)


class LoaderStream(GraphNode):
    """The batches of an iterable dataset, which every rank goes through as a DataLoader does."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(())
        size = "" if loader.batch_size is None else f", batch_size={loader.batch_size}"
        drop = ", drop_last=True" if loader.drop_last else ""
        workers = f", num_workers={loader.num_workers}" if loader.num_workers else ""
        self.text = f"from_source(DataLoader of {type(loader.dataset).__name__}{size}{drop}{workers})"
        self.batched, self.dynamic = loader.batch_size is not None, True
        self._fetcher = _Fetcher(loader)

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the batches of a new pass."""
        return self._fetcher.elements(None, in_workers=True)

    def spec(self) -> object:
        """Return the spec of the first batch of a new pass in this process."""
        for element in self._fetcher.elements(None, in_workers=False):
            return spec_of(element)
        return None


class LoaderTable(RowTable):
    """The rows of a map-style dataset; ``collate_fn`` makes a batch of those of a replica.

    Args:
        loader: The DataLoader.
        has_batches: Whether each row is a batch by itself.
    """

    def __init__(self, loader: Loader, has_batches: bool = False) -> None:
        count = len(loader.dataset)
        super().__init__(count, f"DataLoader of {count} {type(loader.dataset).__name__}")
        self.has_batches = has_batches
        self._fetcher = _Fetcher(loader)

    def row(self, index: int) -> object:
        """Return row ``index``, alone."""
        return next(self._elements(iter((index if self.has_batches else [index],)), False))

    def each(self, numbers: Iterable[int]) -> Iterator[object]:
        """Yield rows that are batches, fetched by the workers of the loader."""
        return self._elements(iter(numbers), True)

    def read(self, index: RowIndex) -> object:
        """Return the rows as one batch, fetched in this process."""
        return next(self._elements(iter((_listed(index),)), False))

    def each_batch(self, indices: Iterable[RowIndex]) -> Iterator[object]:
        """Yield the batches, fetched by the workers of the loader."""
        return self._elements(map(_listed, indices), True)

    def _elements(self, keys: Iterator[object], in_workers: bool) -> Iterator[object]:
        given, taken = 0, 0

        def counted() -> Iterator[object]:
            nonlocal given
            for key in keys:
                given += 1
                yield key

        for element in self._fetcher.elements(counted(), in_workers):
            taken += 1
            yield element
        if taken != given:
            raise stopped("the dataset of the DataLoader")

    def cached(self) -> RowTable:
        """Return the rows that are batches, of which each is read once.

        Raises:
            ValueError: The rows become batches as they are read.
        """
        if self.has_batches:
            return super().cached()
        raise ValueError(
            "cache() of the batches of a DataLoader, whose rows are other ones in each pass; expected rows: "
            "Dataset.from_source(dataset).cache().shuffle().batch(size), or a dataset that keeps its rows itself"
        )

    def batch_spec(self, size: int | None) -> object:
        """Return the spec of a batch, as ``collate_fn`` makes it of the first row."""
        spec = self.spec()
        return None if spec is None else with_rows(spec, size)


def _listed(index: RowIndex) -> list[int]:
    return list(row_indices.rows([index]))


class _Keys:
    """The sampler of a DataLoader whose next pass has these keys.

    None: the dataset is an iterable one.
    """

    def __init__(self, keys: Iterator[object] | None) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[object]:
        return iter(()) if self.keys is None else self.keys


class _Fetcher:
    """DataLoaders that fetch for this rank, with all that the user's says but the order.

    Args:
        loader: The user's.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        # With persistent_workers: the one that has them, and its sampler.
        self._kept: tuple[Loader, _Keys] | None = None
        self._latest_pass: object = None

    def elements(self, keys: Iterator[object] | None, in_workers: bool) -> Iterator[object]:
        """Return the elements of a pass.

        Args:
            keys: The keys of the dataset, in order; None for an iterable one.
            in_workers: Fetch in worker processes, where the user's loader has any.
        """
        if in_workers and self._loader.num_workers and self._loader.persistent_workers:
            return self._by_kept_workers(keys)
        return self._by_own_workers(keys, in_workers and self._loader.num_workers > 0)

    def _by_own_workers(self, keys: Iterator[object] | None, in_workers: bool) -> Iterator[object]:
        elements = _opened(self._made(_Keys(keys), in_workers))
        try:
            yield from _fetched(elements)
        finally:
            if in_workers:
                # A traceback may hold the iterator, and so its processes, for long.
                elements._shutdown_workers()

    def _by_kept_workers(self, keys: Iterator[object] | None) -> Iterator[object]:
        if self._kept is None:
            order = _Keys(keys)
            self._kept = self._made(order, True), order
        fetching, order = self._kept
        order.keys = keys
        self._latest_pass = this_pass = object()
        for element in _fetched(_opened(fetching)):
            yield element
            if self._latest_pass is not this_pass:
                raise RuntimeError(
                    "another pass over this DataLoader has begun, and its workers, which persistent_workers=True "
                    "keeps, serve one pass at a time; expected one pass after the other, or persistent_workers=False"
                )

    def _made(self, order: _Keys, in_workers: bool) -> Loader:
        given = self._loader
        fetched: dict[str, Any] = {"batch_sampler": order}
        if order.keys is None:
            fetched = {"batch_size": given.batch_size, "drop_last": given.drop_last}
        elif given.batch_sampler is None:
            fetched = {"batch_size": None, "sampler": order}
        workers: dict[str, Any] = {}
        if in_workers:
            workers = {
                "num_workers": given.num_workers,
                "prefetch_factor": given.prefetch_factor,
                "persistent_workers": given.persistent_workers,
                "timeout": given.timeout,
                "worker_init_fn": given.worker_init_fn,
                "multiprocessing_context": given.multiprocessing_context or _fork_server(),
                "generator": given.generator if given.generator is None else given.generator.clone_state(),
            }
        made: Loader = sys.modules["torch.utils.data"].DataLoader(
            given.dataset, collate_fn=given.collate_fn, pin_memory=given.pin_memory, **fetched, **workers
        )
        return made

    def __getstate__(self) -> dict[str, object]:
        # Datasets travel to workers, which start processes of their own.
        return {**self.__dict__, "_kept": None, "_latest_pass": None}


def _opened(fetching: Loader) -> Any:
    """Return the iterator of a DataLoader, whose worker processes begin with it."""
    try:
        with warnings.catch_warnings():
            # Which is for programs that may fork.
            warnings.filterwarnings("ignore", "Got pickle error when attempting to start a worker", UserWarning)
            return iter(fetching)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        # Others come from the sampler, which is asked for the first rows here.
        if not any(words in str(error) for words in ("pickle", "local object")):
            raise
        raise TypeError(
            f"the worker processes of the DataLoader cannot be given its dataset: {error}; they are not forked from "
            "this process, in which MPI runs, so expected a dataset, collate_fn and worker_init_fn that can be "
            "pickled: functions and classes at the top of a module; or num_workers=0"
        ) from error


def _fetched(elements: Iterator[object]) -> Iterator[object]:
    """Yield the elements; a broken pipe is that of a worker process."""
    try:
        yield from map(structured, elements)
    except (ConnectionError, EOFError) as error:
        if "in DataLoader worker process" in str(error):  # the dataset itself has raised it there
            raise
        raise RuntimeError(
            f"a worker process of the DataLoader exited unexpectedly ({error!r}), as one does that is killed for the "
            "memory that it takes; expected fewer workers or smaller rows"
        ) from error


def structured(value: Any) -> Any:
    """Return the batch of a ``collate_fn`` with tuples in place of lists.

    Other mappings than dicts become dicts, lists and tuples of texts arrays of Python's objects, lists of numbers
    arrays. Tensors are not copied.

    >>> structured([{"x": [1, 2]}, ("a", "b")])
    ({'x': array([1, 2])}, array(['a', 'b'], dtype=object))
    """
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields") and value:
        if all(isinstance(item, (str, bytes)) for item in value):
            texts = np.empty(len(value), object)
            texts[:] = value
            return texts
        if isinstance(value, list) and all(isinstance(item, NUMBERS) for item in value):
            return list_to_array(value)
    if isinstance(value, Mapping):
        return {key: structured(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        children = [structured(child) for child in value]
        return type(value)(*children) if hasattr(value, "_fields") else tuple(children)
    return value
