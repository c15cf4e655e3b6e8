"""sharded=True: every rank writes a part, and all of it is read on any number of ranks."""

from __future__ import annotations

import json
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


def model(strategy: mpidist.Strategy, start: float) -> dict[str, Any]:
    with strategy.scope():
        return {
            "large": mpidist.Variable(np.arange(50001.0).reshape(3, 16667) + start),
            "small": mpidist.Variable(np.arange(10, dtype=np.int32) + int(start)),
            "complex": mpidist.Variable(np.arange(20000) * 1j + start),
            "sum": mpidist.Variable(
                np.full(25000, start),
                synchronization=mpidist.VariableSynchronization.ON_READ,
                aggregation=mpidist.VariableAggregation.MEAN,
            ),
            "array": np.arange(7) + start,
            "empty": mpidist.Variable(np.zeros((0, 4))),
            "step": start,
        }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(np.asarray(one[key]), np.asarray(other[key])) for key in one)


@pytest.mark.parametrize("async_save", [False, True])
def test_written_together_and_read_in_any_layout(strategy: mpidist.Strategy, async_save: bool, tmp_path: Path) -> None:
    together = strategy.extended.spans_ranks
    with of_all_ranks(tmp_path) as shared:
        folder = tmp_path if not together else shared / f"ranks-from-{first_rank_of(strategy)}"
        mine = model(strategy, 5.0)
        checkpoint = Checkpoint(**mine)
        path = Path(checkpoint.save(folder / "ckpt", sharded=True, async_save=async_save))
        checkpoint.wait()
        assert [entry.name for entry in folder.iterdir()] == ["ckpt-1"]
        if together:
            check_balance(path)
        else:
            assert sorted(os.listdir(path)) == ["data.safetensors", "manifest.json"]
        # The ranks must not write the next one before all have looked.
        theirs = model(strategy, 0.0)
        Checkpoint(**theirs).restore(path).assert_consumed()
        with strategy.scope():
            assert same(
                {k: v for k, v in theirs.items() if k != "step"}, {k: v for k, v in mine.items() if k != "step"}
            )
        with mpidist.MirroredStrategy(["cpu:0", "cpu:1"], communicator=alone()) as other:
            alone_model = model(other, 0.0)
            Checkpoint(**alone_model).restore(path).assert_consumed()
            np.testing.assert_array_equal(alone_model["large"].numpy(), np.arange(50001.0).reshape(3, 16667) + 5)
            np.testing.assert_array_equal(alone_model["complex"].numpy(), np.arange(20000) * 1j + 5)


def first_rank_of(strategy: mpidist.Strategy) -> int:
    """Return which rank of the job is the strategy's first (collective)."""
    from mpi4py import MPI

    return int(strategy.extended.broadcast_nest(np.array(MPI.COMM_WORLD.rank)))


def alone() -> Any:
    from mpi4py import MPI

    return MPI.COMM_SELF


def check_balance(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    sizes = {name: record["bytes"] for name, record in manifest["files"].items()}
    assert sorted(os.listdir(path)) == sorted([*sizes, "manifest.json"])
    assert all((path / name).stat().st_size == size for name, size in sizes.items())
    assert max(sizes.values()) - min(sizes.values()) < 2 * SMALLEST_PART_BYTES
    assert len(sizes) == 1 or any(len(tensor["parts"]) > 1 for tensor in manifest["tensors"].values())


@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
@pytest.mark.parametrize("async_save", [False, True])
def test_the_failure_of_any_rank_is_that_of_all(
    strategy: mpidist.Strategy, async_save: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    checkpoint = Checkpoint(**model(strategy, 1.0))
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
    checkpoint = Checkpoint(**model(strategy, 1.0))
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
