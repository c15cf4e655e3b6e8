"""The registry of algorithms: their names, places, abilities and makers.

An algorithm is one file, in ``reduce/algorithms`` for arrays in host memory or in ``gpu/algorithms`` for those on GPUs,
which registers its algorithms. All files there are imported with the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Protocol, TypeVar

from mpidist.arrays.dtypes import Array, DType
from mpidist.collectives.mpi.mpi_types import message, tag_of
from mpidist.collectives.mpi.waiting import Comm, Steps, until_all_done
from mpidist.collectives.node.node import Node
from mpidist.collectives.node.packing import PackedReduction
from mpidist.collectives.reduce.cost_model import Cost, Network
from mpidist.core.errors import AlgorithmError
from mpidist.core.options import CommunicationOptions, ReduceOp

S = TypeVar("S")
T = TypeVar("T")


class Algorithm(Protocol):
    """The interface of an algorithm for arrays in host memory, with defaults.

    Attributes:
        takes_replicas: Whether it combines the replicas of a rank itself, so that sums are formed in replica order.
    """

    takes_replicas: bool = False

    def start(self, job: PackedReduction) -> Callable[[int], None] | None:
        """Return the function that begins a reduction while all ranks meet.

        Given the id of the meeting; None if nothing does.
        """
        return None

    def all_reduce(self, job: PackedReduction) -> Steps[list[Array]]:
        """Reduce a job over all ranks, which have met.

        Returns the flat results, as cut as the input. They are the targets of the job, if it has any. ``job.took`` may
        name the part of it that was chosen.
        """

    def close(self) -> None:
        """Free the memory and communicators of the algorithm (collective), if it has any."""


class Wire(Protocol):
    """A way between nodes: an all-reduce over the ranks of one rail."""

    def all_reduce(self, source: Array, flat: Array, op: ReduceOp, chunk: int, residual: Array | None) -> Steps[None]:
        """Reduce ``source`` over all ranks into ``flat``.

        Args:
            source: This rank's input; not changed, unless it is ``flat``.
            flat: The result.
            op: The operation.
            chunk: Tells several apart that are on their way.
            residual: Of the size of ``flat``: the loss of rounding last time, added to the input, and replaced by the
                loss now; None to let it go. For a way that rounds.
        """


class Rail:
    """The ranks of one rail, among which a way between nodes goes.

    Args:
        comm: The communicator.
        ranks: The ranks of the rail, in it.
        position: Of this rank among them.
        wire_dtype: In which sums travel, for a way that rounds.
    """

    def __init__(self, comm: Comm, ranks: list[int], position: int, wire_dtype: DType | None = None) -> None:
        self._comm, self._ranks, self._position, self._wire_dtype = comm, ranks, position, wire_dtype

    def _exchange(self, received: Mapping[int, Array], sent: Mapping[int, Array], chunk: int) -> Steps[None]:
        """Receive and send arrays by position on the rail, but for this rank's own.

        ``chunk`` tells several exchanges apart that are on their way.
        """
        comm, ranks, me, tag = self._comm, self._ranks, self._position, tag_of(chunk)
        requests = [comm.Irecv(self._message(array), ranks[at], tag) for at, array in received.items() if at != me]
        requests += [comm.Isend(self._message(array), ranks[at], tag) for at, array in sent.items() if at != me]
        yield from until_all_done(requests)

    def _message(self, array: Array) -> Any:
        return message(array)


Row = tuple[tuple[int | None, str], ...]

HOST_PLACES = ("one_node", "several_nodes")
"""The rows of a table for arrays in host memory."""
GPU_PLACES = ("one_node_gpu", "several_nodes_gpu")
"""The rows of a table for arrays on GPUs."""


@dataclass(frozen=True)
class Site:
    """The place of work of an algorithm.

    Attributes:
        comm: The communicator.
        node: Its node of this rank.
        between_nodes: The costs of messages between nodes.
    """

    comm: Comm
    node: Node
    between_nodes: Network


@dataclass(frozen=True)
class AlgorithmEntry:
    """One algorithm.

    Args:
        name: The name that users give.
        make: Returns the steps that make it for a site (collective), which end in an AlgorithmError on all ranks where
            it does not work. A way between nodes is made at once, of a communicator, the ranks of a rail there, the
            position of this one among them, and, where it rounds, the dtype in which sums travel.
        places: The rows of a table that may name it, or ``between_nodes``; none for one that nobody names.
        tuned_at: The rows for which ``mpidist.tune`` measures it.
        tuned_to: Bytes of the largest message for which that does so; None for any.
        is_ordered: Whether sums are formed in a fixed order.
        rounds: Whether it can send sums between nodes in 16 bits.
        is_general: Whether it takes every dtype and operation that can be reduced.
        instead: Names of its substitutes, of which the first that works is taken.
        stands_for: Returns the name of the entry that does its work on a node, if that is another.
        cost: Returns the rounds of a way between nodes, by which it is chosen; see ``cost_model``.
    """

    name: str
    make: Callable[..., Any]
    places: tuple[str, ...]
    tuned_at: tuple[str, ...] = ()
    tuned_to: int | None = None
    is_ordered: bool = False
    rounds: bool = False
    is_general: bool = True
    instead: tuple[str, ...] = ("mpi", "hierarchical")
    stands_for: Callable[[Node], str] | None = None
    cost: Cost | None = None


class Registry(dict[str, AlgorithmEntry]):
    """Algorithms by name.

    Args:
        where: Where the arrays lie that they take.
        say_instead: Returns the end of a warning, given the name of the algorithm that takes the place of another.
    """

    def __init__(self, where: str, say_instead: Callable[[str], str]) -> None:
        self.where, self.say_instead = where, say_instead

    def register(self, entry: AlgorithmEntry) -> None:
        """Add an algorithm; its name must be new."""
        if entry.name in self:
            raise ValueError(f"there is an algorithm {entry.name!r} for arrays {self.where}; expected a new name")
        if "between_nodes" in entry.places and entry.cost is None:
            raise ValueError(f"way {entry.name!r} between nodes has no cost, by which it is chosen; give it one")
        self[entry.name] = entry

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that users may give, sorted."""
        return tuple(sorted(name for name, entry in self.items() if entry.places))

    def at(self, place: str) -> tuple[str, ...]:
        """Return the names that a row of the table may have, sorted."""
        return tuple(sorted(name for name, entry in self.items() if place in entry.places))

    def is_tuned_to(self, name: str, nbytes: int) -> bool:
        """Return whether a message is measured, unless the algorithm is another registry's."""
        limit = self[name].tuned_to if name in self else None
        return limit is None or nbytes <= limit

    def tuned_at(self, place: str) -> tuple[str, ...]:
        """Return the names that are measured for a row of the table, sorted."""
        return tuple(sorted(name for name, entry in self.items() if place in entry.tuned_at))

    @property
    def costs(self) -> dict[str, Cost]:
        """Return the costs of the ways between nodes."""
        return {name: entry.cost for name, entry in self.items() if entry.cost is not None}


def _say_instead(name: str) -> str:
    substitute = "MPI's own call" if name == "mpi" else repr(name)
    return f"; {substitute} is taken in its place"


def _say_instead_on_gpus(name: str) -> str:
    how = "in host memory, which is slow" if name == "staged" else f"by {name!r} instead"
    return f". Arrays on GPUs are reduced {how}"


host_algorithms = Registry("in host memory", _say_instead)
gpu_algorithms = Registry("on GPUs", _say_instead_on_gpus)
wire_algorithms = Registry("between nodes", _say_instead)
"""Ways between nodes; as the name of an algorithm each is ``hierarchical`` with that way."""


def at_once(make: Callable[[S], T]) -> Callable[[S], Steps[T]]:
    """Return the ``make`` of an algorithm that needs no messages to be made.

    Such as a class that takes a site.
    """

    def made(site: S) -> Steps[T]:
        yield from ()
        return make(site)

    return made


def import_files(package: str, path: Iterable[str]) -> None:
    """Import all files of a package of algorithms, which register them."""
    for module in iter_modules(path):
        import_module(f"{package}.{module.name}")


def algorithms_at(place: str) -> tuple[str, ...]:
    """Return the algorithms that the row of a place may name."""
    registries = (host_algorithms, gpu_algorithms, wire_algorithms)
    return next((names for registry in registries if (names := registry.at(place))), ())


def candidates_at(place: str) -> tuple[str, ...]:
    """Return the algorithms that ``mpidist.tune`` compares at a place.

    MPI's own call, which they are to beat, comes first.
    """
    registries = (host_algorithms, gpu_algorithms, wire_algorithms)
    names = [name for registry in registries for name in registry.tuned_at(place)]
    return tuple(sorted(names, key=lambda name: (name != "mpi", name)))


def host_names() -> tuple[str, ...]:
    """Return all names for arrays in host memory, sorted."""
    return tuple(sorted((*host_algorithms.names, *wire_algorithms.names)))


def gpu_names() -> tuple[str, ...]:
    """Return the names for arrays on GPUs alone, sorted."""
    return tuple(sorted(set(gpu_algorithms.names) - set(host_algorithms.names)))


def check_name(name: str | None) -> None:
    """Raise ValueError unless there is an algorithm of that name, or it is None."""
    if name is not None and name not in (*host_names(), *gpu_names()):
        raise ValueError(
            f"algorithm is {name!r}; expected one of {', '.join(host_names())}, for arrays on GPUs "
            f"{', '.join(gpu_names())}, or None"
        )


def not_for(registry: Registry, name: str, place: str) -> AlgorithmError:
    """Return the error of an algorithm for arrays that lie elsewhere."""
    is_host = registry is host_algorithms
    other, offered = (gpu_algorithms, host_names()) if is_host else (host_algorithms, registry.at(place))
    return AlgorithmError(
        f"algorithm {name!r} is for arrays {other.where}, and was asked for arrays {registry.where}; leave algorithm "
        f"out, or take one of {', '.join(offered)}"
    )


def check_options(options: CommunicationOptions) -> None:
    """Raise for options that name something unknown, or two things that do not go together."""
    check_name(options.algorithm)
    for option, ability in (("wire_dtype", "rounds"), ("deterministic", "is_ordered")):
        if getattr(options, option) and options.algorithm is not None:
            entries = [host_algorithms.get(name) or wire_algorithms.get(name) for name in host_names()]
            able = [entry.name for entry in entries if entry is not None and getattr(entry, ability)]
            if options.algorithm not in able:
                raise ValueError(
                    f"{option}={getattr(options, option)!r} and algorithm={options.algorithm!r} do not go together; "
                    f"leave algorithm out, or take one of {', '.join(able)}"
                )
    if options.error_feedback and options.wire_dtype is None:
        raise ValueError("error_feedback=True makes good what a wire_dtype loses; give wire_dtype='bfloat16' as well")
