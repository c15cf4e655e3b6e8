"""Save: the steps of the ranks to save a checkpoint together, and the division of the writing among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.checkpoint.agreement import Agreement, digest
from mpidist.checkpoint.alignment import describe_container
from mpidist.checkpoint.job import Job, Pending, Plan
from mpidist.checkpoint.leaves import Leaves, is_on_read
from mpidist.checkpoint.manifest import Manifest, Tensor, describe
from mpidist.values.placement import on_host

# Tensors of less than twice this are not cut: small parts cost more than they bring.
SMALLEST_PART_BYTES = 1 << 16


def _nothing(*_: Any) -> None:
    return None


@dataclass(frozen=True)
class SaveOptions:
    """How to save.

    Attributes:
        is_sharded: Whether all ranks write.
        is_async: Whether a thread writes.
        kept: For the manifest; that of the first rank counts.
        finish: Called on the first rank when the checkpoint is there, in whichever thread wrote it.
        told: Called on every rank with the result of ``finish``.
        failed: Called on every rank where it fails, once that is known.
    """

    is_sharded: bool = False
    is_async: bool = False
    kept: tuple[float, tuple[str, ...]] | None = None
    finish: Callable[[Manifest], Any] = _nothing
    told: Callable[[Any], None] = _nothing
    failed: Callable[[], None] = _nothing


class Save:
    """One save, on one rank: ``start`` and then ``settle``, both collective.

    All agree on the objects; a rank that writes has a job, for this thread or one of its own; all learn how
    that went. So a save is two collectives, and two more where several ranks write or a thread does.

    Args:
        agreement: Of the ranks that save; their strategy is in scope.
        leaves: The objects.
        path: The directory to be.
        options: How.

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
        values: dict[str, Any] = {}
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
        rank, ranks = 0, 1
        if options.is_sharded:
            rank, ranks = [first for first, _ in told].index(own_id), len(told)
        self._is_divided = ranks > 1
        is_writer = agreement.is_chief or self._is_divided
        sizes = {key: value.dtype.itemsize for key, value in (*leaves.variables.items(), *leaves.arrays.items())}
        extents = {key: Extent(tensor.size, sizes[key], key in leaves.variables) for key, tensor in tensors.items()}
        plan = plan_parts(extents, ranks)
        wanted = {key: part for key, parts in plan.items() for part in parts if is_writer and part[0] == rank}
        # There may be no memory for a copy on this rank.
        with agreement.before_collective():
            arrays = self._read(wanted)

        def manifest() -> Manifest:
            return Manifest(
                next_sequence(),
                number,
                {},
                values,
                containers={key: describe_container(container) for key, container in leaves.containers.items()},
                iterators=tuple(leaves.iterators),
                kept=options.kept,
                is_shared=agreement.extended.spans_ranks,
                run_calls=run_calls,
                classes=leaves.classes(),
                links=leaves.links,
            )

        if is_writer:
            self._job = Job(Path(self.path), rank, ranks, plan, tensors, arrays, manifest, options.finish)
        if self._is_divided or options.is_async:
            self._begin_on_all_ranks()

    def _begin_on_all_ranks(self) -> None:
        """Let all ranks know where to write, and threads begin to."""
        job = self._job
        try:
            self.path, directory = self._agreement.chief_does(lambda: [self.path, job.begin() if job else None])
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
        try:
            result = self._result()
        except BaseException:
            if self._pending is not None:
                self._pending.settle(failed=True)
            elif self._job is not None:
                self._job.discard()
            self._options.failed()
            raise
        if self._pending is not None:
            self._pending.settle(failed=False)
        self._options.told(result)

    def _result(self) -> Any:
        agreement, writer = self._agreement, self._pending or self._job
        records = agreement.every_rank_does(writer.part) if writer is not None and self._is_divided else None
        self.path, result = agreement.chief_does(lambda: [self.path, writer.result(records) if writer else None])
        return result

    def _read(self, wanted: Mapping[str, tuple[int, int, int]]) -> dict[str, Array]:
        """Return this rank's part of each tensor. Reading an ON_READ variable takes all ranks."""
        arrays = {}
        for key, variable in self._leaves.variables.items():
            if key in wanted or is_on_read(variable):
                array = variable.as_array()
                if key in wanted:
                    arrays[key] = self._part_of(array, *wanted[key][1:])
        for key in self._leaves.arrays.keys() & wanted.keys():
            arrays[key] = self._part_of(self._leaves.arrays[key], *wanted[key][1:])
        return arrays

    def _part_of(self, array: Array, start: int, stop: int) -> Array:
        copied = on_host(array)
        if stop - start < array.size:
            # A part of a copy would keep all of it.
            copied = copied.reshape(-1)[start:stop]
            return np.array(copied) if self._options.is_async else copied
        # The program may change it while a thread writes; what came from a device is a copy already.
        needs_copy = self._options.is_async and copied is array
        return np.array(copied) if needs_copy else copied


def describe_tensors(leaves: Leaves) -> dict[str, Tensor]:
    """Return the manifest's entries for the variables and arrays, as yet without parts."""
    variables = {
        key: describe(variable.shape, variable.dtype, variable.synchronization.name, variable.aggregation.name)
        for key, variable in leaves.variables.items()
    }
    arrays = leaves.arrays.items()
    return variables | {key: describe(array.shape, array.dtype, *leaves.awaited.get(key, ())) for key, array in arrays}


# Who writes what --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Extent:
    """How large a tensor is.

    Attributes:
        size: Number of elements.
        itemsize: Bytes of one.
        is_everywhere: Whether every rank has it; otherwise the first rank writes it.
    """

    size: int
    itemsize: int
    is_everywhere: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize


def plan_parts(extents: Mapping[str, Extent], ranks: int) -> Plan:
    """Return the part of each tensor that each rank writes.

    >>> plan_parts({"w": Extent(30000, 8, True), "b": Extent(10, 8, False)}, 2)
    {'w': [(0, 0, 14995), (1, 14995, 30000)], 'b': [(0, 0, 10)]}
    """
    shared = [(key, extent) for key, extent in extents.items() if extent.is_everywhere]
    total = sum([extent.nbytes for _, extent in shared])
    own = sum([extent.nbytes for extent in extents.values()]) - total
    # The first rank has its own to write, too, and takes so much less of the rest; the others share that evenly.
    first = total if ranks == 1 else min(max(0, (total + own) // ranks - own), total)
    cuts = [0, *[first + (total - first) * i // max(1, ranks - 1) for i in range(ranks)]]
    plan: Plan = {key: [(0, 0, extent.size)] for key, extent in extents.items()}
    begin = 0
    for key, extent in shared:
        # cuts[rank] and cuts[rank + 1] are the borders of what a rank writes.
        local = [_cut_of(extent, cut - begin) for cut in cuts]
        parts = [(rank, start, stop) for rank, (start, stop) in enumerate(pairwise(local)) if stop > start]
        plan[key] = parts or plan[key]
        begin += extent.nbytes
    return plan


def _cut_of(extent: Extent, offset: int) -> int:
    """Return the element at which to cut a tensor, ``offset`` bytes after its begin."""
    if offset <= 0 or extent.nbytes == 0:
        return 0
    if offset >= extent.nbytes:
        return extent.size
    if extent.nbytes < 2 * SMALLEST_PART_BYTES:
        return extent.size if 2 * offset >= extent.nbytes else 0
    return offset // extent.itemsize
