"""Save a checkpoint with all ranks, each of which holds and writes no more than its part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.checkpoint.agreement import Agreement, Extent, Plan, digest, plan_parts
from mpidist.checkpoint.alignment import describe_container
from mpidist.checkpoint.collecting import Leaves, is_on_read
from mpidist.checkpoint.formats import Manifest, Tensor, describe
from mpidist.checkpoint.writer import Job, Pending
from mpidist.values.placement import on_host

# What travels at a time of an array of which only the first rank's value counts.
_WINDOW_BYTES = 2 << 20


@dataclass(frozen=True)
class SaveOptions:
    """The way to save.

    Attributes:
        is_sharded: Whether all ranks write.
        is_async: Whether a thread writes.
        kept: For the manifest; that of the first rank counts.
        finish: Called on the first rank when the checkpoint is there, in the thread that wrote it.
        told: Called on every rank with the result of ``finish``.
        failed: Called on every rank where it fails, once that is known.
    """

    is_sharded: bool = False
    is_async: bool = False
    kept: tuple[float, tuple[str, ...]] | None = None
    finish: Callable[[Manifest], list[str]] | None = None
    told: Callable[[list[str]], None] | None = None
    failed: Callable[[], None] | None = None


class Save:
    """One save, on one rank: ``start`` and then ``settle``, both collective.

    All agree on the objects; a rank that writes has a job, for this thread or one of its own; all learn how
    that went. So a save is two collectives, and two more where several ranks write or a thread does.

    Args:
        agreement: Of the ranks that save; their strategy is in scope.
        leaves: The objects.
        path: The directory to be.
        options: The way to save.

    Attributes:
        path: The directory to be, as the first rank has it as soon as that has begun to write.
        counter_before: The save counter where it fails after it was started.
    """

    def __init__(self, agreement: Agreement, leaves: Leaves, path: Path, options: SaveOptions) -> None:
        self._agreement, self._leaves, self._options = agreement, leaves, options
        self.path = str(path)
        self.counter_before = 0
        self._is_divided = False
        self._job: Job | None = None
        self._pending: Pending | None = None

    def start(self, next_sequence: Callable[[], int], number: int, run_calls: int) -> None:
        """Collect all values, and begin to write where several ranks or a thread write.

        Args:
            next_sequence: Called on the first rank.
            number: Of the save.
            run_calls: For the manifest.
        """
        agreement, leaves, options = self._agreement, self._leaves, self._options
        values: dict[str, object] = {}
        tensors: dict[str, Tensor] = {}
        names: list[str] = []
        own_id = agreement.extended.local_replica_ids[0] if options.is_sharded else 0

        def look() -> list[int]:
            values.update(leaves.values())
            tensors.update(describe_tensors(leaves))
            if options.is_sharded:  # who writes what depends on all sizes
                names.extend(f"{key} of shape {those.shape} and dtype {those.dtype}" for key, those in tensors.items())
            else:
                names.extend(leaves.names_of_all_ranks())
            return [own_id, digest(names)]

        told = agreement.every_rank_does(look)
        agreement.check_same(names, [theirs for _, theirs in told])
        self._is_divided = options.is_sharded and len(told) > 1
        rank, ranks, plan = 0, 1, {key: [(0, 0, tensor.size)] for key, tensor in tensors.items()}
        if self._is_divided:
            rank, ranks = [first for first, _ in told].index(own_id), len(told)
            sizes = {key: value.dtype.itemsize for key, value in (*leaves.variables.items(), *leaves.arrays.items())}
            plan = plan_parts({key: Extent(tensor.size, sizes[key]) for key, tensor in tensors.items()}, ranks)
        is_writer = agreement.is_chief or self._is_divided
        # There may be no memory for a copy on this rank.
        with agreement.extended.shared_errors("saving"):
            arrays = self._read(plan, rank if is_writer else None)

        def manifest() -> Manifest:
            sequence, is_shared = next_sequence(), agreement.extended.spans_ranks
            known = manifest_of(leaves, {}, values, number, run_calls)
            return replace(known, sequence=sequence, kept=options.kept, is_shared=is_shared)

        if is_writer:
            self._job = Job(Path(self.path), rank, ranks, plan, tensors, arrays, manifest, options.finish)
        if self._is_divided or options.is_async:
            self._begin_on_all_ranks()

    def _begin_on_all_ranks(self) -> None:
        """Tell all ranks where to write, and start threads."""
        job = self._job
        try:
            self.path, directory = self._agreement.chief_does(lambda: [self.path, job.begin() if job else ""])
        except BaseException:
            if job is not None:
                job.discard()
            raise
        if job is not None:
            job.directory = Path(directory)
            if self._options.is_async:
                self._pending = Pending(job, self.path)

    def settle(self) -> None:
        """Write, or wait for the thread that does, and tell each other.

        Raises:
            Exception: That of this rank.
            PeerError: That of another.
        """
        agreement, writer, options = self._agreement, self._pending or self._job, self._options
        try:
            records = agreement.every_rank_does(writer.part) if writer is not None and self._is_divided else None
            self.path, result = agreement.chief_does(lambda: (self.path, writer.result(records) if writer else None))
        except BaseException:
            if self._pending is not None:
                self._pending.settle(failed=True)
            elif self._job is not None:
                self._job.discard()
            if options.failed is not None:
                options.failed()
            raise
        if self._pending is not None:
            self._pending.settle(failed=False)
        if options.told is not None and result is not None:
            options.told(result)

    def _read(self, plan: Plan, writer: int | None) -> dict[str, Array]:
        """Return the parts that rank ``writer`` writes.

        Reading an ON_READ variable takes all ranks, and so does a divided array, which is the first rank's.
        """
        wanted = {key: (start, stop) for key, parts in plan.items() for rank, start, stop in parts if rank == writer}
        arrays = {}
        for key, variable in self._leaves.variables.items():
            if is_on_read(variable):
                array = variable.as_array()
                if key in wanted:
                    part = self._part_of(array, *wanted[key])
                    # A view would keep all of it.
                    arrays[key] = part if part.base is None or part.size == array.size else part.copy()
            elif key in wanted:
                arrays[key] = self._part_of(variable.as_array(), *wanted[key])
        for key, array in sorted(self._leaves.arrays.items()):
            is_dealt = plan[key] != [(0, 0, array.size)]
            part = self._dealt(array, plan[key], writer) if is_dealt else array
            if key in wanted:
                arrays[key] = part if is_dealt else self._part_of(array, *wanted[key])
        return arrays

    def _part_of(self, array: Array, start: int, stop: int) -> Array:
        part = _elements(array, start, stop)
        if not self._options.is_async:
            return part
        copied = on_host(part)
        # The program may change it while a thread writes; what came from a device is a copy already.
        needs_copy = copied is part
        return np.array(copied) if needs_copy else copied

    def _dealt(self, array: Array, parts: list[tuple[int, int, int]], writer: int | None) -> Array:
        """Return this rank's part of the first rank's array, which travels in pieces (collective)."""
        comm = self._agreement.extended.communicator
        assert comm is not None
        start, stop = next(((start, stop) for rank, start, stop in parts if rank == writer), (0, 0))
        mine = np.empty(stop - start, array.dtype)
        step = _WINDOW_BYTES // array.dtype.itemsize
        for begin in range(0, array.size, step):
            end = min(begin + step, array.size)
            counts = [0] * comm.size
            for rank, first, last in parts:
                counts[rank] = max(0, min(last, end) - max(first, begin))
            sent = on_host(_elements(array, begin, end)) if writer == 0 else np.empty(0, array.dtype)
            offset = max(start, begin) - start
            comm.scatter(sent.reshape(-1), counts=counts, out=mine[offset : offset + counts[comm.rank]])
        return mine.reshape(array.shape) if mine.size == array.size else mine


def _elements(array: Array, start: int, stop: int) -> Array:
    """Return the array, or elements of it as a vector; copied only where they do not lie in order."""
    if stop - start == array.size:
        return array
    is_in_order = not isinstance(array, np.ndarray) or array.flags.c_contiguous
    return (array.reshape(-1) if is_in_order else array.flat)[start:stop]


def manifest_of(
    leaves: Leaves, tensors: dict[str, Tensor], values: dict[str, object], number: int, run_calls: int
) -> Manifest:
    """Return the manifest of objects, as far as they tell."""
    containers = {key: describe_container(container) for key, container in leaves.containers.items()}
    iterators, classes = tuple(leaves.iterators), leaves.classes()
    return Manifest(
        0, number, tensors, values, containers, iterators, run_calls=run_calls, classes=classes, links=leaves.links
    )


def describe_tensors(leaves: Leaves) -> dict[str, Tensor]:
    """Return the manifest's entries for the variables and arrays, as yet without parts."""
    policies = dict(leaves.awaited)
    for key, variable in leaves.variables.items():
        policies[key] = variable.synchronization.name, variable.aggregation.name
    those = {**leaves.variables, **leaves.arrays}
    return {key: describe(each.shape, each.dtype, *policies.get(key, ())) for key, each in those.items()}
