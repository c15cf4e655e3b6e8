"""Faults of files: a full disk, damaged checkpoints, and no file descriptors left."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import subprocess
from pathlib import Path

from tests.chaos.trial import EPOCHS, STEPS_PER_EPOCH, FailedError, Found, Trial
from tests.support.ranks.jobs import ROOT

# A checkpoint of the example has about 160 KiB: the first may be one too many, or the fifth.
_SMALLEST_DISK, _LARGEST_DISK, _LARGE_ENOUGH = 100, 900, 20_000
# Share of the trials in which every checkpoint is damaged, and in which a rank runs out of descriptors as it starts.
_ALL_DAMAGED, _AT_START = 0.2, 0.3
_MOST_DESCRIPTORS_LEFT = 6


class SmallDisk:
    """A file system in memory that only the processes see that are started by ``within``; as a block.

    Args:
        folder: Where it is mounted.
        kibibytes: How much it holds.
    """

    def __init__(self, folder: Path, kibibytes: int) -> None:
        folder.mkdir()
        self._folder = folder
        mount = 'mount -t tmpfs -o size="$1" none "$2" && echo mounted && exec cat'
        # It lives as long as this process, which ends with its input.
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", mount, "sh", f"{kibibytes}k", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "mounted\n":
            self._close()
            raise PermissionError("a small file system of its own takes the right to mount one (root)")
        self.within = ("nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", f"--wd={ROOT}")

    def __enter__(self) -> SmallDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def enlarge(self, kibibytes: int) -> None:
        """Let it hold so much."""
        remount = ("mount", "-o", f"remount,size={kibibytes}k", str(self._folder))
        subprocess.run([*self.within, *remount], check=True, capture_output=True)

    def _close(self) -> None:
        self._holder.communicate()


def fill_disk(trial: Trial) -> Found:
    """Let the disk be full while a checkpoint is written; with a larger one the next run goes on."""
    size = trial.random.randrange(_SMALLEST_DISK, _LARGEST_DISK)
    with SmallDisk(trial.out, size) as disk:
        with trial.start("--resume", within=disk.within) as job:
            ended = job.end()
        trial.check_clear_error(ended, "No space left on device")
        disk.enlarge(_LARGE_ENOUGH)
        return trial.resume(f"a disk of {size} KiB", ended, disk.within)


def no_small_disk(folder: Path) -> str | None:
    """Return why there cannot be a small disk here; None where there can."""
    try:
        with SmallDisk(folder, _SMALLEST_DISK):
            return None
    except (OSError, ValueError) as error:
        return str(error)


def damage(trial: Trial) -> Found:
    """Truncate files of the newest checkpoints, flip bits in them, remove them; the next run takes the one before."""
    epochs = trial.random.randrange(2, EPOCHS)
    for epoch in range(1, epochs + 1):
        shutil.copytree(trial.reference.out / f"ckpt-{epoch}", trial.out / f"ckpt-{epoch}")
    count = epochs if trial.random.random() < _ALL_DAMAGED else trial.random.randrange(1, min(3, epochs))
    damaged = [f"ckpt-{epoch}" for epoch in range(epochs - count + 1, epochs + 1)]
    detail = "; ".join(_damage(trial, trial.out / name) for name in damaged)
    with trial.start("--resume") as job:
        ended = job.end()
    for name in damaged:
        if name not in ended.stderr:
            raise FailedError(f"{detail}: nobody says that {name} is damaged\n{ended.stderr}")
    if count == epochs:
        trial.check_clear_error(ended, "DamagedCheckpointError")
        return Found("refused", f"all {epochs}: {detail}")
    trial.check_right(ended)
    begun = next(note for note in ended.notes if note.what == "begins")
    if begun.step != (epochs - count) * STEPS_PER_EPOCH:
        raise FailedError(f"{detail}: it went on from step {begun.step}\n{ended.stderr}")
    first = next(note.time for note in ended.notes if note.what == "step")
    return Found("resumed", detail, count * STEPS_PER_EPOCH, first - job.started)


def _damage(trial: Trial, checkpoint: Path) -> str:
    path = trial.random.choice(sorted(checkpoint.iterdir()))
    content = bytearray(path.read_bytes())
    place = trial.random.randrange(len(content))
    # Without its manifest a directory is no checkpoint.
    kinds = ["truncated", "flipped", "longer", *(["removed"] if path.name != "manifest.json" else [])]
    how = trial.random.choice(kinds)
    if how == "truncated":
        path.write_bytes(content[:place])
    elif how == "flipped":
        content[place] ^= 1 << trial.random.randrange(8)
        path.write_bytes(content)
    elif how == "removed":
        path.unlink()
    else:
        path.write_bytes(content + bytes(1 + place))
    return f"{checkpoint.name}/{path.name} {how} at byte {place} of {len(content)}"


def use_up_descriptors(trial: Trial) -> Found:
    """Leave a rank a few file descriptors, at its start or at a random step; the next run has enough."""
    victim, step = trial.any_rank(), trial.any_step()
    left = trial.random.randrange(_MOST_DESCRIPTORS_LEFT)
    at_start = trial.random.random() < _AT_START
    with trial.start("--resume") as job:
        if at_start:
            pid = job.until(lambda note: note.rank == victim and note.what == "starts").pid
        else:
            pid = job.until_step(victim, step)
        taken = set(map(int, os.listdir(f"/proc/{pid}/fd")))
        free = (number for number in itertools.count() if number not in taken)
        limit = next(itertools.islice(free, left, None))
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
        ended = job.end()
    detail = f"{left} left on rank {victim} {'at its start' if at_start else f'after step {step}'}"
    if ended.returncode == 0:
        trial.check_right(ended)
        return Found("went on", detail, 0)
    trial.check_clear_error(ended, "Too many open files")
    return trial.resume(detail, ended)
