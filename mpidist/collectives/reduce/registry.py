"""The registry of algorithms, and the tables that choose one by message size.

Each file in ``reduce/algorithms`` (arrays in host memory), and ``gpu/reduce.py``, registers its algorithms when it is
imported. The latter is imported when a name of an algorithm or an array on a GPU needs it.

A row of a table is a list of ``(largest number of bytes, algorithm)`` in rising order, and None matches any size. The
limits of the shipped table are the crossing points of the curves that ``python -m benchmarks`` measured on a 2-core
x86-64 virtual machine. ``mpidist.tune`` measures them for other machines. Inter-node algorithms are chosen by predicted
time (see ``mpidist.collectives.reduce.cost_model``), so a table holds the costs of messages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.waiting import Comm, Steps
from mpidist.collectives.node.node import Node
from mpidist.collectives.node.packing import PackedReduction
from mpidist.collectives.reduce.cost_model import SHIPPED_NETWORK, Cost, Network
from mpidist.core.options import CommunicationOptions, ReduceOp

Row = tuple[tuple[int | None, str], ...]

# The rows of a table, for arrays in host memory and on GPUs.
HOST_PLACES = ("one_node", "several_nodes")
GPU_PLACES = ("one_node_gpu", "several_nodes_gpu")
KiB = 1 << 10


class Algorithm(Protocol):
    """The interface of an algorithm for arrays in host memory, with defaults."""

    takes_replicas: bool = False
    """Whether the algorithm combines the replicas of a rank, to sum them in replica order."""
    allows_overlap: bool = False
    """Whether the results of a job may overlap its inputs. If not, overlapping inputs are copied first."""

    def start(self, job: PackedReduction) -> Callable[[int], None] | None:
        """Return a function that starts the job during the handshake, given its id, or None."""
        return None

    def all_reduce(self, job: PackedReduction) -> Steps[list[Array]]:
        """Reduce a job over all ranks after the handshake.

        Returns the flat results in the pieces of the input: the targets of the job, if any. ``job.took`` may be set to
        the name of the chosen inter-node algorithm.
        """

    def close(self) -> None:
        """Free the memory and communicators of the algorithm (collective)."""
        return None  # noqa: RET501  # a body makes it not abstract


class Wire(Protocol):
    """An inter-node algorithm: an all-reduce over the ranks of one rail."""

    def all_reduce(self, source: Array, flat: Array, op: ReduceOp, chunk: int, residual: Array | None) -> Steps[None]:
        """Reduce ``source`` over all ranks into ``flat``.

        Args:
            source: Input of this rank. It is not changed unless it is ``flat``.
            flat: Output.
            op: Operation.
            chunk: Number of the slice, which distinguishes concurrent slices.
            residual: Rounding error of the previous call, added to the input and replaced by the error of this call.
                None if rounding errors are dropped.
        """


@dataclass(frozen=True)
class Site:
    """The ranks of an algorithm, with the costs of messages between their nodes."""

    comm: Comm
    node: Node
    between_nodes: Network


@dataclass(frozen=True)
class AlgorithmEntry:
    """The registration of one algorithm."""

    name: str
    make: Callable[..., Any]
    """Returns the algorithm for a site, or the steps that create it (collective).

    The steps raise AlgorithmError on all ranks if it does not work there. An inter-node algorithm is created from a
    communicator, the ranks of a rail, the position of this rank, and the wire dtype if the algorithm rounds.
    """
    places: tuple[str, ...]
    """The rows of a table that may name it, or ``between_nodes``. Empty for an internal algorithm."""
    tuned_at: tuple[str, ...] = ()  # rows for which ``mpidist.tune`` measures it
    tuned_to: float = math.inf  # bytes of the largest message that ``mpidist.tune`` measures
    is_ordered: bool = False  # whether sums are formed in a fixed order
    rounds: bool = False  # whether it can send sums between nodes in 16 bits
    is_general: bool = True  # whether it supports every dtype and operation
    instead: tuple[str, ...] = ("mpi", "hierarchical")
    """Substitutes if creating it fails. The first one that works is used."""
    stands_for: Callable[[Node], str] | None = None
    """Returns the algorithm that the name means on a node."""
    cost: Cost | None = None  # returns the rounds of an inter-node algorithm


class Registry(dict[str, AlgorithmEntry]):
    """Algorithms by name, for arrays in one kind of memory."""

    def __init__(self, where: str) -> None:
        self.where = where

    def register(self, entry: AlgorithmEntry) -> None:
        """Add an algorithm under a new name."""
        if entry.name in self:
            raise ValueError(f"algorithm {entry.name!r} for arrays {self.where} exists already. Use a new name")
        if "between_nodes" in entry.places and entry.cost is None:
            raise ValueError(f"inter-node algorithm {entry.name!r} has no cost, which the choice needs. Pass cost=")
        self[entry.name] = entry

    @property
    def names(self) -> tuple[str, ...]:
        """The names that users may pass, sorted."""
        return tuple(sorted(name for name, entry in self.items() if entry.places))

    @property
    def costs(self) -> dict[str, Cost]:
        """The costs of the inter-node algorithms."""
        return {name: entry.cost for name, entry in self.items() if entry.cost is not None}


host_algorithms = Registry("in host memory")
gpu_algorithms = Registry("on GPUs")
wire_algorithms = Registry("between nodes")
"""Inter-node algorithms. As ``algorithm=`` each name selects ``hierarchical`` with that inter-node algorithm."""


def _all_entries() -> list[AlgorithmEntry]:
    _register_gpu_algorithms()
    return [*host_algorithms.values(), *gpu_algorithms.values(), *wire_algorithms.values()]


def _register_gpu_algorithms() -> None:
    import_module("mpidist.collectives.gpu.reduce")


def algorithms_at(place: str) -> tuple[str, ...]:
    """Return the algorithms that the row of a place may name, sorted."""
    return tuple(sorted(entry.name for entry in _all_entries() if place in entry.places))


def candidates_at(place: str, nbytes: int = 0) -> tuple[str, ...]:
    """Return the algorithms that ``mpidist.tune`` compares at a place for a message, MPI first."""
    names = [entry.name for entry in _all_entries() if place in entry.tuned_at and nbytes <= entry.tuned_to]
    return tuple(sorted(names, key=lambda name: (name != "mpi", name)))


def host_names() -> tuple[str, ...]:
    """Return all names for arrays in host memory, sorted."""
    return tuple(sorted((*host_algorithms.names, *wire_algorithms.names)))


def gpu_names() -> tuple[str, ...]:
    """Return the names that are only for arrays on GPUs, sorted."""
    _register_gpu_algorithms()
    return tuple(sorted(set(gpu_algorithms.names) - set(host_algorithms.names)))


def check_options(options: CommunicationOptions) -> None:
    """Raise ValueError for unknown or incompatible options."""
    name = options.algorithm
    if name is not None and name not in (*host_names(), *gpu_names()):
        raise ValueError(
            f"unknown algorithm {name!r}. Use one of {', '.join(host_names())}, for arrays on GPUs "
            f"{', '.join(gpu_names())}, or None"
        )
    entries = {**host_algorithms, **wire_algorithms}
    for option, ability in (("wire_dtype", "rounds"), ("deterministic", "is_ordered")):
        able = [each for each in host_names() if getattr(entries[each], ability)]
        if getattr(options, option) and name is not None and name not in able:
            raise ValueError(
                f"{option}={getattr(options, option)!r} does not support algorithm={name!r}. Omit algorithm, or use "
                f"one of {', '.join(able)}"
            )
    if options.error_feedback and options.wire_dtype is None:
        raise ValueError("error_feedback=True has no effect without a wire_dtype. Pass wire_dtype='bfloat16' as well")


# Tables ---------------------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """The algorithms by message size, a row per place."""

    one_node: Row
    """All ranks on one node."""
    several_nodes: Row
    """Ranks on several nodes."""
    between_nodes: Network
    """The costs by which ``hierarchical`` chooses its inter-node algorithm."""
    one_node_gpu: Row
    """Arrays on GPUs, all ranks on one node."""
    several_nodes_gpu: Row
    """Arrays on GPUs, ranks on several nodes."""


_PLACES = (*HOST_PLACES, *GPU_PLACES)
# For arrays on GPUs on several nodes: "nccl" if NCCL has RDMA on all ranks, else "hierarchical", because NCCL would use
# sockets.
BY_NETWORK = "by_network"
SHIPPED = Table(
    one_node=((None, "hierarchical"),),
    several_nodes=((64 * KiB, "leaders"), (None, "hierarchical")),
    between_nodes=SHIPPED_NETWORK,
    one_node_gpu=((None, "nccl"),),
    several_nodes_gpu=((None, BY_NETWORK),),
)


def resolved(row: Row, has_rdma: bool) -> Row:
    """Replace ``BY_NETWORK`` in a row.

    >>> resolved(SHIPPED.several_nodes_gpu, has_rdma=True)
    ((None, 'nccl'),)
    """
    by_network = "nccl" if has_rdma else "hierarchical"
    return tuple((limit, by_network if name == BY_NETWORK else name) for limit, name in row)


def look_up(row: Row, nbytes: int) -> str:
    """Return the algorithm of a row for a message."""
    return next(name for limit, name in row if limit is None or nbytes <= limit)


def size_text(nbytes: int) -> str:
    """Return a size as text, to a tenth of its unit.

    >>> size_text(256 * KiB), size_text(1536 * KiB), size_text(300)
    ('256 KiB', '1.5 MiB', '300 B')
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", KiB)):
        if nbytes >= size:
            return f"{round(nbytes / size, 1):g} {unit}"
    return f"{nbytes} B"


def row_text(row: Row) -> str:
    """Return a row as text."""
    if len(row) == 1:
        return f"{row[0][1]} at any size"
    return ", ".join("above " + name if limit is None else f"up to {size_text(limit)} {name}" for limit, name in row)


def table_text(table: Table, place: str) -> str:
    """Return the row of a place as text, on several nodes with the main costs."""
    text = row_text(getattr(table, place))
    if place != "several_nodes":
        return text
    network = table.between_nodes
    latency, rate = 1e6 * (network.latency + network.overhead), network.bandwidth / 1e6
    return f"{text}; between nodes {latency:.3g} us a message, {rate:.3g} MB/s a node"


def network_text(network: Network) -> str:
    """Return all costs between nodes as text.

    >>> network_text(SHIPPED_NETWORK).split("; ")[0]
    'latency 140 us, overhead 90 us, meeting 25 us, exchange 40 us'
    """
    times = ("latency", "overhead", "meeting", "exchange")
    seconds = ", ".join(f"{name} {1e6 * getattr(network, name):.3g} us" for name in times)
    rates = {"of a node": network.bandwidth, "to a far one": network.far_bandwidth, "of a rank": network.rail_bandwidth}
    rates |= {"reduced": 1 / network.reduce, "copied": 1 / network.copy}
    return f"{seconds}; MB/s {', '.join(f'{name} {rate / 1e6:.3g}' for name, rate in rates.items())}"


def check_table(table: object) -> None:
    """Raise unless ``table`` is None or a valid table."""
    if table is None:
        return
    if not isinstance(table, Table):
        raise TypeError(f"table is {table!r}. Pass None or the result of mpidist.tune()")
    table_from_json(table_to_json(table), "table")


def table_to_json(table: Table) -> dict[str, object]:
    """Convert a table to lists and dicts for JSON."""
    rows = {place: [list(entry) for entry in getattr(table, place)] for place in _PLACES}
    return {**rows, "between_nodes": table.between_nodes._asdict()}


def table_from_json(rows: object, where: str) -> Table:
    """Parse and validate the output of :func:`table_to_json`. ``where`` locates it in errors."""
    if not isinstance(rows, dict) or set(rows) != set(Table._fields):
        given = ", ".join(sorted(map(str, rows))) if isinstance(rows, dict) else json.dumps(rows)
        raise ValueError(f"{where} has {given or 'no rows'}. The rows must be {', '.join(Table._fields)}")
    network = _network_from_json(rows["between_nodes"], where)
    return Table(between_nodes=network, **{place: _row_from_json(rows[place], place, where) for place in _PLACES})


def _network_from_json(costs: object, where: str) -> Network:
    names = Network._fields
    if (
        not isinstance(costs, dict)
        or set(costs) != set(names)
        or not all(type(cost) in (int, float) and 0 < cost < math.inf for cost in costs.values())
    ):
        raise ValueError(
            f"{where}: between_nodes is {json.dumps(costs)}. It must have {', '.join(names)}, each a number above 0"
        )
    return Network(**{name: float(costs[name]) for name in names})


def _row_from_json(row: object, place: str, where: str) -> Row:
    def wrong(fix: str) -> ValueError:
        return ValueError(f"{where}: {place} is {json.dumps(row)}. {fix}")

    if not isinstance(row, list) or not row or not all(isinstance(e, list) and len(e) == 2 for e in row):
        raise wrong('Use pairs of a largest size and an algorithm, such as [[32768, "mpi"], [null, "hierarchical"]]')
    names = (*algorithms_at(place), *((BY_NETWORK,) if place == "several_nodes_gpu" else ()))
    unknown = [name for _, name in row if name not in names]
    if unknown:
        raise wrong(f"Replace {json.dumps(unknown[0])} by one of the algorithms {', '.join(names)}")
    *limits, last = [limit for limit, _ in row]
    if last is not None:
        raise wrong("Use null, which matches any size, as the last size")
    if not all(type(limit) is int and limit > 0 for limit in limits) or not all(a < b for a, b in pairwise(limits)):
        raise wrong("Use rising sizes in bytes, and null as the last size")
    return tuple((limit, name) for limit, name in row)
