"""The rows of each replica: rules A and B, as functions of numbers alone.

Rule A: a batch of B rows is cut into n parts of ceil(B / n) rows; the last parts may be short or empty.
TensorFlow deals part j to worker j mod W; the block assignment gives part j to the worker that owns replica
j.

Rule B: each worker cuts a stream of its own, across the borders of its batches, into sub-batches whose sizes go round
in a cycle; all replicas together take the rows of one global batch in every step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

ASSIGNMENTS = ("tf", "block")


def parts(batch_size: int, num_replicas: int) -> list[tuple[int, int]]:
    """Return the ``(start, stop)`` rows of each of the ``num_replicas`` parts of a batch.

    >>> parts(4, 3)
    [(0, 2), (2, 4), (4, 4)]
    """
    size = -(-batch_size // num_replicas)
    return [(min(j * size, batch_size), min((j + 1) * size, batch_size)) for j in range(num_replicas)]


def replica_parts(replica_counts: Sequence[int], worker_id: int, assignment: str) -> list[int]:
    """Return the number of the part that each local replica of a worker gets.

    Args:
        replica_counts: Local replicas of every worker.
        worker_id: The number of the worker.
        assignment: ``"tf"`` or ``"block"``.

    >>> replica_parts((2, 2), 1, "tf"), replica_parts((2, 2), 1, "block")
    ([1, 3], [2, 3])
    """
    local = range(replica_counts[worker_id])
    if assignment == "tf":
        return [replica * len(replica_counts) + worker_id for replica in local]
    first = sum(replica_counts[:worker_id])
    return [first + replica for replica in local]


def choose_assignment(assignment: str | None, replica_counts: Sequence[int]) -> str:
    """Return the assignment in force: TensorFlow's, or block where local replica counts differ.

    Raises:
        ValueError: ``"tf"`` was asked for and local replica counts differ, or an unknown name.

    >>> choose_assignment(None, (2, 1))
    'block'
    """
    if assignment not in (None, *ASSIGNMENTS):
        raise ValueError(f"assignment is {assignment!r}; expected 'tf', 'block' or None")
    equal = len(set(replica_counts)) == 1
    if assignment == "tf" and not equal:
        raise ValueError(
            f"assignment='tf' deals parts to workers in turn, and the workers have {tuple(replica_counts)} "
            "replicas; unequal counts can only be dealt with with_options(assignment='block')"
        )
    return assignment or ("tf" if equal else "block")


def idle_replicas(batch_size: int, num_replicas: int) -> int:
    """Return the number of replicas without a row of a global batch (rule A).

    >>> idle_replicas(4, 3), idle_replicas(5, 3)
    (1, 0)
    """
    size = -(-batch_size // num_replicas)
    return num_replicas - -(-batch_size // size)


def local_rows(
    batch_size: int, replica_counts: Sequence[int], worker_id: int, assignment: str
) -> list[tuple[int, int]]:
    """Return the ``(start, stop)`` rows of a global batch for each local replica.

    Args:
        batch_size: Rows in this batch, which may be a last, smaller one.
        replica_counts: Local replicas of every worker.
        worker_id: The number of the worker.
        assignment: ``"tf"`` or ``"block"``.

    Source: TensorFlow's autosharding by DATA after its rebatching (rule A).

    >>> [local_rows(4, (2, 2), worker, "tf") for worker in (0, 1)]
    [[(0, 1), (2, 3)], [(1, 2), (3, 4)]]
    """
    every = parts(batch_size, sum(replica_counts))
    return [every[part] for part in replica_parts(replica_counts, worker_id, assignment)]


def sub_batch_sizes(batch_size: int, replica_counts: Sequence[int], worker_id: int) -> list[int]:
    """Return the sizes of a worker's sub-batches, which repeat (rule B).

    A global batch has n sizes, the first of them larger by one where it does not divide. In step s replica j gets size
    number j + s * R (mod n), where R is the number of replicas of a worker; 1 where workers have different numbers,
    so that every replica meets every size.

    Args:
        batch_size: Rows that all replicas take together in a step.
        replica_counts: Local replicas of every worker.
        worker_id: The number of the worker.

    Source: TensorFlow's ``batch_sizes_for_worker``.

    >>> sub_batch_sizes(7, (2, 2), 0), sub_batch_sizes(7, (2, 2), 1)
    ([2, 2, 2, 1], [2, 1, 2, 2])
    """
    count = sum(replica_counts)
    least, larger = divmod(batch_size, count)
    equal = len(set(replica_counts)) == 1
    shift, steps = (replica_counts[0], len(replica_counts)) if equal else (1, count)
    first = sum(replica_counts[:worker_id])
    return [
        least + ((first + replica + step * shift) % count < larger)
        for step in range(steps)
        for replica in range(replica_counts[worker_id])
    ]


def count_sub_batches(rows: int, sizes: Sequence[int]) -> int:
    """Return the number of sub-batches in ``rows`` rows, for sizes that repeat.

    >>> count_sub_batches(10, [2, 2]), count_sub_batches(9, [2, 1, 2, 2])
    (5, 5)
    """
    if rows == 0:
        return 0
    cycles, before = divmod(rows - 1, sum(sizes))  # where the last row comes; sizes of 0 after it are no sub-batches
    return cycles * len(sizes) + bisect_left(list(accumulate(sizes)), before + 1) + 1
