"""Interleaved: the elements of several datasets in turn, maybe read in threads.

Each dataset is made from an element of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from mpidist.input.elements import call
from mpidist.input.graph import UNKNOWN, GraphNode, Pass, Seed
from mpidist.input.threads import ending, taken_ahead

Opener = Callable[[], Iterator[object]]


@dataclass(eq=False, repr=False)
class Interleaved(GraphNode):
    """The elements of datasets that a function makes, ``cycle_length`` open at a time.

    Places in the cycle are visited in turn; each gives ``block_length`` elements of its dataset, then it is the turn of
    the next. A dataset that ends leaves its place to the next one of the input, which begins when the place is visited
    again. That is the order of tf.data's deterministic interleave.

    Args:
        node_fn: Makes the node of a dataset from an element of the input.
        cycle_length: The number of datasets that are open at a time.
        block_length: The number of elements from one before it is the turn of the next.
        seed: Stands in for seeds in the datasets that were not given, so that ranks can agree.
        calls: The number of threads that read them; 1: they are read by the thread that asks.
    """

    node_fn: Callable[..., GraphNode]
    cycle_length: int
    block_length: int
    seed: Seed
    calls: int = 1
    _first: GraphNode | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.text = f"interleave(cycle_length={self.cycle_length}, block_length={self.block_length})"
        self.cardinality = UNKNOWN if self.cardinality else 0
        self.batched = False
        self.dynamic = True

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the elements of the datasets in turn."""
        if self.calls == 1 or run.readers is None:
            return self._in_turn(run)
        threads = run.readers.workers(self.calls)
        openers = (
            partial(self._open, element, run.repetition(number))
            for number, element in enumerate(self.source.elements(run))
        )
        return interleave_in_threads(openers, self.cycle_length, self.block_length, threads, self.calls)

    def _in_turn(self, run: Pass) -> Iterator[object]:
        inputs = enumerate(self.source.elements(run))
        cycle: list[Iterator[object] | None] = [None] * self.cycle_length
        more, empty_places = True, 0
        place = 0
        while more or empty_places < self.cycle_length:
            elements = cycle[place]
            if elements is None and more:
                number, element = next(inputs, (None, None))
                more = number is not None
                if number is not None:
                    elements = cycle[place] = self._open(element, run.repetition(number))
            empty_places = empty_places + 1 if elements is None else 0
            if elements is not None:
                given = 0
                for value in islice(elements, self.block_length):
                    given += 1
                    yield value
                if given < self.block_length:
                    cycle[place] = None
            place = (place + 1) % self.cycle_length

    def _open(self, element: object, run: Pass) -> Iterator[object]:
        node: GraphNode = call(self.node_fn, element)
        own = (*self.seed.entropy(run), *run.key[-1:])
        seeds = {seed: (*own, number) for number, seed in enumerate(node.seeds()) if not seed.given}
        return node.elements(replace(run, seeds=seeds) if seeds else run)

    def first(self) -> GraphNode | None:
        """Return the dataset of the first element of the input, or None."""
        if self._first is None:
            self._first = next((call(self.node_fn, element) for element in self.source.elements(Pass())), None)
        return self._first

    def spec(self) -> object:
        """Return the spec of the first dataset that has an element."""
        for element in self.source.elements(Pass()):
            spec = call(self.node_fn, element).spec()
            if spec is not None:
                return spec
        return None

    def seeds(self) -> Iterator[Seed]:
        """Yield the seeds of the input, then the one for the datasets."""
        yield from super().seeds()
        yield self.seed


class _Reading:
    """An open dataset of which a thread reads one block ahead."""

    def __init__(self, opener: Opener, size: int, threads: ThreadPoolExecutor) -> None:
        self._opener: Opener | None = opener
        self._elements: Iterator[object] = iter(())
        self._size = size
        self._threads = threads
        self.read_next()

    def read_next(self) -> None:
        """Let a thread read the next block."""
        self._values: list[object] = []
        self._block: Future[None] = self._threads.submit(self._read)

    def take(self) -> tuple[list[object], Exception | None]:
        """Return the block, and the error that came after it.

        The error is not held here, as its traceback holds this object.
        """
        block = self._block
        del self._block
        error = block.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        return self._values, error

    def _read(self) -> None:
        if self._opener is not None:
            self._elements, self._opener = self._opener(), None
        self._values.extend(islice(self._elements, self._size))


def interleave_in_threads(
    openers: Iterable[Opener], cycle_length: int, block_length: int, threads: ThreadPoolExecutor, ahead: int
) -> Iterator[object]:
    """Yield ``block_length`` elements of each of ``cycle_length`` datasets in turn.

    See ``Interleaved``. Of each dataset that is open a block is read ahead, and so is the first block of the ``ahead``
    datasets that come next. Ends ``threads``.

    Args:
        openers: A function for each dataset, called in a thread, that returns its elements.
        cycle_length: The number of datasets that are open at a time.
        block_length: The number of elements from one before it is the turn of the next.
        threads: The threads that read them.
        ahead: The number of datasets that are opened before it is their turn.
    """
    coming = taken_ahead((_Reading(opener, block_length, threads) for opener in openers), ahead)
    cycle: list[_Reading | None] = [None] * cycle_length
    place = empty_places = 0
    with ending(threads):
        while empty_places < cycle_length:
            reading = cycle[place] or next(coming, None)
            empty_places = empty_places + 1 if reading is None else 0
            if reading is not None:
                values, error = reading.take()
                cycle[place] = None
                if error is None and len(values) == block_length:
                    reading.read_next()
                    cycle[place] = reading
                yield from values
                if error is not None:
                    try:
                        raise error
                    finally:
                        del error, reading  # the traceback holds this frame
            place = (place + 1) % cycle_length
