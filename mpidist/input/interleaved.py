"""Interleaved: the elements of several datasets in turn, each made from an element of the input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from mpidist.input.elements import call
from mpidist.input.parallel_interleave import interleave_in_threads
from mpidist.input.pipeline import Items, Node
from mpidist.input.reordering import UNKNOWN, Pass, Shuffle


class Interleaved(Items):
    """The datasets that a function makes of the elements of the input, ``cycle_length`` of them open at a time.

    Places in the cycle are visited in turn; each gives ``block_length`` elements of its dataset, then it is the turn of
    the next. A dataset that ends leaves its place to the next one of the input, which begins when the place is visited
    again. That is the order of tf.data's deterministic interleave.

    Args:
        source: The input.
        node_fn: Makes the node of a dataset from an element of the input.
        cycle_length: How many datasets are open at a time.
        block_length: How many elements come from one before it is the turn of the next.
        calls: How many threads read them; 1: they are read by the thread that asks.
        seeds: Its seed stands in for those of shuffles in the datasets that were given none, so that ranks can agree.
    """

    def __init__(
        self,
        source: Node,
        node_fn: Callable[..., Node],
        cycle_length: int,
        block_length: int,
        seeds: Shuffle,
        calls: int = 1,
    ) -> None:
        text = f"interleave(cycle_length={cycle_length}, block_length={block_length})"
        super().__init__((source,), UNKNOWN if source.cardinality else 0, text)
        self.source = source
        self.node_fn = node_fn
        self.cycle_length = cycle_length
        self.block_length = block_length
        self.seeds = seeds
        self.calls = calls
        self.batched = False
        self.dynamic = True
        self._first: Node | None = None

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the elements of the datasets in turn."""
        if self.calls == 1 or run.readers is None:
            return self._in_turn(run)
        threads = run.readers.workers(self.calls)
        openers = (
            partial(self._open, element, run.repetition(number))
            for number, element in enumerate(self.source.elements(run))
        )
        return interleave_in_threads(openers, self.cycle_length, self.block_length, threads, self.calls)

    def _in_turn(self, run: Pass) -> Iterator[Any]:
        inputs = enumerate(self.source.elements(run))
        cycle: list[Iterator[Any] | None] = [None] * self.cycle_length
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

    def _open(self, element: Any, run: Pass) -> Iterator[Any]:
        node: Node = call(self.node_fn, element)
        own = run.seeds.get(self.seeds, (self.seeds.seed,))
        seeds = {
            shuffle: (*own, *run.key[-1:], number)
            for number, shuffle in enumerate(node.shuffles())
            if not shuffle.given
        }
        return node.elements(replace(run, seeds=seeds) if seeds else run)

    def first(self) -> Node | None:
        """Return the dataset of the first element of the input, None where there is none."""
        if self._first is None:
            self._first = next((call(self.node_fn, element) for element in self.source.elements(Pass())), None)
        return self._first

    def spec(self) -> Any:
        """Return that of the first dataset that has an element."""
        for element in self.source.elements(Pass()):
            spec = call(self.node_fn, element).spec()
            if spec is not None:
                return spec
        return None

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return the same function of other elements."""
        return Interleaved(inputs[0], self.node_fn, self.cycle_length, self.block_length, self.seeds, self.calls)

    def shuffles(self) -> Iterator[Shuffle]:
        """Yield those of the input, and what stands for those of the datasets."""
        yield from super().shuffles()
        yield self.seeds
