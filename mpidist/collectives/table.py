"""Which algorithm an all-reduce takes: the table that is shipped, by place and size.

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


SHIPPED = Table(
    one_node_readable=((192 * KiB, "mpi"), (None, "neighbours")),
    one_node=((1024 * KiB, "mpi"), (None, "window")),
    several_nodes=((None, "mpi"),),
)

# Below this nothing but the MPI call is ever best, and nobody needs to know who shares a node.
SMALLEST_CHOICE = 64 * KiB


def look_up(row: Row, nbytes: int | None) -> str:
    """Return the algorithm of a row for a message; None, for the largest ones, is also for arrays in shared memory.

    >>> look_up(((10, "small"), (None, "large")), 11)
    'large'
    """
    return next(name for limit, name in row if limit is None or (nbytes is not None and nbytes <= limit))
