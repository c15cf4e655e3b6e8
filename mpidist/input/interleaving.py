"""Interleaved: the elements of several datasets in turn, maybe read in threads.

Each dataset is made from an element of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice

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

    def _set_up(self) -> None:
        self.own_seed = self.seed
        self.text = f"interleave(cycle_length={self.cycle_length}, block_length={self.block_length})"
        self.cardinality = UNKNOWN if self.cardinality else 0
        self.batched = False
        self.dynamic = True

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the elements of the datasets in turn."""
        openers = (
            partial(self._open, element, run.repetition(number))
            for number, element in enumerate(self.source.elements(run))
        )
        if self.calls == 1 or run.readers is None:
            return self._in_turn(partial(islice, opener(), self.block_length) for opener in openers)
        return self._in_threads(openers, run.readers.workers(self.calls))

    def _in_threads(self, openers: Iterator[Opener], threads: ThreadPoolExecutor) -> Iterator[object]:
        """Yield the elements, read by threads, which end with them.

        Of each dataset that is open a block is read ahead, and so is the first block of as many that come next as
        there are threads.
        """
        readings = (_Reading(opener, self.block_length, threads).block for opener in openers)
        with ending(threads):
            yield from self._in_turn(taken_ahead(readings, self.calls))

    def _in_turn(self, readings: Iterator[Opener]) -> Iterator[object]:
        """Yield the elements of datasets, each a function that returns its next block."""
        cycle: list[Opener | None] = [None] * self.cycle_length
        place = empty_places = 0
        while empty_places < self.cycle_length:
            reading = cycle[place] or next(readings, None)
            cycle[place], given = None, 0
            for value in reading() if reading is not None else ():
                given += 1
                yield value
            empty_places = empty_places + 1 if reading is None else 0
            if given == self.block_length:
                cycle[place] = reading
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


class _Reading:
    """An open dataset of which a thread reads one block ahead."""

    def __init__(self, opener: Opener, size: int, threads: ThreadPoolExecutor) -> None:
        # Opened by the thread that reads the first block.
        self._elements = chain.from_iterable(open_source() for open_source in [opener])
        self._size = size
        self._threads = threads
        self.read_next()

    def read_next(self) -> None:
        """Let a thread read the next block."""
        self._values: list[object] = []
        self._block = self._threads.submit(self._values.extend, islice(self._elements, self._size))

    def block(self) -> Iterator[object]:
        """Yield the block, then raise the error that came after it.

        The next block is under way meanwhile.
        """
        error, values = self._block.exception(), self._values
        # The error is not held here, as its traceback holds this object.
        del self._block
        if error is not None and not isinstance(error, Exception):
            raise error
        if error is None and len(values) == self._size:
            self.read_next()
        yield from values
        try:
            if error is not None:
                raise error
        finally:
            del error  # the traceback holds this frame
