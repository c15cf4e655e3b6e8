"""No rank holds, writes or reads more than its part of a checkpoint; counted by the bytes that go through files."""

from __future__ import annotations

import io
import itertools
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpidist
from mpidist import Checkpoint
from mpidist.checkpoint import DamagedCheckpointError, directory, reader, writer
from mpidist.checkpoint import format as files
from mpidist.checkpoint.format import FileRecord, Manifest
from mpidist.checkpoint.reader import plan_segments
from mpidist.core.errors import PeerError
from tests.checkpoint.shared_folder import of_all_ranks
from tests.support.ranks.layouts import layouts

pytestmark = [pytest.mark.nodes, pytest.mark.counts, pytest.mark.usefixtures("every_rank_has_a_part")]
MIB = 1 << 20
# What a rank may have in hand beside its part: pieces that it writes, and those that it hands on.
IN_HAND = 6 * MIB


def model(strategy: mpidist.Strategy, start: float, rows: int = 1000) -> dict[str, Any]:
    """Return a variable, an array of which the first rank's value counts, and one that does not lie in order."""
    with strategy.scope():
        return {
            "v": mpidist.Variable(np.arange(200.0 * rows).reshape(rows, 200) + start),
            "complex": mpidist.Variable(np.arange(20.0 * rows) * 1j + start),
            "mean": mpidist.Variable(
                np.full(10 * rows, start),
                synchronization=mpidist.VariableSynchronization.ON_READ,
                aggregation=mpidist.VariableAggregation.MEAN,
            ),
            "array": np.arange(100.0 * rows) + start,
            "turned": (np.arange(100.0 * rows).reshape(rows, 100) + start).T,
            "small": np.arange(3) + int(start),
            "none": np.zeros((0, 2)),
        }


def check_values(objects: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in objects:
        np.testing.assert_array_equal(as_numpy(objects[key]), as_numpy(expected[key]), err_msg=key)


def as_numpy(value: Any) -> Any:
    return value.numpy() if isinstance(value, mpidist.Variable) else value


class Counted(io.FileIO):
    """A file of tensors that notes what is read of it."""

    read_bytes = 0

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        Counted.read_bytes += count if str(self.name).endswith(".safetensors") else 0
        return count


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    monkeypatch.setattr(files, "open_to_read", lambda path: Counted(path))
    Counted.read_bytes = 0
    return Counted


def world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
@pytest.mark.parametrize("async_save", [False, True])
def test_no_rank_writes_or_holds_more_than_its_part(
    strategy: mpidist.Strategy, async_save: bool, tmp_path: Path
) -> None:
    ranks = world().size
    checkpoint = Checkpoint(**model(strategy, float(world().rank), 20_000))
    with of_all_ranks(tmp_path) as folder:
        world().Barrier()
        tracemalloc.start()
        try:
            path = Path(checkpoint.save(folder / "ckpt", sharded=True, async_save=async_save))
            checkpoint.wait()
            held = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        sizes = [file.stat().st_size for file in path.glob("data*")]
        assert len(sizes) == ranks
        assert sum(sizes) > 60 * MIB
        assert max(sizes) <= sum(sizes) / ranks + MIB
        assert max(world().allgather(held)) <= max(sizes) + IN_HAND
        theirs = model(strategy, -1.0, 20_000)
        Checkpoint(**theirs).restore(path).assert_consumed()
        # Of arrays the first rank's are saved, whoever writes them.
        check_values(theirs, model(strategy, 0.0, 20_000))


@pytest.mark.parametrize("saved_by", ["all", "one"])
@pytest.mark.parametrize("read_by", ["all", "half", "one"])
def test_each_byte_is_read_once(saved_by: str, read_by: str, counted: type[Counted], tmp_path: Path) -> None:
    ranks, rank = world().size, world().rank
    with of_all_ranks(tmp_path) as folder:
        with mpidist.MultiWorkerMirroredStrategy() as strategy:
            saved = model(strategy, 5.0)
            path = Path(Checkpoint(**saved).save(folder / "ckpt", sharded=saved_by == "all"))
            expected = {key: as_numpy(value) for key, value in saved.items()}
        size = sum(file.stat().st_size for file in path.glob("data*"))
        readers = {"all": ranks, "half": max(1, ranks // 2), "one": 1}[read_by]
        group = world().Split(rank < readers, rank)
        if rank < readers:
            with mpidist.MultiWorkerMirroredStrategy(communicator=group) as strategy:
                theirs = model(strategy, 0.0)
                Checkpoint(**theirs).restore(path).assert_consumed()
                check_values(theirs, expected)
        group.Free()
        read = world().allgather(counted.read_bytes)
        assert sum(read) == size
        # Whole files are read where that is about as much.
        assert max(read) <= 1.5 * size / readers + 1000


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
def test_only_ranks_that_see_the_files_read(
    strategy: mpidist.Strategy, counted: type[Counted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The others have a folder of this name, with another checkpoint or none.
    mark = {0: directory.mark_of, 1: lambda path: 7}.get(world().rank, lambda path: None)
    monkeypatch.setattr(directory, "mark_of", mark)
    with of_all_ranks(tmp_path) as folder:
        saved, theirs = model(strategy, 5.0), model(strategy, 0.0)
        path = Path(Checkpoint(**saved).save(folder / "ckpt", sharded=True))
        Checkpoint(**theirs).restore(path).assert_consumed()
        check_values(theirs, {key: as_numpy(value) for key, value in saved.items()})
        size = sum(file.stat().st_size for file in path.glob("data*"))
        assert counted.read_bytes == (size if world().rank == 0 else 0)


@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
def test_little_is_read_by_one(
    strategy: mpidist.Strategy, counted: type[Counted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patch, of_all_ranks(tmp_path) as folder:
        patch.setattr(reader, "SMALLEST_READ_BYTES", 16 * MIB)
        patch.setattr(writer, "SMALLEST_FILE_BYTES", 16 * MIB)
        patch.setattr(files, "open_to_read", lambda path: counted(path))
        checkpoint = Checkpoint(**model(strategy, 1.0))
        path = Path(checkpoint.save(folder / "ckpt", sharded=True))
        assert len([*path.glob("data*")]) == 1
        checkpoint.restore(path).assert_consumed()
        assert (counted.read_bytes > 0) == (world().rank == 0)


@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_damage_in_any_part_is_that_of_all(strategy: mpidist.Strategy, is_sharded: bool, tmp_path: Path) -> None:
    is_first = strategy.extended.should_checkpoint
    objects = model(strategy, 1.0)
    checkpoint = Checkpoint(**objects)
    expected = DamagedCheckpointError if is_first else PeerError
    with of_all_ranks(tmp_path) as folder:
        before = checkpoint.save(folder / "ckpt", sharded=is_sharded)
        path = Path(checkpoint.save(folder / "ckpt", sharded=is_sharded))
        file = sorted(path.glob("data*"))[-1]
        size = file.stat().st_size
        objects["array"][:] = -1.0
        for share in range(1, 8):
            flip(file, size * share // 8, is_first)
            with pytest.raises(expected, match=rf"{file.name} is damaged: its CRC-32"):
                checkpoint.restore(path)
            flip(file, size * share // 8, is_first)
        for size_now in (size - 1, size // 2, 3, 0, size + 8):
            resize(file, size_now, is_first)
            with pytest.raises(expected, match=rf"{file.name} is damaged: it has {size_now} bytes"):
                checkpoint.restore(path)
        assert objects["array"][0] == -1.0
        with pytest.warns(UserWarning, match="cannot be used") if is_first else nothing():
            status = checkpoint.restore_latest(folder)
        assert status is not None
        assert status.path == str(before)
        assert objects["array"][0] == 1.0


def nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def flip(file: Path, place: int, is_first: bool) -> None:
    """Change a bit of a file before any rank goes on (collective)."""
    world().Barrier()
    if is_first:
        content = bytearray(file.read_bytes())
        content[place] ^= 4
        file.write_bytes(content)
    world().Barrier()


def resize(file: Path, size: int, is_first: bool) -> None:
    """Give a file another size before any rank goes on (collective)."""
    world().Barrier()
    if is_first:
        with open(file, "r+b") as opened:
            opened.truncate(size)
    world().Barrier()


@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
def test_parts_in_files_of_any_order(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    saved = model(strategy, 5.0)
    with of_all_ranks(tmp_path) as folder:
        path = Path(Checkpoint(**saved).save(folder / "ckpt", sharded=True))
        if strategy.extended.should_checkpoint:
            reverse_names(path)
        world().Barrier()
        theirs = model(strategy, 0.0)
        Checkpoint(**theirs).restore(path).assert_consumed()
    check_values(theirs, {key: as_numpy(value) for key, value in saved.items()})


def reverse_names(path: Path) -> None:
    """Give the files of a checkpoint each other's names."""
    manifest = Manifest.from_text((path / "manifest.json").read_bytes(), "test")
    names = sorted(manifest.files)
    other = dict(zip(names, reversed(names), strict=True))
    for name in names:
        (path / name).rename(path / f"{name}.moved")
    for name in names:
        (path / f"{name}.moved").rename(path / other[name])
    files = {other[name]: record for name, record in manifest.files.items()}
    tensors = {
        key: replace(tensor, parts=tuple([replace(part, file=other[part.file]) for part in tensor.parts]))
        for key, tensor in manifest.tensors.items()
    }
    (path / "manifest.json").write_text(replace(manifest, files=files, tensors=tensors).to_text())


# Bytes, bytes of the header, and whether there is a checksum for each piece.
FILES = st.lists(st.tuples(st.integers(8, 2000), st.integers(0, 60), st.booleans()), min_size=1, max_size=6)


@pytest.mark.one_rank
@given(FILES, st.integers(1, 12))
def test_segments_are_whole_pieces_with_whole_heads(sizes: list[tuple[int, int, bool]], readers: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PIECE_BYTES", 40)
        records = {
            f"{index}": FileRecord(size, "01234567" * -(-size // 40) if in_pieces else "01234567")
            for index, (size, _, in_pieces) in enumerate(sizes)
        }
        heads = {f"{index}": min(head, size) for index, (size, head, _) in enumerate(sizes)}
        segments = plan_segments(records, heads, range(readers))
        longest = max(record.piece_bytes for record in records.values())
    assert [rank for rank, _ in segments] == sorted(rank for rank, _ in segments)
    for name, group in itertools.groupby([segment for _, segment in segments], key=lambda segment: segment.file):
        theirs = [*group]
        assert [segment.start for segment in theirs] == [0, *[segment.stop for segment in theirs[:-1]]]
        assert (theirs[-1].stop, theirs[0].stop >= heads[name]) == (records[name].bytes, True)
        assert all(segment.start % (40 if sizes[int(name)][2] else sizes[int(name)][0]) == 0 for segment in theirs)
    assert {segment.file for _, segment in segments} == set(records)
    share = sum(record.bytes for record in records.values()) / readers
    for rank in range(readers):
        read = sum(segment.stop - segment.start for other, segment in segments if other == rank)
        assert read <= share + longest + max(heads.values()) + 40
