"""Number checkpoints, keep the newest, and restore the newest that is not damaged."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import SupportsIndex, SupportsInt

import numpy as np

from mpidist.checkpoint import reader, writer
from mpidist.checkpoint.agreement import Agreement
from mpidist.checkpoint.checkpoint import Checkpoint, SaveOptions, tracked_by
from mpidist.checkpoint.directory import Found, checkpoints_in
from mpidist.checkpoint.format import Manifest
from mpidist.checkpoint.writer import clean_leftovers
from mpidist.values import Variable

_SECONDS_PER_HOUR = 3600.0


class CheckpointManager:
    """Saves numbered checkpoints into one directory and removes old ones (tf.train.CheckpointManager).

    Collective, as every method except the properties: create it on every rank, with equal arguments. The first rank
    lists, writes and removes, including leftovers of killed writers of such checkpoints.

    Args:
        checkpoint: Objects to save.
        directory: Directory of the checkpoints. A missing one is created.
        max_to_keep: Number of checkpoints to keep, None for all. A checkpoint is removed only when a newer one is on
            the disk. Damaged ones are neither counted nor removed.
        keep_checkpoint_every_n_hours: One checkpoint per so many hours is kept for good, beyond ``max_to_keep``.
        checkpoint_name: Checkpoints are called ``NAME-1``, ``NAME-2`` and so on. Others are left alone.
        step_counter: Variable of the step, or a function such as ``lambda: checkpoint.step``. It must be the same on
            all ranks.
        checkpoint_interval: Number of steps. ``save`` does nothing until so many have passed since its last save.
        init_fn: Called by ``restore_or_initialize`` if there is no checkpoint.
        sharded: As for ``Checkpoint.save``. Extension.
        async_save: As for ``Checkpoint.save``. Extension.
        mtbf: Removed. Choose ``checkpoint_interval`` yourself.

    Raises:
        TypeError, ValueError: An invalid argument.
        OSError: The directory cannot be read or cleaned. Raised on the first rank, and as PeerError on the others.

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
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Variable | Callable[[], SupportsInt] | None = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
        *,
        sharded: bool = False,
        async_save: bool = False,
        mtbf: None = None,
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(f"checkpoint is {checkpoint!r}; expected a mpidist.Checkpoint")
        _check_count("max_to_keep", max_to_keep, "None for all")
        _check_count("checkpoint_interval", checkpoint_interval, "None to save always", "number of steps, ")
        if mtbf is not None:
            raise ValueError(f"mtbf is {mtbf!r}, which is no longer used. Pass checkpoint_interval a number of steps")
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
        self._interval = checkpoint_interval
        self._is_sharded, self._is_async = sharded, async_save
        self._last_step: int | None = None
        self._retention: _Retention | None = None

        def look() -> tuple[list[str], int]:
            clean_leftovers(Path(directory), self._number_in)
            self._retention = _Retention(self._find(), max_to_keep, keep_checkpoint_every_n_hours)
            # The numbers of damaged ones are not reused.
            entries = os.listdir(directory) if os.path.isdir(directory) else []
            numbers = [int(match[1]) for entry in entries if (match := self._number_in(entry))]
            return self._retention.checkpoints, max(numbers, default=0)

        strategy = self._tracked.strategy("CheckpointManager()")
        listing = Agreement(strategy, "listing", f"the checkpoints of {self._directory}")
        self._checkpoints, self._highest = listing.chief_does(look)

    @property
    def checkpoint(self) -> Checkpoint:
        """The Checkpoint with the objects."""
        return self._checkpoint

    def __repr__(self) -> str:
        return f"<CheckpointManager of {self._checkpoint!r} in {self._directory!r}>"

    @property
    def directory(self) -> str:
        """Directory of the checkpoints."""
        return self._directory

    @property
    def checkpoint_interval(self) -> int | None:
        """Number of steps between two checkpoints, or None."""
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the managed checkpoints, the newest last; the same on all ranks.

        They exclude those kept for good, and one that a thread is still writing.
        """
        return list(self._checkpoints)

    @property
    def latest_checkpoint(self) -> str | None:
        """The newest of ``checkpoints``, or None."""
        return self._checkpoints[-1] if self._checkpoints else None

    def save(
        self, checkpoint_number: Variable | SupportsIndex | None = None, check_interval: bool = True
    ) -> str | None:
        """Save a checkpoint and remove surplus ones; collective as ``Checkpoint.save``.

        Args:
            checkpoint_number: Number for the name, or a variable of it. By default it is one more than the greatest in
                the directory, also after a restart, so that nothing is replaced.
            check_interval: Whether to respect ``checkpoint_interval``.

        Returns:
            The path, or None before the interval has passed.

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
        self._checkpoint.wait()
        last = self._checkpoint.save_counter
        counter = (last if given is not None else max(last, self._highest)) + 1
        number = counter if given is None else given
        path = Path(self._directory, f"{self._name}-{number}")

        def finish(manifest: Manifest) -> list[str]:
            assert self._retention is not None
            self._retention.add(path, manifest)
            return self._retention.checkpoints

        def finished(checkpoints: list[str]) -> None:
            self._checkpoints, self._highest = checkpoints, max(self._highest, number)

        before, self._last_step = self._last_step, step

        def failed() -> None:
            self._last_step = before

        kept = None if self._retention is None else self._retention.kept_after(path)
        options = SaveOptions(self._is_sharded, self._is_async, kept, finish, finished, failed)
        try:
            return self._tracked.save(path, counter, options)
        except BaseException:
            failed()
            raise

    def restore_or_initialize(self) -> str | None:
        """Restore the newest checkpoint, or call ``init_fn`` without one; collective as ``restore``.

        If it is damaged, all ranks restore the one before, and the first rank warns.

        Returns:
            The path of the checkpoint, or None without one.

        Raises:
            DamagedCheckpointError: All checkpoints are damaged.
            ValueError: The checkpoint does not fit the objects.
        """
        subject = f"the latest checkpoint of {self._directory}"
        status, unusable = self._tracked.restore(partial(reader.find_whole, reader.newest(self._find)), subject)
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
        """Return when the last save is on the disk; collective, as ``Checkpoint.wait``. Extension."""
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


def _check_count(name: str, value: object, otherwise: str, what: str = "whole number of ") -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1):
        raise ValueError(f"{name} is {value!r}; expected a {what}1 or more, or {otherwise}")


def _check_callable(name: str, value: object, otherwise: str = "") -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} is {value!r}; expected {otherwise}a function without arguments, or None")


def _whole(value: Variable | SupportsIndex) -> int:
    array = value.numpy() if isinstance(value, Variable) else np.asarray(value)
    if array.ndim or array.dtype.kind not in "iu" or array < 0:
        raise ValueError(f"checkpoint_number is {value!r}; expected a whole number of 0 or more, or None")
    return int(array)


class _Retention:
    """The checkpoints that a manager may remove, and those kept for good."""

    def __init__(self, found: Found, max_to_keep: int | None, keep_every_hours: float | None) -> None:
        self._max_to_keep = max_to_keep
        self._keep_every_hours = keep_every_hours
        # The newest checkpoint that knows says which were kept. Without one, the first interval begins now.
        known = [manifest.kept for _, manifest in found.checkpoints if manifest.kept is not None]
        self._kept = known[-1] if known else None if keep_every_hours is None else (time.time(), ())
        kept_names = self._kept[1] if self._kept is not None else ()
        self._saved_at = {
            str(path): manifest.saved_at for path, manifest in found.checkpoints if path.name not in kept_names
        }

    @property
    def checkpoints(self) -> list[str]:
        return list(self._saved_at)

    def forget(self, *paths: str) -> None:
        """Neither count nor remove these checkpoints from now on."""
        for path in paths:
            self._saved_at.pop(path, None)

    def kept_after(self, path: Path) -> tuple[float, tuple[str, ...]] | None:
        """Return ``kept`` for the manifest of the next checkpoint, ``path``."""
        return self._sorted_out({**self._without(path), str(path): time.time()})[1]

    def add(self, path: Path, manifest: Manifest) -> None:
        """Add a new checkpoint that is on the disk, and remove surplus ones."""
        self._saved_at = {**self._without(path), str(path): manifest.saved_at}
        surplus, self._kept = self._sorted_out(self._saved_at)
        for oldest, is_kept in surplus.items():
            self.forget(oldest)
            if is_kept:
                continue
            try:
                writer.remove_checkpoint(Path(oldest))
            except OSError as error:
                warnings.warn(f"checkpoint {oldest}, an old one, cannot be removed: {error}", stacklevel=2)

    def _without(self, path: Path) -> dict[str, float]:
        # A replaced one becomes the newest.
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
