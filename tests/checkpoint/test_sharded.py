"""sharded=True: every rank writes a part, and all of it is read on any number of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpidist
from mpidist import Checkpoint
from mpidist.checkpoint import format as files
from mpidist.checkpoint.writer import SMALLEST_PART_BYTES, Job, plan_parts
from mpidist.core.errors import PeerError
from tests.checkpoint.shared_folder import of_all_ranks
from tests.support.ranks.layouts import layouts

pytestmark = [pytest.mark.nodes, pytest.mark.counts, pytest.mark.usefixtures("every_rank_has_a_part")]

EXTENTS = st.dictionaries(
    st.text(min_size=1),
    st.tuples(st.one_of(st.integers(0, 100), st.integers(0, 1 << 20)), st.sampled_from([1, 2, 4, 8, 16])),
    max_size=8,
)


@pytest.mark.one_rank
@given(EXTENTS, st.integers(1, 9))
def test_every_element_is_written_once_in_balance(extents: dict[str, tuple[int, int]], ranks: int) -> None:
    plan = plan_parts(extents, ranks)
    written = [0] * ranks
    for key, (size, itemsize) in extents.items():
        end = 0
        for rank, start, stop in plan[key]:
            assert (start, stop >= start) == (end, True)
            end = stop
            written[rank] += (stop - start) * itemsize
        assert end == size
    fair = sum(size * itemsize for size, itemsize in extents.values()) / ranks
    assert max(written) <= fair + 2 * SMALLEST_PART_BYTES + 16 * ranks


def large_variable(strategy: mpidist.Strategy) -> Checkpoint:
    with strategy.scope():
        return Checkpoint(large=mpidist.Variable(np.arange(200_000.0)))


@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
@pytest.mark.parametrize("async_save", [False, True])
def test_the_failure_of_any_rank_is_that_of_all(
    strategy: mpidist.Strategy, async_save: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    checkpoint = large_variable(strategy)
    write = files.write_tensors

    def fails(path: Path, tensors: Any) -> Any:
        path.write_bytes(b"a part")
        raise OSError(28, "No space left on device", str(path))

    with of_all_ranks(tmp_path) as folder:
        first = checkpoint.save(folder / "ckpt", sharded=True)
        for failing in range(world.size):
            with monkeypatch.context() as patch:
                patch.setattr(files, "write_tensors", fails if world.rank == failing else write)
                expected = OSError if world.rank == failing else PeerError
                with pytest.raises(expected, match=r"No space left on device") as caught:
                    checkpoint.save(folder / "ckpt", sharded=True, async_save=async_save)
                    checkpoint.wait()
            if world.rank != failing:
                assert f"rank {failing}" in str(caught.value)
            world.Barrier()
            assert (os.listdir(folder), checkpoint.save_counter) == (["ckpt-1"], 1)
            world.Barrier()
        checkpoint.restore(first).assert_consumed()


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
@pytest.mark.parametrize("seen", [True, False])
def test_folders_that_are_not_shared(
    strategy: mpidist.Strategy, seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpi4py import MPI

    # What another host does whose folder of this name is its own, or has nothing of what the first rank has made.
    rank = MPI.COMM_WORLD.rank
    checkpoint = large_variable(strategy)
    write, part = files.write_tensors, Job._write

    def part_elsewhere(job: Job) -> Any:
        job.directory = tmp_path / job.directory.name
        return part(job)

    if rank == 1 and seen:
        monkeypatch.setattr(files, "write_tensors", lambda path, tensors: write(tmp_path / path.name, tensors))
    elif rank == 1:
        monkeypatch.setattr(Job, "_write", part_elsewhere)
    with of_all_ranks(tmp_path) as folder:
        expected = OSError if rank == (0 if seen else 1) else PeerError
        with pytest.raises(expected, match="expected a directory that all ranks share"):
            checkpoint.save(folder / "ckpt", sharded=True)
        MPI.COMM_WORLD.Barrier()
        assert rank != 0 or os.listdir(folder) == []


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
def test_other_objects_on_one_rank(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    from mpi4py import MPI

    with strategy.scope():
        v, w = mpidist.Variable(1.0), mpidist.Variable(2.0)
    checkpoint = Checkpoint(v=v) if MPI.COMM_WORLD.rank == 0 else Checkpoint(w=w)
    with of_all_ranks(tmp_path) as folder, pytest.raises(ValueError, match="'v of shape .* on rank 0; 'w of shape"):
        checkpoint.save(folder / "ckpt", sharded=True)
    assert os.listdir(tmp_path) == []
