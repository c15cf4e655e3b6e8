"""Choice and creation of the algorithm for each reduction."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from typing import Generic, Protocol, TypeVar

from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.node import Node
from mpidist.collectives.reduce import algorithms  # noqa: F401  # registers the algorithms
from mpidist.collectives.reduce.registry import (
    AlgorithmEntry,
    Registry,
    Row,
    Site,
    algorithms_at,
    gpu_algorithms,
    host_algorithms,
    host_names,
    look_up,
    wire_algorithms,
)
from mpidist.core.errors import AlgorithmError
from mpidist.core.options import CommunicationOptions

ALONE = "alone"
"""The algorithm of a single rank."""
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
        self._registry, self.site, self._place, self.row = registry, site, place, row
        self._is_single_rank = site.comm.Get_size() == 1
        self._made: dict[str, A] = {}
        self._failed: set[str] = set()

    def names_for(self, nbytes: int, options: CommunicationOptions, is_common: bool = True) -> tuple[str, ...]:
        """Return the algorithm for a message, then its substitutes, the same on every rank.

        ``is_common`` says whether every algorithm supports the dtype and the operation.
        """
        if options.algorithm is None and self._is_single_rank:
            return (ALONE,)
        name = options.algorithm or look_up(self.row, nbytes)
        found = [
            entry.name
            for entry in self._entries_from(name)
            if (entry.is_ordered or not options.deterministic)
            and (entry.rounds or options.wire_dtype is None or self.site.node.is_alone)
            and (entry.is_general or is_common)
        ]
        # A named algorithm has no substitute. For an unknown one, ``make`` raises an error.
        return tuple(found) if options.algorithm is None else (*found[:1],) or (name,)

    def names_from(self, name: str) -> tuple[str, ...]:
        """Return the algorithm for a name in the table, then its substitutes."""
        return tuple(entry.name for entry in self._entries_from(name))

    def _entries_from(self, name: str) -> list[AlgorithmEntry]:
        registry = self._registry
        first = registry.get("hierarchical" if name in wire_algorithms else name)
        names = [] if first is None else [first.name, *first.instead]
        entries = [registry[other] for other in names if other in registry]
        served = [entry.name if entry.stands_for is None else entry.stands_for(self.site.node) for entry in entries]
        return [registry[other] for other in dict.fromkeys(served) if other in registry]

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
        registry = self._registry
        while (name := self.first_working(names)) not in self._made:
            if name not in registry:
                raise self._not_for_these(name)
            try:
                made = registry[name].make(self.site)
                self._made[name] = (yield from made) if isinstance(made, Generator) else made
            except AlgorithmError as error:
                if name == names[-1]:
                    raise
                self._failed.add(name)
                if self.site.comm.Get_rank() == 0:
                    other = self.first_working(names)
                    how = f"{other!r} instead{', which is slow' if other == 'staged' else ''}"
                    _log.warning("mpidist: %s. Arrays %s are reduced by %s", error, registry.where, how)
        return self._made[name]

    def _not_for_these(self, name: str) -> AlgorithmError:
        here, is_host = self._registry.where, self._registry is host_algorithms
        other = gpu_algorithms if is_host else host_algorithms
        offered = host_names() if is_host else algorithms_at(self._place)
        return AlgorithmError(
            f"algorithm {name!r} is for arrays {other.where}, but the arrays are {here}. Omit algorithm, or use "
            f"one of {', '.join(offered)}"
        )

    def close(self) -> None:
        """Free the algorithms (collective)."""
        for algorithm in self._made.values():
            algorithm.close()
        self._made.clear()
