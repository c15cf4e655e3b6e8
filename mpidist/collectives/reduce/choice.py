"""Choice and creation of the algorithm for each reduction."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.node import Node
from mpidist.collectives.reduce import algorithms  # noqa: F401  # registers the algorithms
from mpidist.collectives.reduce.registry import (
    Registry,
    Row,
    Site,
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
        self._names: dict[tuple[str, bool, bool, bool, bool], tuple[str, ...]] = {}
        self._made: dict[str, A] = {}
        self._failed: set[str] = set()

    def names_for(self, nbytes: int, options: CommunicationOptions, is_common: bool = True) -> tuple[str, ...]:
        """Return the algorithm for a message, then its substitutes, the same on every rank.

        ``is_common`` says whether every algorithm supports the dtype and the operation.
        """
        requested = options.algorithm
        if requested is None and self._is_single_rank:
            return (ALONE,)
        name = look_up(self.row, nbytes) if requested is None else requested
        key = (name, requested is None, options.deterministic, options.wire_dtype is not None, is_common)
        if key not in self._names:
            self._names[key] = self._suitable(*key)
        return self._names[key]

    def names_from(self, name: str) -> tuple[str, ...]:
        """Return the algorithm for a name in the table, then its substitutes."""
        return self._suitable(name, may_differ=True, is_ordered=False, rounds=False, is_common=True)

    def _suitable(
        self, name: str, may_differ: bool, is_ordered: bool, rounds: bool, is_common: bool
    ) -> tuple[str, ...]:
        registry, node = self._registry, self.site.node
        first = registry.get("hierarchical" if name in wire_algorithms else name)
        found = []
        for other in () if first is None else (first.name, *first.instead):
            entry = registry.get(other)
            if entry is not None and entry.stands_for is not None:
                entry = registry.get(entry.stands_for(node))
            if entry is None or (is_ordered and not entry.is_ordered) or not (entry.is_general or is_common):
                continue
            if entry.rounds or not rounds or node.is_alone:
                found.append(entry.name)
        return tuple(dict.fromkeys(found)) if may_differ else (*found[:1],) or (name,)

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
                self._made[name] = yield from registry[name].make(self.site)
            except AlgorithmError as error:
                if name == names[-1]:
                    raise
                self._failed.add(name)
                if self.site.comm.Get_rank() == 0:
                    other = self.first_working(names)
                    _log.warning("mpidist: %s. Arrays %s are reduced by %r instead", error, registry.where, other)
        return self._made[name]

    def _not_for_these(self, name: str) -> AlgorithmError:
        here, other, offered = self._registry, host_algorithms, self._registry.at(self._place)
        if here is host_algorithms:
            other, offered = gpu_algorithms, host_names()
        return AlgorithmError(
            f"algorithm {name!r} is for arrays {other.where}, but the arrays are {here.where}. Omit algorithm, or use "
            f"one of {', '.join(offered)}"
        )

    def close(self) -> None:
        """Free the algorithms (collective)."""
        for algorithm in self._made.values():
            algorithm.close()
        self._made.clear()
