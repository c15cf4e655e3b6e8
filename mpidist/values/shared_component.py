"""SharedComponent: a variable's one copy on a node, in memory that its ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from mpidist.arrays.convert import Array
from mpidist.collectives.single_writer import SingleWriter
from mpidist.values import first_use, scatter
from mpidist.values.component import ASSIGN, ArrayComponent, Assignment, as_value_of
from mpidist.values.placement import HOST


class VariableWriter(SingleWriter):
    """Turns in which shared variables are written, before which each rank gives them the values that wait for them."""

    @contextmanager
    def turn(self, text: str) -> Iterator[bool]:
        """See ``SingleWriter``."""
        first_use.look()
        with super().turn(text) as writes:
            yield writes


class SharedComponent(ArrayComponent):
    """A copy that several ranks read where it lies. Making, assigning and copying it are collective.

    The first rank's value is what is assigned; those of the others are checked.

    Args:
        writer: Of the ranks that share it.
        array: Its value, in host memory, of the same shape and dtype on every rank; that of the first rank counts.
        name: Of the copy.
        kind: What else of the variable the ranks must agree on.
    """

    def __init__(self, writer: SingleWriter, array: Array, name: str, kind: str) -> None:
        self._writer, self._kind = writer, kind
        # Names need not differ.
        shape = f"{array.dtype}{list(array.shape)}"
        self._label = f"variable {name!r}, {shape} {kind}, number {writer.next_number()} of its strategy"
        super().__init__(writer.shared_copy(array, f"creation of {self._label}"), name, HOST.device)

    def _assign(self, how: Assignment, value: Any) -> SharedComponent:
        doing = f"{how.__name__.lower()} of {self._label}"
        with self._writer.shared_errors(doing):
            array = as_value_of(self, value)
        with self._writer.turn(doing) as writes:
            if writes:
                how(self._array, array)
        return self

    def _scatter(self, how: scatter.ScatterOp, slices: Any) -> SharedComponent:
        doing = f"{how.name} of {self._label}"
        with self._writer.shared_errors(doing):
            checked = scatter.check_slices(slices, self)
        with self._writer.turn(doing) as writes:
            if writes:
                how.apply(self._array, checked)
        return self

    def _start_from(self, value: Array) -> None:
        # Each rank writes the same bytes before it reads any, and before the next turn, in which they may change.
        super()._assign(ASSIGN, value)

    def _copy(self) -> SharedComponent:
        return SharedComponent(self._writer, self._array, self.name, self._kind)

    def _shared_errors(self, doing: str) -> AbstractContextManager[None]:
        return self._writer.shared_errors(doing)
