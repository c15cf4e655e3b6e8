"""Tables of algorithms by size: the shipped one, their checks, their text and JSON.

Each row is a list of ``(largest number of bytes, algorithm)``, in rising order; None is any number. The crossing
points of the shipped table are where the measured curves of ``python -m benchmarks`` cross on a 2-core x86-64 virtual
machine; ``mpidist.tune`` finds those of another (see ``mpidist.collectives.reduce.tuning_file``).
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import NamedTuple

from mpidist.collectives.reduce.registry import Row, algorithms_at

KiB = 1 << 10
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", KiB))


class Table(NamedTuple):
    """The algorithms by message size, a row per place."""

    one_node: Row
    """All ranks on one node."""
    several_nodes: Row
    """Ranks on several nodes."""
    between_nodes: Row
    """The ways between nodes of ``hierarchical``, by the bytes of one slice."""
    one_node_gpu: Row
    """Arrays on GPUs, all ranks on one node."""
    several_nodes_gpu: Row
    """Arrays on GPUs, ranks on several nodes."""


# In the row for arrays on GPUs on several nodes: "nccl" where it has RDMA between them on all ranks, "hierarchical"
# elsewhere, as NCCL would take sockets.
BY_NETWORK = "by_network"
SHIPPED = Table(
    one_node=((None, "hierarchical"),),
    several_nodes=((64 * KiB, "leaders"), (None, "hierarchical")),
    between_nodes=((64 * KiB, "halving_doubling"), (None, "ring")),
    one_node_gpu=((None, "nccl"),),
    several_nodes_gpu=((None, BY_NETWORK),),
)


def resolved(row: Row, has_rdma: bool) -> Row:
    """Return a row without ``BY_NETWORK``.

    >>> resolved(SHIPPED.several_nodes_gpu, has_rdma=True)
    ((None, 'nccl'),)
    """
    way = "nccl" if has_rdma else "hierarchical"
    return tuple((limit, way if name == BY_NETWORK else name) for limit, name in row)


def look_up(row: Row, nbytes: int) -> str:
    """Return the algorithm of a row for a message.

    >>> look_up(((10, "small"), (None, "large")), 11)
    'large'
    """
    return next(name for limit, name in row if limit is None or nbytes <= limit)


# Text -----------------------------------------------------------------------------------------------------------------


def size_text(nbytes: int) -> str:
    """Return a size as text, to a tenth of its unit.

    >>> size_text(256 * KiB), size_text(1536 * KiB), size_text(300)
    ('256 KiB', '1.5 MiB', '300 B')
    """
    for unit, size in _UNITS:
        if nbytes >= size:
            return f"{round(nbytes / size, 1):g} {unit}"
    return f"{nbytes} B"


def row_text(row: Row) -> str:
    """Return a row as text.

    >>> row_text(SHIPPED.several_nodes)
    'up to 64 KiB leaders, above hierarchical'
    """
    if len(row) == 1:
        return f"{row[0][1]} at any size"
    return ", ".join("above " + name if limit is None else f"up to {size_text(limit)} {name}" for limit, name in row)


def table_text(table: Table, place: str) -> str:
    """Return the part of a table that counts at a place, as text."""
    text = row_text(getattr(table, place))
    if place != "several_nodes":
        return text
    return f"{text}; between nodes, slices: {row_text(table.between_nodes)}"


def check_table(table: object) -> None:
    """Raise unless ``table`` is None or a table whose rows are all valid."""
    if table is None:
        return
    if not isinstance(table, Table):
        raise TypeError(f"table is {table!r}; expected None, or what mpidist.tune() returned")
    table_from_json(table_to_json(table), "table")


# JSON -----------------------------------------------------------------------------------------------------------------


def table_to_json(table: Table) -> dict[str, list[list[int | str | None]]]:
    """Return the rows of a table by place, as lists for JSON.

    >>> table_to_json(SHIPPED)["several_nodes"]
    [[65536, 'leaders'], [None, 'hierarchical']]
    """
    return {place: [list(entry) for entry in row] for place, row in table._asdict().items()}


def table_from_json(rows: object, where: str) -> Table:
    """Return the table whose :func:`table_to_json` is ``rows``.

    Args:
        rows: The content of a file.
        where: File and place in it, for the report.

    Raises:
        ValueError: It is no table: rows are missing, sizes do not rise, an algorithm is unknown.
    """
    if not isinstance(rows, dict) or set(rows) != set(Table._fields):
        given = ", ".join(sorted(map(str, rows))) if isinstance(rows, dict) else json.dumps(rows)
        raise ValueError(f"{where} has {given or 'nothing'}; expected {', '.join(Table._fields)}")
    return Table(**{place: _row_from_json(rows[place], place, where) for place in Table._fields})


def _row_from_json(row: object, place: str, where: str) -> Row:
    def wrong(expected: str) -> ValueError:
        return ValueError(f"{where}: {place} is {json.dumps(row)}; expected {expected}")

    if not isinstance(row, list) or not row or not all(isinstance(e, list) and len(e) == 2 for e in row):
        raise wrong('pairs of a largest size and an algorithm, such as [[32768, "mpi"], [null, "hierarchical"]]')
    names = (*algorithms_at(place), *((BY_NETWORK,) if place == "several_nodes_gpu" else ()))
    unknown = [name for _, name in row if name not in names]
    if unknown:
        raise wrong(f"algorithms out of {', '.join(names)}, not {json.dumps(unknown[0])}")
    *limits, last = [limit for limit, _ in row]
    if last is not None:
        raise wrong("null, which is any size, as the last size")
    if not all(type(limit) is int and limit > 0 for limit in limits) or not all(a < b for a, b in pairwise(limits)):
        raise wrong("sizes in bytes that rise from row entry to row entry, and null as the last")
    return tuple((limit, name) for limit, name in row)
