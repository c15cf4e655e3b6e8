"""Choice and creation of the algorithm for each reduction."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.node import Node
from mpidist.collectives.reduce import algorithms  # noqa: F401  # registers the algorithms
from mpidist.collectives.reduce.registry import AlgorithmEntry, Registry, Row, Site, look_up, not_for, wire_algorithms
from mpidist.core.errors import AlgorithmError
from mpidist.core.options import CommunicationOptions

_log = logging.getLogger("mpidist")


class _Closable(Protocol):
    def close(self) -> None: ...


A = TypeVar("A", bound=_Closable)


def place_of(node: Node, kind: str = "cpu") -> str:
    """Return the name of the table row for a node and a device kind."""
    place = "one_node" if node.is_alone else "several_nodes"
    return f"{place}_gpu" if kind == "gpu" else place


class Choice(Generic[A]):
    """The algorithms of one communicator for arrays of one kind."""

    def __init__(self, registry: Registry, site: Site, place: str, row: Row) -> None:
        self._registry = registry
        self.site = site
        self._place = place
        self.row = row
        self._names: dict[tuple[str, bool, bool, bool, bool], tuple[str, ...]] = {}
        self._made: dict[str, A] = {}
        self._failed: set[str] = set()

    def names_for(self, nbytes: int, options: CommunicationOptions, is_common: bool = True) -> tuple[str, ...]:
        """Return the algorithm for a message, then its substitutes, the same on every rank.

        ``is_common`` says whether every algorithm supports the dtype and the operation.
        """
        requested = options.algorithm
        name = look_up(self.row, nbytes) if requested is None else requested
        key = (name, requested is None, options.deterministic, options.wire_dtype is not None, is_common)
        names = self._names.get(key)
        if names is None:
            names = self._names[key] = self._suiting(*key)
        return names

    def names_from(self, name: str) -> tuple[str, ...]:
        """Return the algorithm for a name in the table, then its substitutes."""
        return self._suiting(name, may_differ=True, is_ordered=False, rounds=False, is_common=True)

    def _suiting(self, name: str, may_differ: bool, is_ordered: bool, rounds: bool, is_common: bool) -> tuple[str, ...]:
        found = [
            entry.name
            for entry in self._entries_from(name)
            if (entry.is_ordered or not is_ordered)
            and (entry.rounds or not rounds or self.site.node.is_alone)
            and (entry.is_general or is_common)
        ]
        return tuple(dict.fromkeys(found)) if may_differ else (*found[:1],) or (name,)

    def _entries_from(self, name: str) -> list[AlgorithmEntry]:
        first = self._registry.get("hierarchical" if wire_algorithms.get(name) else name)
        if first is None:
            return []
        found = [self._registry.get(other) for other in (first.name, *first.instead)]
        serving = [
            entry if entry.stands_for is None else self._registry.get(entry.stands_for(self.site.node))
            for entry in found
            if entry is not None
        ]
        return [entry for entry in serving if entry is not None]

    def first_working(self, names: Sequence[str]) -> str:
        """Return the first algorithm that has not failed to start, else the last."""
        return next((name for name in names if name not in self._failed), names[-1])

    def made(self, names: Sequence[str]) -> A | None:
        """Return the algorithm for the names of a message if it exists already."""
        return self._made.get(self.first_working(names))

    def make(self, names: Sequence[str]) -> Steps[A]:
        """Create the first working algorithm for the names of a message (collective).

        Logs a warning for each substitute. Raises AlgorithmError if no algorithm works.
        """
        while (name := self.first_working(names)) not in self._made:
            entry = self._registry.get(name)
            if entry is None:
                raise not_for(self._registry, name, self._place)
            try:
                self._made[name] = yield from entry.make(self.site)
            except AlgorithmError as error:
                if name == names[-1]:
                    raise
                self._failed.add(name)
                if self.site.comm.Get_rank() == 0:
                    _log.warning("mpidist: %s%s", error, self._registry.say_instead(self.first_working(names)))
        return self._made[name]

    def close(self) -> None:
        """Free the algorithms (collective)."""
        for algorithm in self._made.values():
            algorithm.close()
        self._made.clear()
