"""Elements that are computed once and kept, in memory or in a file, for all later passes.

What is kept does not depend on the pass in which it is computed: the source is always gone through as in its first pass
of all. So a pass that goes on elsewhere, with nothing kept yet, gets the same elements, and so does every rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from hashlib import sha256
from typing import Any

from mpidist.core.files import replacing
from mpidist.input.element_files import ElementWriter, read_elements, storable
from mpidist.input.elements import owned
from mpidist.input.item_steps import SameItems
from mpidist.input.pipeline import Items, Node, Rows, require_items, require_rows
from mpidist.input.reordering import Pass, Shuffle
from mpidist.input.row_indices import RowIndex
from mpidist.input.row_steps import array_samples


class CachedRows(Rows):
    """Rows in the order of the first pass, each of which is read once."""

    def __init__(self, rows: Rows) -> None:
        super().__init__((rows,), rows.cardinality, "cache()", rows.table.cached())
        self.rows = rows
        self.read_ahead = rows.read_ahead

    def blocks(self, run: Pass) -> Iterator[RowIndex]:
        """Yield the row numbers of the first pass."""
        return self.rows.blocks(run.first())

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return a cache of other rows, with nothing in it."""
        return CachedRows(require_rows(inputs[0]))


class CachedItems(SameItems):
    """Items in the order of the first pass: of batches known by row numbers each row is read once.

    Other elements are kept when one pass over the input has come to its end, and computed again until then.
    """

    source: Items

    def __init__(self, source: Items) -> None:
        super().__init__(source, "cache()")
        self.table = None if source.table is None else source.table.cached()
        self.read_ahead = source.read_ahead
        # The seeds of all shuffles before, and the elements that come of them.
        self._kept: tuple[list[tuple[int, ...]], list[Any]] | None = None

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the items of the first pass."""
        if self.table is not None:
            return self.source.items(run.first())
        seeds = [run.seeds.get(shuffle, (shuffle.seed,)) for shuffle in self.source.shuffles()]
        if self._kept is not None and self._kept[0] == seeds:
            return map(owned, self._kept[1])
        return self._keeping(run, seeds)

    def _keeping(self, run: Pass, seeds: list[tuple[int, ...]]) -> Iterator[Any]:
        kept: list[Any] = []
        for element in self.source.elements(run.first()):
            kept.append(owned(element))
            if len(kept) == self.cardinality:  # whoever knows that does not ask for one more
                self._kept = (seeds, kept)
            yield element
        self._kept = (seeds, kept)

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return a cache of other items, with nothing in it."""
        return CachedItems(require_items(inputs[0]))

    def __getstate__(self) -> dict[str, Any]:
        # Datasets travel to workers, which keep what they read themselves.
        return {**self.__dict__, "_kept": None}


class CachedFile(SameItems):
    """Elements in an order that is the same in every program, kept in a file when a pass over them has ended.

    Shuffles before it that were given no seed have a fixed one, so that the file is right whoever has written it: any
    rank, any program.

    Args:
        source: The elements.
        filename: What the name of the file begins with; the rest tells pipelines apart.
    """

    def __init__(self, source: Node, filename: str) -> None:
        super().__init__(source, "cache(file)")
        self.filename = filename

    def path(self) -> str:
        """Return the name of the file."""
        samples = ",".join(map(str, array_samples(self.source)))
        return f"{self.filename}.{sha256(f'{self.source} {samples}'.encode()).hexdigest()[:16]}"

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the elements of the file, or those of the input while the file is being written."""
        path = self.path()
        if os.path.lexists(path):
            return read_elements(path)
        drawn = dict.fromkeys(shuffle for shuffle in self.source.shuffles() if not shuffle.given)
        seeds = {shuffle: (number,) for number, shuffle in enumerate(drawn)}
        return self._keeping(path, replace(run.first(), seeds=seeds))

    def _keeping(self, path: str, run: Pass) -> Iterator[Any]:
        with ExitStack() as whole:
            # Several ranks may do this at once, with the same result.
            writer = ElementWriter(whole.enter_context(replacing(path)))
            for element in map(storable, self.source.elements(run)):
                writer.add(element)
                if writer.count == self.cardinality:  # whoever knows that does not ask for one more
                    writer.finish()
                    whole.close()
                yield element
            if not writer.is_finished:
                writer.finish()

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return a cache of other elements in a file."""
        return CachedFile(inputs[0], self.filename)

    def shuffles(self) -> Iterator[Shuffle]:
        """Yield nothing: no seed of a program changes the order."""
        return iter(())
