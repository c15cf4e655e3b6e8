"""PyTorch's DataLoader as steps of a dataset. Its sampler chooses rows for its ``collate_fn``.

Each pass fetches the rows of this rank with a new DataLoader, so that workers and page-locked memory are PyTorch's own.
PyTorch is not imported here: a program with a DataLoader has imported it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import random
import sys
import threading
import warnings
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from functools import cache
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np

from mpidist.arrays.convert import NUMBERS
from mpidist.core.seed import next_seed
from mpidist.input import row_indices
from mpidist.input.batching import Batched
from mpidist.input.elements import list_to_array, spec_of, stopped, with_rows
from mpidist.input.nodes import Form, GraphNode, Pass, RowSource, Seed
from mpidist.input.row_indices import Numbers, RowIndex

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    Loader: TypeAlias = DataLoader[Any]

# Samplers draw from random sources of the process, which one pass at a time may use.
_drawing = threading.Lock()


def is_loader(value: object) -> TypeGuard[Loader]:
    """Return whether ``value`` is a DataLoader of PyTorch."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(value, data.DataLoader)


def unbatched_source(value: object) -> str | None:
    """Return the code that makes batches of a dataset of PyTorch or Hugging Face. None for other objects."""
    data, hugging_face = sys.modules.get("torch.utils.data"), sys.modules.get("datasets")
    # A program may have its own module `datasets`.
    kinds = tuple(getattr(hugging_face, name, type(None)) for name in ("Dataset", "IterableDataset"))
    if isinstance(value, kinds) and hasattr(value, "with_format"):
        return "torch.utils.data.DataLoader(dataset.with_format('torch'), batch_size=global_batch_size)"
    if data is not None and isinstance(value, data.Dataset):
        shuffle = "" if isinstance(value, data.IterableDataset) else ", shuffle=True"
        return f"torch.utils.data.DataLoader(dataset, batch_size=global_batch_size{shuffle})"
    return None


def loader_node(loader: Loader) -> GraphNode:
    """Return the node of the batches of a DataLoader."""
    _check(loader)
    data = sys.modules["torch.utils.data"]
    if isinstance(loader.dataset, data.IterableDataset):
        return LoaderStream(loader)
    sampler = _sampler_of(loader)
    if loader.batch_size is not None and type(sampler) is data.BatchSampler:
        rows = LoaderItems(LoaderTable(loader), SamplerOrder(loader, loader.sampler), Form.ROWS)
        return Batched((rows,), loader.batch_size, loader.drop_last)
    if loader.batch_sampler is None and not isinstance(sampler, data.BatchSampler):
        return LoaderItems(LoaderTable(loader, has_batches=True), SamplerOrder(loader, sampler), Form.ROWS)
    return LoaderItems(LoaderTable(loader), SamplerOrder(loader, sampler), Form.BATCHES)


def check_shared(node: GraphNode) -> None:
    """Raise ValueError for a DataLoader whose sampler omits the rows of other ranks."""
    for step in node.graph():
        for sampler in step.order.samplers if isinstance(step, LoaderItems) else ():
            if getattr(sampler, "num_replicas", None) not in (None, 1):
                name = type(sampler).__name__
                raise ValueError(
                    f"{node} has a {name} of {sampler.num_replicas} replicas, which leaves out the rows of other ranks "
                    "before the batches are divided over ranks. Use a sampler that is the same on all ranks: "
                    "DataLoader(dataset, batch_size=global_batch_size, shuffle=True). To keep the sampler: strategy."
                    "distribute_datasets_from_function(lambda context: loader)"
                )


def _check(loader: Loader) -> None:
    data = sys.modules["torch.utils.data"]
    kind = type(loader)
    if kind.__iter__ is not data.DataLoader.__iter__:
        raise TypeError(
            f"a {kind.__module__}.{kind.__name__} has its own __iter__. Use a torch.utils.data.DataLoader with the "
            "same dataset and sampler, or a stream, which every rank reads as a whole: "
            "mpidist.Dataset.from_generator(lambda: iter(loader))"
        )
    is_stream = isinstance(loader.dataset, data.IterableDataset)
    for name, value in () if is_stream else (("dataset", loader.dataset), ("sampler", _sampler_of(loader))):
        if not _has_length(value):
            raise TypeError(
                f"the {name} of the DataLoader, {value!r} of type {type(value).__name__}, has no __len__, and the "
                "order of a whole pass is drawn before it begins, the same on all ranks. Add __len__, or use an "
                "IterableDataset without a sampler"
            )
    context: Any = loader.multiprocessing_context
    if loader.num_workers and context is not None and context.get_start_method() == "fork":
        raise ValueError(
            "the DataLoader has multiprocessing_context='fork', and a process in which MPI runs must not be forked. "
            "Use multiprocessing_context='forkserver', the default here, or 'spawn'"
        )
    if not getattr(loader, "in_order", True):
        raise ValueError(
            "the DataLoader has in_order=False, so ranks would have parts of different batches in a step. Use "
            "in_order=True, the default"
        )


def _sampler_of(loader: Loader) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _has_length(value: Sized) -> bool:
    try:
        len(value)
    except (TypeError, NotImplementedError):  # a BatchSampler whose sampler has no length
        return False
    return True


class LoaderItems(GraphNode):
    """The rows of a table, or batches of them, in the order of a sampler."""

    def __init__(self, table: LoaderTable, order: SamplerOrder, form: Form) -> None:
        super().__init__(())
        self.form, self.chosen_from, self.order, self.own_seed = form, table, order, order.seed
        self.text, self.cardinality = f"from_source({table.text}, {order})", len(order.sampler)
        self.batched, self.dynamic = form is Form.BATCHES, True

    def items(self, run: Pass) -> Iterator[object]:
        """Yield all row numbers in one block, or those of each batch."""
        keys = self.order.draw(run)
        for block in [keys] if self.form is Form.ROWS else keys:
            yield row_numbers(block, self.order.sampler)

    def spec(self) -> object:
        """Return the spec of a row or a batch."""
        return super().spec() if self.form is Form.ROWS else self.table.batch_spec(None)


class LoaderStream(GraphNode):
    """The batches of an iterable dataset, which every rank reads as a whole."""

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
        """Return the spec of the first batch, which is read in this process."""
        return next(map(spec_of, self._fetcher.elements(None, in_workers=False)), None)


class LoaderTable(RowSource):
    """The rows of a map-style dataset. If ``has_batches``, each row is already a batch."""

    def __init__(self, loader: Loader, has_batches: bool = False) -> None:
        count = len(loader.dataset)
        super().__init__(count, f"DataLoader of {count} {type(loader.dataset).__name__}")
        self.has_batches = has_batches
        self._fetcher = _Fetcher(loader)

    def row(self, index: int) -> object:
        """Return row ``index``."""
        return next(self._elements(iter((index if self.has_batches else [index],)), False))

    def each(self, numbers: Iterable[int], run: Pass) -> Iterator[object]:
        """Yield rows that are batches, fetched by the workers of the loader."""
        return self._elements(iter(numbers), True)

    def read(self, index: RowIndex, run: Pass) -> object:
        """Return the rows as one batch, fetched in this process."""
        return next(self._elements(iter((list(row_indices.rows([index])),)), False))

    def each_batch(self, indices: Iterable[RowIndex], run: Pass) -> Iterator[object]:
        """Yield the batches, fetched by the workers of the loader."""
        return self._elements((list(row_indices.rows([index])) for index in indices), True)

    def each_step(self, steps: Iterable[list[RowIndex]], run: Pass) -> Iterator[list[object]]:
        """Yield the batches of each step, which the workers of the loader read ahead."""
        source = iter(steps)
        keys: deque[list[int]] = deque()
        # The steps that workers have been asked for: which parts have rows, and whether a row was added.
        asked: deque[tuple[list[bool], bool]] = deque()

        def ask(is_ahead: bool) -> bool:
            step = next(source, None)
            if step is None:
                return False
            has_rows = [len(index) > 0 for index in step]
            keys.extend(list(row_indices.rows([index])) for index in step if len(index))
            # Reading ahead would not end if no step had rows for this rank. So it fetches a row that is dropped.
            is_padded = is_ahead and not any(has_rows)
            keys.extend([[0]] * is_padded)
            asked.append((has_rows, is_padded))
            return True

        def ahead() -> Iterator[object]:
            while keys or ask(True):
                yield keys.popleft()

        batches = self._elements(ahead(), True)
        while asked or ask(False):
            has_rows, is_padded = asked.popleft()
            if is_padded:
                next(batches)
            yield [next(batches) if has else None for has in has_rows]

    def _elements(self, keys: Iterator[object], in_workers: bool) -> Iterator[object]:
        missing = 0

        def counted() -> Iterator[object]:
            nonlocal missing
            for key in keys:
                missing += 1
                yield key

        for element in self._fetcher.elements(counted(), in_workers):
            missing -= 1
            yield element
        if missing:
            raise stopped("the dataset of the DataLoader")

    def caching(self) -> GraphNode | None:
        """Return None for rows that are batches. Other rows raise ValueError, because each pass has other batches."""
        if self.has_batches:
            return None
        raise ValueError(
            "cache() of the batches of a DataLoader, whose rows are other ones in each pass. Cache rows: "
            "Dataset.from_source(dataset).cache().shuffle().batch(size), or use a dataset that keeps its rows"
        )

    def batch_spec(self, size: int | None) -> object:
        """Return the spec of a batch, as ``collate_fn`` makes it of the first row."""
        spec = self.spec()
        return None if spec is None else with_rows(spec, size)


class _Keys:
    """The sampler of a DataLoader whose next pass has these keys. None: the dataset is iterable."""

    def __init__(self, keys: Iterator[object] | None) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[object]:
        return iter(()) if self.keys is None else self.keys


class _Fetcher:
    """DataLoaders with the user's options that fetch given keys."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        # The DataLoader with persistent workers, and its sampler.
        self._kept: tuple[Loader, _Keys] | None = None
        self._latest_pass: object = None

    def elements(self, keys: Iterator[object] | None, in_workers: bool) -> Iterator[object]:
        """Yield the elements of a pass, maybe fetched in the user's worker processes."""
        in_workers = in_workers and self._loader.num_workers > 0
        if in_workers and self._loader.persistent_workers:
            yield from self._by_persistent_workers(keys)
            return
        elements = _opened(self._new_loader(_Keys(keys), in_workers))
        try:
            yield from _fetched(elements)
        finally:
            if in_workers:
                # A traceback may hold the iterator, and so its processes.
                elements._shutdown_workers()

    def _by_persistent_workers(self, keys: Iterator[object] | None) -> Iterator[object]:
        if self._kept is None:
            order = _Keys(keys)
            self._kept = self._new_loader(order, True), order
        loader, order = self._kept
        order.keys = keys
        self._latest_pass = this_pass = object()
        for element in _fetched(_opened(loader)):
            yield element
            if self._latest_pass is not this_pass:
                raise RuntimeError(
                    "another pass over this DataLoader has begun, and its persistent workers serve one pass at a time. "
                    "Finish a pass before the next one, or use persistent_workers=False"
                )

    def _new_loader(self, order: _Keys, in_workers: bool) -> Loader:
        given = self._loader
        options: dict[str, Any] = {"batch_sampler": order}
        if order.keys is None:
            options = {"batch_size": given.batch_size, "drop_last": given.drop_last}
        elif given.batch_sampler is None:
            options = {"batch_size": None, "sampler": order}
        if in_workers:
            options |= {
                "num_workers": given.num_workers,
                "prefetch_factor": given.prefetch_factor,
                "persistent_workers": given.persistent_workers,
                "timeout": given.timeout,
                "worker_init_fn": given.worker_init_fn,
                "multiprocessing_context": given.multiprocessing_context or _fork_server(),
                "generator": given.generator if given.generator is None else given.generator.clone_state(),
            }
        made: Loader = sys.modules["torch.utils.data"].DataLoader(
            given.dataset, collate_fn=given.collate_fn, pin_memory=given.pin_memory, **options
        )
        return made

    def __getstate__(self) -> dict[str, object]:
        # A worker that receives the dataset starts its own processes.
        return {**self.__dict__, "_kept": None, "_latest_pass": None}


@cache
def _fork_server() -> BaseContext:
    """Return the default start method of worker processes: a server without MPI forks them."""
    context = multiprocessing.get_context("forkserver")
    # Importing PyTorch takes 1 to 2 s in each worker. The program's own module, which may start MPI, is not imported.
    context.set_forkserver_preload(["torch.utils.data"])
    return context


def _opened(loader: Loader) -> Any:
    """Return the iterator of a DataLoader, which starts its worker processes."""
    try:
        with warnings.catch_warnings():
            # The advice of this warning is for programs that may fork.
            warnings.filterwarnings("ignore", "Got pickle error when attempting to start a worker", UserWarning)
            return iter(loader)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        # Other errors come from the sampler, which is asked for the first rows here.
        if not any(words in str(error) for words in ("pickle", "local object")):
            raise
        raise TypeError(
            f"the worker processes of the DataLoader cannot be given its dataset: {error}. They are not forked from "
            "this process, in which MPI runs. Use a dataset, collate_fn and worker_init_fn that can be pickled: "
            "functions and classes at the top of a module. Or use num_workers=0"
        ) from error


def _fetched(elements: Iterator[object]) -> Iterator[object]:
    try:
        yield from map(structured, elements)
    except (ConnectionError, EOFError) as error:  # the pipe of a worker process
        if "in DataLoader worker process" in str(error):  # the dataset itself has raised it there
            raise
        raise RuntimeError(
            f"a worker process of the DataLoader exited unexpectedly ({error!r}), probably killed for its memory use. "
            "Use fewer workers or smaller rows"
        ) from error


def structured(value: Any) -> Any:
    """Convert a batch of a ``collate_fn`` to tuples, dicts and arrays. Tensors are not copied.

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


def _is_random_source(value: object) -> bool:
    kinds = (sys.modules["torch"].Generator, np.random.Generator, np.random.RandomState, random.Random)
    return isinstance(value, kinds)


def _get_state(source: Any) -> object:
    if isinstance(source, sys.modules["torch"].Generator):
        return source.get_state().numpy().tobytes()
    if isinstance(source, np.random.Generator):
        return source.bit_generator.state
    return source.getstate() if hasattr(source, "getstate") else source.get_state()


def _set_state(source: Any, state: Any) -> None:
    if isinstance(source, sys.modules["torch"].Generator):
        source.set_state(sys.modules["torch"].frombuffer(bytearray(state), dtype=sys.modules["torch"].uint8))
    elif isinstance(source, np.random.Generator):
        source.bit_generator.state = state
    else:
        (source.setstate if hasattr(source, "setstate") else source.set_state)(state)


@contextlib.contextmanager
def _seeded_process(seed: int) -> Iterator[None]:
    """Seed the random sources of the process, and restore their states after the block."""
    sources = (sys.modules["torch"].default_generator, np.random, random)
    before = [_get_state(source) for source in sources]
    sources[0].manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)
    try:
        yield
    finally:
        for source, state in zip(sources, before, strict=True):
            _set_state(source, state)


class SamplerOrder:
    """The order of each pass, which depends on the number of the pass only.

    A generator of the user continues from pass to pass, as in a DataLoader. Samplers without a generator draw from the
    random sources of the process, seeded with the seed of the step, on which ranks agree.
    """

    def __init__(self, loader: Loader, sampler: Any) -> None:
        self.sampler = sampler
        self.samplers = list(_samplers(sampler))
        self._loader_generator = loader.generator
        values = [loader.generator, *(value for each in self.samplers for value in _attributes(each))]
        # The objects, and not functions of them, because datasets are pickled.
        self._generators = list({id(value): value for value in values if _is_random_source(value)}.values())
        self._first_states = self._states()
        self._next = (0, self._first_states)
        drawn = next_seed()
        # torch.manual_seed() determines the seed if mpidist.set_seed() was not called.
        self.seed = Seed(sys.modules["torch"].randint(1 << 62, ()).item() if drawn is None else drawn)

    def draw(self, run: Pass) -> list[Any]:
        """Return the rows or batches of a pass."""
        number = sum(run.key)
        with _drawing:
            self._advance_to(number)
            found = self._drawn(int(self.seed.generator(run).integers(1 << 62)))
            self._next = (number + 1, self._states())
        if len(found) != len(self.sampler):
            raise ValueError(
                f"{type(self.sampler).__name__} gave {len(found)} items in a pass, and its __len__ says "
                f"{len(self.sampler)}; expected as many, because ranks count their steps by it"
            )
        return found

    def _advance_to(self, number: int) -> None:
        """Set the generators of the user to their states at the beginning of pass ``number``."""
        if not self._generators:
            return
        if number < self._next[0]:
            self._next = (0, self._first_states)
        begun, states = self._next
        for generator, state in zip(self._generators, states, strict=True):
            _set_state(generator, state)
        for _ in range(begun, number):
            self._drawn(0)

    def _drawn(self, seed: int) -> list[Any]:
        with _seeded_process(seed):
            items = iter(self.sampler)
            if self._loader_generator is not None:
                # A DataLoader draws a seed for its workers before it asks for the first row.
                torch = sys.modules["torch"]
                torch.empty((), dtype=torch.int64).random_(generator=self._loader_generator)
            return list(items)

    def _states(self) -> list[object]:
        return list(map(_get_state, self._generators))

    def __str__(self) -> str:
        # Ranks and resumed programs whose generators begin with other states have other orders.
        start = f" from {zlib.crc32(pickle.dumps(self._first_states)):08x}" if self._generators else ""
        return f"{type(self.sampler).__name__} of {len(self.sampler)}{start}"


def _samplers(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and the samplers in it."""
    yield sampler
    for value in _attributes(sampler):
        if isinstance(value, sys.modules["torch.utils.data"].Sampler):
            yield from _samplers(value)


def _attributes(value: object) -> list[object]:
    return list(vars(value).values()) if hasattr(value, "__dict__") else []


def row_numbers(keys: Sequence[object], sampler: object) -> Numbers:
    """Convert the keys of a sampler to row numbers."""
    found = np.array(keys) if len(keys) else np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TypeError(
            f"{type(sampler).__name__} gave {keys[0]!r} of type {type(keys[0]).__name__}; expected row numbers, or, as "
            "batch_sampler, lists of row numbers"
        )
    return found.astype(np.int64)
