"""Save: what the ranks do together to save a checkpoint, up to the point from which each writes by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.checkpoint.agreement import (
    before_communication,
    check_same,
    chief_does,
    digest,
    every_rank_does,
    extended_of,
)
from mpidist.checkpoint.containers import describe_containers
from mpidist.checkpoint.leaves import Leaves, is_on_read
from mpidist.checkpoint.manifest import Manifest, Tensor, describe
from mpidist.checkpoint.pending import Pending
from mpidist.checkpoint.saving import Job
from mpidist.checkpoint.sharding import Extent, Plan, plan_parts
from mpidist.checkpoint.storage import Writing
from mpidist.core.protocols import StrategyLike
from mpidist.values.placement import on_host


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
        told: Called on every rank with what ``finish`` returned.
        failed: Called on every rank where it fails, once that is known.
    """

    is_sharded: bool = False
    is_async: bool = False
    kept: tuple[float, tuple[str, ...]] | None = None
    finish: Callable[[Manifest], Any] = _nothing
    told: Callable[[Any], None] = _nothing
    failed: Callable[[], None] = _nothing


@dataclass
class Unsettled:
    """A checkpoint of which the ranks have not yet told each other how it went.

    Attributes:
        strategy: Its ranks save.
        path: The checkpoint.
        counter_before: The save counter where it fails.
        is_sharded: Whether several ranks write.
        job: What this rank has to write; None for nothing.
        pending: The thread that writes it; None for this one.
        options: How it is saved.
    """

    strategy: StrategyLike
    path: str
    counter_before: int
    is_sharded: bool
    job: Job | None
    pending: Pending | None
    options: SaveOptions

    def settle(self) -> None:
        """Write, or wait for the thread that does, and tell each other (collective).

        Raises:
            Exception: What went wrong on this rank.
            PeerError: What went wrong on another.
        """
        try:
            result = self._result()
        except BaseException:
            if self.pending is not None:
                self.pending.settle(failed=True)
            elif self.job is not None:
                self.job.discard()
            self.options.failed()
            raise
        if self.pending is not None:
            self.pending.settle(failed=False)
        self.options.told(result)

    def _result(self) -> Any:
        doing = f"saving checkpoint {self.path}"
        job, pending = self.job, self.pending
        if job is None:  # a rank that writes nothing only hears of it
            return chief_does(self.strategy, doing, _nothing)
        if pending is not None:
            if self.is_sharded:
                every_rank_does(self.strategy, doing, pending.part)
            return chief_does(self.strategy, doing, pending.result)
        if self.is_sharded:
            records = every_rank_does(self.strategy, doing, job.write_part)
            return chief_does(self.strategy, doing, lambda: job.publish(records))
        return chief_does(self.strategy, doing, lambda: job.publish([job.write_part()]))


def describe_tensors(leaves: Leaves) -> dict[str, Tensor]:
    """Return the manifest's entries for the variables and arrays, as yet without parts."""
    variables = {
        key: describe(variable.shape, variable.dtype, variable.synchronization.name, variable.aggregation.name)
        for key, variable in leaves.variables.items()
    }
    arrays = leaves.arrays.items()
    return variables | {key: describe(array.shape, array.dtype, *leaves.awaited.get(key, ())) for key, array in arrays}


class Save:
    """One save, on one rank.

    Args:
        strategy: Whose ranks save; it is in scope.
        leaves: What to save.
        path: The directory to be.
        number: Of the save.
        run_calls: For the manifest.
        options: How.
    """

    def __init__(
        self, strategy: StrategyLike, leaves: Leaves, path: Path, number: int, run_calls: int, options: SaveOptions
    ) -> None:
        self._strategy, self._leaves, self._path, self._options = strategy, leaves, path, options
        self._number, self._run_calls = number, run_calls
        self._doing = f"saving checkpoint {path}"
        self._is_chief = strategy.extended.should_checkpoint

    def start(self, next_sequence: Callable[[], int], counter_before: int) -> Unsettled:
        """Collect what is to be written, make its directory, and start the thread where one is to write (collective).

        Args:
            next_sequence: Called on the first rank.
            counter_before: The save counter where the save fails.
        """
        with before_communication(self._strategy, self._doing):
            values = self._leaves.values()
            tensors = describe_tensors(self._leaves)
        rank, ranks, plan = self._agreed_plan(tensors)
        arrays = self._read(plan, rank)
        begun: list[tuple[Writing, Manifest]] = []

        def begin() -> list[str]:
            manifest = self._manifest(values, next_sequence())
            writing = Writing(self._path, manifest.is_shared)
            begun.append((writing, manifest))
            return [str(self._path), str(writing.directory)]

        try:
            path, directory = chief_does(self._strategy, self._doing, begin)
        except BaseException:
            for begun_writing, _ in begun:
                begun_writing.discard(())
            raise
        job = None
        if self._is_chief or ranks > 1:
            writing, manifest = begun[0] if begun else (None, None)
            finish = self._options.finish
            job = Job(Path(directory), rank, ranks, plan, tensors, arrays, writing, manifest, finish)
        pending = Pending(job, path) if self._options.is_async and job is not None else None
        return Unsettled(self._strategy, path, counter_before, ranks > 1, job, pending, self._options)

    def _agreed_plan(self, tensors: dict[str, Tensor]) -> tuple[int, int, Plan]:
        """Return this rank, how many write, and who writes what."""
        leaves = self._leaves
        sizes = {key: leaves.variables[key].dtype.itemsize for key in leaves.variables}
        sizes.update({key: array.dtype.itemsize for key, array in leaves.arrays.items()})
        extents = {key: Extent(tensors[key].size, sizes[key], key in leaves.variables) for key in tensors}
        names, is_sharded = leaves.names_of_all_ranks(), self._options.is_sharded
        if is_sharded:  # who writes what depends on all sizes
            names = [f"{key} of shape {tensor.shape} and dtype {tensor.dtype}" for key, tensor in tensors.items()]
        own_id = self._strategy.extended.local_replica_ids[0] if is_sharded else 0
        told = every_rank_does(self._strategy, self._doing, lambda: [own_id, digest(names)])
        check_same(self._strategy, self._doing, names, [theirs for _, theirs in told])
        if not is_sharded:
            return 0 if self._is_chief else 1, 1, plan_parts(extents, 1)
        return [first for first, _ in told].index(own_id), len(told), plan_parts(extents, len(told))

    def _read(self, plan: Plan, rank: int) -> dict[str, Array]:
        """Return what this rank writes of each tensor. Reading an ON_READ variable takes all ranks."""
        wanted = {key: part for key, parts in plan.items() for part in parts if part[0] == rank}
        arrays = {}
        for key, variable in self._leaves.variables.items():
            if key in wanted or is_on_read(variable):
                array = variable.as_array()
                if key in wanted:
                    arrays[key] = self._part_of(array, wanted[key])
        for key in self._leaves.arrays.keys() & wanted.keys():
            arrays[key] = self._part_of(self._leaves.arrays[key], wanted[key])
        return arrays

    def _part_of(self, array: Array, part: tuple[int, int, int]) -> Array:
        _, start, stop = part
        # There may be no memory for a copy on this rank.
        with before_communication(self._strategy, self._doing):
            copied = on_host(array)
            # The program may change it while a thread writes; what came from a device is a copy already.
            needs_copy = self._options.is_async and copied is array
            if stop - start == array.size:
                return np.array(copied) if needs_copy else copied
            # A part of a copy would keep all of it.
            copied = copied.reshape(-1)[start:stop]
            return np.array(copied) if self._options.is_async else copied

    def _manifest(self, values: dict[str, Any], sequence: int) -> Manifest:
        return Manifest(
            sequence,
            self._number,
            {},
            values,
            containers=describe_containers(self._leaves),
            iterators=tuple(self._leaves.iterators),
            kept=self._options.kept,
            is_shared=extended_of(self._strategy).spans_ranks,
            run_calls=self._run_calls,
            classes=self._leaves.classes(),
            links=self._leaves.links,
        )
