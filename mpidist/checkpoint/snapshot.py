"""Snapshot: everything a checkpoint would write, kept in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.checkpoint.checkpoint import Checkpoint, entered
from mpidist.checkpoint.containers import describe_containers
from mpidist.checkpoint.manifest import Manifest
from mpidist.checkpoint.restoring import Read
from mpidist.checkpoint.save_steps import describe_tensors
from mpidist.values.placement import on_host


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint.

    Attributes:
        manifest: What there is.
        arrays: The tensors by key.
    """

    manifest: Manifest
    arrays: dict[str, Array]


def take_snapshot(checkpoint: Checkpoint) -> Snapshot:
    """Return a copy of all that ``checkpoint`` would save; collective as ``save``, and every rank has all of it."""
    leaves = checkpoint._collect_to_save("keeping")
    with entered(checkpoint._strategy("keeping a snapshot")):
        arrays = {key: np.array(variable.numpy()) for key, variable in leaves.variables.items()}
        arrays.update({key: np.array(on_host(array)) for key, array in leaves.arrays.items()})
        values = leaves.values()
    manifest = Manifest(
        0,
        checkpoint.save_counter,
        describe_tensors(leaves),
        values,
        containers=describe_containers(leaves),
        iterators=tuple(leaves.iterators),
        run_calls=checkpoint._run_calls,
        classes=leaves.classes(),
        links=leaves.links,
    )
    return Snapshot(manifest, arrays)


def describe_objects(checkpoint: Checkpoint) -> str:
    """Return what a checkpoint holds and all ranks must, without the values: lists may grow on one rank alone."""
    leaves = checkpoint._collect("keeping")
    kinds = {key: f"{variable.dtype}{tuple(variable.shape)}" for key, variable in leaves.variables.items()}
    kinds.update({key: f"{array.dtype}{array.shape}" for key, array in leaves.arrays.items() if "/" not in key})
    kinds.update({key: type(iterator).__name__ for key, iterator in leaves.iterators.items() if "/" not in key})
    return ", ".join(f"{key}: {kind}" for key, kind in sorted(kinds.items())) or "no objects"


def restore_snapshot(checkpoint: Checkpoint, snapshot: Snapshot | None) -> None:
    """Give the objects of ``checkpoint`` the values of the first rank's snapshot, if it has one; collective."""

    def read() -> Read | None:
        return None if snapshot is None else Read(Path("a commit"), snapshot.manifest, dict(snapshot.arrays))

    status, _ = checkpoint._restore(read, "restoring what was committed")
    if status is not None:
        status.expect_partial()
