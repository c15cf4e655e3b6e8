"""Which algorithm a collective takes: the table that is shipped, by place and size.

Each row is a list of ``(largest number of bytes, algorithm)``, in rising order; None is any number. The crossing
points are where the measured curves of ``python -m benchmarks`` cross on a 2-core x86-64 virtual machine.
"""

from __future__ import annotations

from typing import NamedTuple

Row = tuple[tuple[int | None, str], ...]

KiB = 1 << 10


class Table(NamedTuple):
    """A row per place."""

    one_node_readable: Row
    """All ranks on one node, where the kernel lets them read one another's memory."""
    one_node: Row
    """All ranks on one node, where it does not."""
    several_nodes: Row
    """Ranks on several nodes."""
    between_nodes: Row
    """What ``hierarchical`` does between nodes, by the bytes of one slice."""


SHIPPED = Table(
    one_node_readable=((256 * KiB, "gather_reduce"), (None, "neighbours")),
    one_node=((256 * KiB, "gather_reduce"), (None, "window")),
    several_nodes=((32 * KiB, "mpi"), (None, "hierarchical")),
    between_nodes=((64 * KiB, "halving_doubling"), (None, "ring")),
)


def look_up(row: Row, nbytes: int) -> str:
    """Return the algorithm of a row for a message.

    >>> look_up(((10, "small"), (None, "large")), 11)
    'large'
    """
    return next(name for limit, name in row if limit is None or nbytes <= limit)
