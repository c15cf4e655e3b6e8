"""Number checkpoints, keep the newest, find the one to go on from, and remove others."""

from __future__ import annotations

import math
import os
import re
import shutil
import stat
import time
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal, SupportsIndex, SupportsInt

import numpy as np

from mpidist.checkpoint.agreement import Agreement
from mpidist.checkpoint.candidates import Newest
from mpidist.checkpoint.checkpoint import Checkpoint, SaveOptions, tracked_by
from mpidist.checkpoint.formats import Manifest
from mpidist.checkpoint.interval import FIRST_STEPS, Pace
from mpidist.checkpoint.storage import Found, checkpoints_in, is_checkpoint
from mpidist.checkpoint.writer import WriterLock, status_of
from mpidist.core.files import NotAFileError
from mpidist.values import Variable

_SECONDS_PER_HOUR = 3600.0
# Being written (tmp), moved away for a new one of the same name (old), and being removed (del).
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}\.(?P<kind>tmp|old|del)")
_LOCK = re.compile(r"\.(?P<name>.+)\.lock")
# What writers put into the directory of a checkpoint.
_FILE = re.compile(r"data.*\.safetensors|manifest\.json|rank-\d+\.json(\.part)?")


class CheckpointManager:
    """Saves numbered checkpoints into one directory and removes old ones (tf.train.CheckpointManager).

    Collective, as every method but the properties: make it on every rank, with equal arguments. The first rank
    looks, writes and removes, also the leftovers of killed writers of such checkpoints.

    Args:
        checkpoint: The objects to save.
        directory: Where; made where it is missing.
        max_to_keep: How many checkpoints to keep; None for all. A checkpoint is removed only when a newer one is safe
            on the disk. Damaged ones are neither counted nor removed.
        keep_checkpoint_every_n_hours: One checkpoint per so many hours is kept beyond ``max_to_keep``, for good.
        checkpoint_name: Checkpoints are called ``NAME-1``, ``NAME-2`` and so on; others are left alone.
        step_counter: Tells the step: a variable, or a function such as ``lambda: checkpoint.step``; the same on all
            ranks.
        checkpoint_interval: ``save`` does nothing before so many steps have passed since it last saved. ``"auto"``: as
            many as lose the least time, by Young and Daly, from how long saves and steps take on the first rank and
            from ``mtbf``; all ranks learn it when they save. Extension.
        init_fn: Called by ``restore_or_initialize`` where there is no checkpoint.
        sharded: As for ``Checkpoint.save``. Extension.
        async_save: As for ``Checkpoint.save``. Extension.
        mtbf: For ``"auto"``, the mean time between two failures of one node in seconds; by default that of
            ``MPIDIST_NODE_MTBF_DAYS``. Extension.

    Raises:
        TypeError, ValueError: An argument without meaning.
        OSError: The directory cannot be read or cleaned; on the first rank. The others raise PeerError.

    >>> import tempfile
    >>> checkpoint = Checkpoint(step=0)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     manager = CheckpointManager(checkpoint, directory, max_to_keep=2)
    ...     for checkpoint.step in range(1, 6):
    ...         path = manager.save()
    ...     again = CheckpointManager(Checkpoint(step=0), directory, max_to_keep=2)
    ...     restored = again.restore_or_initialize()
    ...     [os.path.basename(path) for path in again.checkpoints], again.checkpoint.step
    (['ckpt-4', 'ckpt-5'], 5)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     counter = lambda: checkpoint.step
    ...     manager = CheckpointManager(checkpoint, directory, 2, step_counter=counter, checkpoint_interval="auto")
    ...     for checkpoint.step in range(1, 12):
    ...         if manager.save():
    ...             print("saved after step", checkpoint.step)
    saved after step 1
    saved after step 11
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Variable | Callable[[], SupportsInt] | None = None,
        checkpoint_interval: int | Literal["auto"] | None = None,
        init_fn: Callable[[], object] | None = None,
        *,
        sharded: bool = False,
        async_save: bool = False,
        mtbf: float | None = None,
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(f"checkpoint is {checkpoint!r}; expected a mpidist.Checkpoint")
        _check_count("max_to_keep", max_to_keep, "None for all")
        if checkpoint_interval != "auto":
            _check_count("checkpoint_interval", checkpoint_interval, "'auto', or None to save always")
        if mtbf is not None and not (checkpoint_interval == "auto" and 0 < mtbf < math.inf):
            raise ValueError(f"mtbf is {mtbf!r}; expected seconds, more than 0, beside checkpoint_interval='auto'")
        _check_callable("init_fn", init_fn)
        if not isinstance(step_counter, Variable):
            _check_callable("step_counter", step_counter, "a variable, or ")
        if checkpoint_interval is not None and step_counter is None:
            raise ValueError("checkpoint_interval needs step_counter; pass step_counter=lambda: checkpoint.step")
        if keep_checkpoint_every_n_hours is not None and not keep_checkpoint_every_n_hours > 0:
            raise ValueError(f"keep_checkpoint_every_n_hours is {keep_checkpoint_every_n_hours}; expected more than 0")
        if (
            not checkpoint_name
            or checkpoint_name.startswith(".")
            or os.path.basename(checkpoint_name) != checkpoint_name
        ):
            raise ValueError(f"checkpoint_name is {checkpoint_name!r}; expected a name such as 'ckpt', without a path")
        self._checkpoint = checkpoint
        self._tracked = tracked_by(checkpoint)
        self._directory = os.fspath(directory)
        self._name = checkpoint_name
        self._step_counter, self._init_fn = step_counter, init_fn
        self._pace = Pace(mtbf) if checkpoint_interval == "auto" else None
        self._interval = FIRST_STEPS if checkpoint_interval == "auto" else checkpoint_interval
        self._is_sharded, self._is_async = sharded, async_save
        self._last_step: int | None = None
        self._retention: Retention | None = None

        def look() -> tuple[list[str], int]:
            clean_leftovers(Path(directory), self._number_in)
            self._retention = Retention(self._find(), max_to_keep, keep_checkpoint_every_n_hours)
            # Damaged ones count, too: what is left of them is not replaced.
            entries = os.listdir(directory) if os.path.isdir(directory) else []
            numbers = [int(match[1]) for entry in entries if (match := self._number_in(entry))]
            return self._retention.checkpoints, max(numbers, default=0)

        strategy = self._tracked.strategy("CheckpointManager()")
        listing = Agreement(strategy, "listing", f"the checkpoints of {self._directory}")
        self._checkpoints, self._highest = listing.chief_does(look)

    # What there is ------------------------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> Checkpoint:
        """The Checkpoint that is saved."""
        return self._checkpoint

    def __repr__(self) -> str:
        return f"<CheckpointManager of {self._checkpoint!r} in {self._directory!r}>"

    @property
    def directory(self) -> str:
        """Where."""
        return self._directory

    @property
    def checkpoint_interval(self) -> int | None:
        """How many steps lie between two checkpoints at least, with ``"auto"`` for now."""
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the managed checkpoints, newest last; the same on all ranks.

        Those that are kept for good do not count, and one that a thread is still writing is not among them.
        """
        return list(self._checkpoints)

    @property
    def latest_checkpoint(self) -> str | None:
        """The newest of ``checkpoints``, None where there is none."""
        return self._checkpoints[-1] if self._checkpoints else None

    # What to do ---------------------------------------------------------------------------------------------------

    def save(
        self, checkpoint_number: Variable | SupportsIndex | None = None, check_interval: bool = True
    ) -> str | None:
        """Save a checkpoint and remove those that are too many; collective as ``Checkpoint.save``.

        Args:
            checkpoint_number: Number for the name, or a variable that holds it; by default it goes on from the
                greatest in the directory, also after a restart, so that nothing is replaced.
            check_interval: Whether ``checkpoint_interval`` counts.

        Returns:
            The path; None where it was too early.

        Raises:
            Exception: As ``Checkpoint.save``.
        """
        with self._tracked.shared_errors("saving"):
            step = self._step() if self._interval is not None else None
            given = None if checkpoint_number is None else _whole(checkpoint_number)
        if step is not None and check_interval and self._last_step is not None:
            assert self._interval is not None
            if step - self._last_step < self._interval:
                return None
        if self._pace is None or step is None:
            return self._save(step, given)
        pace = self._pace
        agreement = Agreement(self._tracked.strategy("save()"), "timing", f"the saves to {self._directory}")
        # On every rank: another one is the first where an elastic job loses that one.
        interval = pace.begin(step)
        self._interval = agreement.chief_does(lambda: interval)
        path = self._save(step, given)
        pace.end(step)
        return path

    def _save(self, step: int | None, given: int | None) -> str:
        """Save after a step, under a number that is given or the next one."""
        self._checkpoint.wait()
        last = self._checkpoint.save_counter
        counter = (last if given is not None else max(last, self._highest)) + 1
        number = counter if given is None else given
        path = Path(self._directory, f"{self._name}-{number}")

        def finish(manifest: Manifest) -> list[str]:
            assert self._retention is not None
            self._retention.add(path, manifest)
            return self._retention.checkpoints

        def told(checkpoints: list[str]) -> None:
            self._checkpoints, self._highest = checkpoints, max(self._highest, number)

        before, self._last_step = self._last_step, step

        def failed() -> None:
            self._last_step = before

        kept = None if self._retention is None else self._retention.kept_after(path)
        options = SaveOptions(self._is_sharded, self._is_async, kept, finish, told, failed)
        try:
            return self._tracked.save(path, counter, options)
        except BaseException:
            failed()
            raise

    def restore_or_initialize(self) -> str | None:
        """Restore the newest checkpoint, or call ``init_fn`` where there is none; collective as ``restore``.

        Instead of a damaged checkpoint the one before it is restored, on all ranks; the first rank warns of that.

        Returns:
            The path of the checkpoint; None where there was none.

        Raises:
            DamagedCheckpointError: There are checkpoints, and all are damaged.
            ValueError: It does not fit the objects.
        """
        subject = f"the latest checkpoint of {self._directory}"
        status, unusable = self._tracked.restore(Newest(self._find), subject)
        if status is None:
            if self._init_fn is not None:
                self._init_fn()
            return None
        self._checkpoints = [path for path in self._checkpoints if path not in unusable]
        if self._interval is not None:
            self._last_step = self._step()
        if self._retention is not None:
            self._retention.forget(*unusable)
        self._tracked.warn_of_unusable(unusable, status.path)
        return status.path

    def wait(self) -> None:
        """Return once the last save is on the disk; collective, as ``Checkpoint.wait``. Extension."""
        self._checkpoint.wait()

    def sync(self) -> None:
        """Wait as :meth:`wait` does (tf.train.CheckpointManager.sync)."""
        self.wait()

    def _find(self) -> Found:
        return checkpoints_in(Path(self._directory), self._number_in)

    def _number_in(self, name: str) -> re.Match[str] | None:
        return re.fullmatch(rf"{re.escape(self._name)}-(\d+)", name)

    def _step(self) -> int:
        counter = self._step_counter
        assert counter is not None
        return int(counter.numpy() if isinstance(counter, Variable) else counter())


def _check_count(name: str, value: object, otherwise: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1):
        raise ValueError(f"{name} is {value!r}; expected a whole number of 1 or more, or {otherwise}")


def _check_callable(name: str, value: object, otherwise: str = "") -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} is {value!r}; expected {otherwise}a function without arguments, or None")


def _whole(value: Variable | SupportsIndex) -> int:
    array = value.numpy() if isinstance(value, Variable) else np.asarray(value)
    if array.ndim or array.dtype.kind not in "iu" or array < 0:
        raise ValueError(f"checkpoint_number is {value!r}; expected a whole number of 0 or more, or None")
    return int(array)


class Retention:
    """The checkpoints that a manager may remove, those saved last at the end.

    Args:
        found: Those of the directory.
        max_to_keep: How many to keep; None for all.
        keep_every_hours: One per so many hours is kept for good; None for none.
    """

    def __init__(self, found: Found, max_to_keep: int | None, keep_every_hours: float | None) -> None:
        self._max_to_keep = max_to_keep
        self._keep_every_hours = keep_every_hours
        # What was kept before stands in the newest checkpoint that knows; without, the first interval begins now.
        known = [manifest.kept for _, manifest in found.checkpoints if manifest.kept is not None]
        self._kept = known[-1] if known else None if keep_every_hours is None else (time.time(), ())
        kept_names = self._kept[1] if self._kept is not None else ()
        self._saved_at = {
            str(path): manifest.saved_at for path, manifest in found.checkpoints if path.name not in kept_names
        }

    @property
    def checkpoints(self) -> list[str]:
        """The paths."""
        return list(self._saved_at)

    def forget(self, *paths: str) -> None:
        """Leave checkpoints alone from now on."""
        for path in paths:
            self._saved_at.pop(path, None)

    def kept_after(self, path: Path) -> tuple[float, tuple[str, ...]] | None:
        """Return ``kept`` for the manifest of the next checkpoint, ``path``."""
        return self._sorted_out({**self._without(path), str(path): time.time()})[1]

    def add(self, path: Path, manifest: Manifest) -> None:
        """Take in a new checkpoint, now on the disk, and remove surplus ones.

        Warns:
            UserWarning: One cannot be removed.
        """
        self._saved_at = {**self._without(path), str(path): manifest.saved_at}
        surplus, self._kept = self._sorted_out(self._saved_at)
        for oldest, is_kept in surplus.items():
            self.forget(oldest)
            if is_kept:
                continue
            try:
                remove_checkpoint(Path(oldest))
            except OSError as error:
                warnings.warn(f"checkpoint {oldest}, an old one, cannot be removed: {error}", stacklevel=2)

    def _without(self, path: Path) -> dict[str, float]:
        # One that is replaced is the newest from now on.
        return {other: saved_at for other, saved_at in self._saved_at.items() if other != str(path)}

    def _sorted_out(self, saved_at: dict[str, float]) -> tuple[dict[str, bool], tuple[float, tuple[str, ...]] | None]:
        """Return the surplus checkpoints, whether each is kept for good, and the new ``kept``."""
        count = 0 if self._max_to_keep is None else max(0, len(saved_at) - self._max_to_keep)
        surplus, kept = {}, self._kept
        for path in list(saved_at)[:count]:
            surplus[path] = False
            if kept is not None and self._keep_every_hours is not None:
                surplus[path] = saved_at[path] - kept[0] >= self._keep_every_hours * _SECONDS_PER_HOUR
            if kept is not None and surplus[path]:
                kept = (saved_at[path], (*kept[1], Path(path).name))
        return surplus, kept


# Removing ---------------------------------------------------------------------------------------------------------


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; a crash leaves all of it or nothing under its name.

    Raises:
        OSError: It cannot be removed, or someone writes it just now.
    """
    lock = WriterLock(path)
    try:
        doomed = path.parent / f".{path.name}.{uuid.uuid4().hex}.del"
        try:
            path.rename(doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed)
    finally:
        lock.release()


def clean_leftovers(directory: Path, accepts: Callable[[str], object]) -> None:
    """Remove leftovers of killed writers in ``directory``, of checkpoints that ``accepts`` accepts.

    A checkpoint that was moved away to be replaced, and whose place is empty, is put back. Files that other programs
    may have made, and those of an account that shares the directory for reading only, are left alone.

    Raises:
        OSError: Something cannot be removed.
    """
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        return
    for name in sorted({match["name"] for match in _leftovers_in(directory) if accepts(match["name"])}):
        _clean(directory, name)


def _leftovers_in(directory: Path) -> list[re.Match[str]]:
    """Return the names of leftovers, which are such by name, kind and content."""
    matches = []
    for entry in os.listdir(directory):
        leftover, lock = _LEFTOVER.fullmatch(entry), _LOCK.fullmatch(entry)
        if leftover is not None and _is_ours(directory / entry):
            matches.append(leftover)
        elif lock is not None:
            status = status_of(directory / entry)
            if status is not None and stat.S_ISREG(status.st_mode) and status.st_size == 0:
                matches.append(lock)
    return matches


def _is_ours(path: Path) -> bool:
    """Return whether it is a directory with nothing but files of checkpoints."""
    try:
        with os.scandir(path) as entries:
            return not path.is_symlink() and all(
                _FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False) for entry in entries
            )
    except (NotADirectoryError, FileNotFoundError, PermissionError):
        return False


def _clean(directory: Path, name: str) -> None:
    try:
        lock = WriterLock(directory / name)
    except (BlockingIOError, PermissionError, NotAFileError):
        return  # someone writes it, or it is another account's, or no lock of ours
    try:
        for match in _leftovers_in(directory) if lock.is_real else ():
            if match.re is not _LEFTOVER or match["name"] != name:
                continue
            entry, place = directory / match.string, directory / name
            if match["kind"] != "old" or place.exists():
                shutil.rmtree(entry)
            elif is_checkpoint(entry):
                entry.rename(place)
    finally:
        lock.release()
