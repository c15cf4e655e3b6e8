"""Damaged checkpoints are found out and named, and the one before is used; version 1 is still read."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import Checkpoint
from mpidist.checkpoint import DamagedCheckpointError, directory, latest_checkpoint
from mpidist.checkpoint import format as files
from tests.checkpoint.shared_folder import damage

FILES = ("data.safetensors", "manifest.json")


def two_checkpoints(directory: Path) -> tuple[Checkpoint, Path, Path]:
    """Return a checkpoint that was saved with step 1, and with step 2."""
    checkpoint = Checkpoint(v=mpidist.Variable(np.arange(100.0)), w=np.arange(5), step=1)
    first = checkpoint.save(directory / "ckpt")
    checkpoint.step = 2
    return checkpoint, Path(first), Path(checkpoint.save(directory / "ckpt"))


@pytest.mark.one_rank
@pytest.mark.parametrize("name", FILES)
def test_no_flipped_bit_is_overlooked(name: str, tmp_path: Path) -> None:
    checkpoint, _, path = two_checkpoints(tmp_path)
    whole = (path / name).read_bytes()
    rng = np.random.default_rng(7)
    places = [*range(min(64, len(whole))), *rng.integers(len(whole), size=200)]
    for place, bit in zip(places, rng.integers(8, size=len(places)), strict=True):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        (path / name).write_bytes(damaged)
        checkpoint.step = 0
        with pytest.raises(DamagedCheckpointError, match=name):
            checkpoint.restore(path)
        assert checkpoint.step == 0
    (path / name).write_bytes(whole)
    checkpoint.restore(path).assert_consumed()


@pytest.mark.one_rank
@pytest.mark.parametrize("name", FILES)
def test_no_truncation_is_overlooked(name: str, tmp_path: Path) -> None:
    checkpoint, first, path = two_checkpoints(tmp_path)
    whole = (path / name).read_bytes()
    for size in [0, 1, 7, 8, 9, *np.random.default_rng(8).integers(len(whole), size=100)]:
        (path / name).write_bytes(whole[:size])
        with pytest.raises(DamagedCheckpointError, match=name):
            checkpoint.restore(path)
    with pytest.warns(UserWarning, match=f"ckpt-2 is left out.*{name}"):
        assert latest_checkpoint(tmp_path) == str(first)
    (path / name).write_bytes(whole + b"\n")
    with pytest.raises(DamagedCheckpointError, match=name):
        checkpoint.restore(path)


def test_files_of_others_and_missing_ones(tmp_path: Path) -> None:
    checkpoint, _, path = two_checkpoints(tmp_path)
    other = Path(Checkpoint(v=mpidist.Variable(np.zeros(100)), w=np.arange(5), step=1).save(tmp_path / "other"))
    shutil.copy(other / FILES[0], path / FILES[0])
    with pytest.raises(DamagedCheckpointError, match=r"data\.safetensors is damaged: its CRC-32 is"):
        checkpoint.restore(path)
    (path / FILES[0]).unlink()
    with pytest.raises(DamagedCheckpointError, match=r"data\.safetensors is missing"):
        checkpoint.restore(path)
    (path / FILES[1]).write_text('{"format": "mpidist checkpoint", "version": 99, "mpidist": "7.0"}')
    with pytest.raises(ValueError, match="format version 99.*use the mpidist that wrote it, 7.0"):
        checkpoint.restore(path)
    (path / FILES[1]).unlink()
    with pytest.raises(FileNotFoundError, match="is no checkpoint"):
        checkpoint.restore(path)


@pytest.mark.parametrize("name", FILES)
def test_the_one_before_is_restored_on_all_ranks(strategy: mpidist.Strategy, name: str, tmp_path: Path) -> None:
    with strategy.scope():
        v = mpidist.Variable(np.zeros(100))
    checkpoint = Checkpoint(v=v, step=0)
    paths = []
    for step in (1, 2, 3):
        v.assign(np.full(100, step))
        checkpoint.step = step
        paths.append(Path(checkpoint.save(tmp_path / "ckpt")))
    is_chief = strategy.extended.should_checkpoint
    if is_chief:
        damage(paths[1])
        damage(paths[2], name)
        with pytest.warns(UserWarning, match="cannot be used") as caught:
            status = checkpoint.restore_latest(tmp_path)
        [warning] = caught
        for expected in (f"{paths[1]} (", f"{paths[2]} (", "CRC-32", f"restored {paths[0]} instead"):
            assert expected in str(warning.message)
        assert warning.filename == __file__
    else:
        status = checkpoint.restore_latest(tmp_path)
    assert status is not None
    assert Path(status.path).name == "ckpt-1"
    assert (checkpoint.step, checkpoint.save_counter, v.numpy()[0]) == (1, 1, 1)


def test_nothing_is_started_anew_where_all_are_damaged(tmp_path: Path) -> None:
    checkpoint, first, second = two_checkpoints(tmp_path)
    damage(first)
    damage(second, FILES[1])
    with pytest.raises(DamagedCheckpointError, match=r"ckpt-2.*ckpt-1.*start from scratch"):
        checkpoint.restore_latest(tmp_path)


def test_one_without_a_manifest_is_damaged_and_other_directories_are_nothing(tmp_path: Path) -> None:
    checkpoint, first, second = two_checkpoints(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events").write_text("of another program")
    (second / FILES[1]).unlink()
    passed_over = rf"{second} \(.*manifest\.json is missing\).*restored {first} instead"
    with pytest.warns(UserWarning, match=passed_over) as caught:
        checkpoint.restore_latest(tmp_path)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=r"left out: .*manifest\.json is missing"):
        assert latest_checkpoint(tmp_path) == str(first)
    (first / FILES[1]).unlink()
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is missing"):
        checkpoint.restore_latest(tmp_path)


def test_one_that_is_removed_while_it_is_read_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, first, second = two_checkpoints(tmp_path)
    read, read_manifest = files.read_segment, directory.read_manifest

    def too_late(path: Path, *args: Any) -> Any:
        # The manager of the program that trains, which another one looks at.
        if path == second:
            checkpoint.save(tmp_path / "ckpt")
            shutil.rmtree(path)
        return read(path, *args)

    monkeypatch.setattr(files, "read_segment", too_late)
    status = Checkpoint(v=checkpoint.v, w=checkpoint.w, step=0).restore_latest(tmp_path)
    assert status is not None
    assert status.assert_consumed().path == str(tmp_path / "ckpt-3")

    def listed_too_late(path: Path) -> Any:
        if path == first and path.exists():
            shutil.rmtree(path)
        return read_manifest(path)

    monkeypatch.setattr(directory, "read_manifest", listed_too_late)
    assert latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-3")
    assert not first.exists()


def test_file_systems_that_do_not_sync_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    checkpoint, _, path = two_checkpoints(tmp_path / "new" / "directory")
    checkpoint.restore(path).assert_consumed()


def test_version_1_is_read(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy", reason="it writes what older versions wrote")
    path = tmp_path / "ckpt-4"
    path.mkdir()
    v, z = np.float32([[1, 2], [3, 4]]), np.array([1 + 2j])
    safetensors.save_file({"v": v, "z": z.view(np.uint8)}, path / FILES[0])
    entry = {"file": FILES[0], "synchronization": None, "aggregation": None}
    manifest = {
        "format": "mpidist checkpoint", "version": 1, "mpidist": "0.1", "sequence": 3, "number": 4,
        "tensors": {
            "v": {"shape": [2, 2], "dtype": "float32", "stored_as": "tensor", **entry},
            "z": {"shape": [1], "dtype": "complex128", "stored_as": "bytes", **entry},
        },
        "values": {"step": 7},
    }  # fmt: skip
    (path / FILES[1]).write_text(json.dumps(manifest, indent=1))
    checkpoint = Checkpoint(v=mpidist.Variable(np.zeros((2, 2), np.float32)), z=np.zeros(1, complex), step=0)
    status = checkpoint.restore_latest(tmp_path)
    assert status is not None
    status.assert_consumed()
    assert checkpoint.v.numpy().tolist() == v.tolist()
    assert (checkpoint.z[0], checkpoint.step, checkpoint.save_counter) == (1 + 2j, 7, 4)
    # What is saved next is the later one.
    assert latest_checkpoint(tmp_path) == str(path)
    assert checkpoint.save(tmp_path / "ckpt") == latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-5")
