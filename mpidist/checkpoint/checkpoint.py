"""Checkpoint: saves and restores variables, optimizers and metrics, on any number of ranks and replicas."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mpidist.checkpoint import storage
from mpidist.checkpoint.restoring import Read
from mpidist.checkpoint.saving import SaveOptions
from mpidist.checkpoint.status import LoadStatus
from mpidist.checkpoint.storage import checkpoints_in, numbered
from mpidist.checkpoint.tracked import TrackedObjects


class Checkpoint:
    """Named objects that are saved and restored together (tf.train.Checkpoint).

    Objects are variables, optimizers, metrics, arrays (filled in place; those of JAX are replaced), torch modules,
    numbers, strings and None, iterators, dicts, lists and tuples of them, and any object of the program that has such
    things in its attributes, at any depth: numbers and strings there are its settings, and not saved.

    The named objects are attributes of the checkpoint: ``checkpoint.epoch += 1`` changes the number that is saved next,
    and after ``restore`` it is the one that was saved. Of an iterator the state is saved, which ``state()`` returns and
    ``restore(state)`` takes; any object with these two methods will do.

    A checkpoint is a directory with ``manifest.json`` and safetensors files. It holds one value per variable,
    so it can be restored on another number of ranks and replicas: ON_READ variables are saved as the aggregate over
    all replicas, and the restored sum is shared out. Of what is no variable, the first rank's is saved.

    Args:
        objects: What to save, by name.

    Raises:
        TypeError: Something that a checkpoint cannot hold.
        ValueError: A name that is a method of this class, or an ON_READ variable without aggregation.

    >>> import tempfile
    >>> from mpidist import Variable
    >>> v = Variable([1.0, 2.0], name="v")
    >>> checkpoint = Checkpoint(v=v, epoch=3)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = checkpoint.save(directory + "/ckpt")
    ...     v.assign([0.0, 0.0])
    ...     checkpoint.epoch = 0
    ...     status = checkpoint.restore(path).assert_consumed()
    <Variable 'v' shape=(2,) dtype=float64 ON_WRITE/NONE: [0., 0.]>
    >>> v.numpy(), checkpoint.epoch
    (array([1., 2.]), 3)
    """

    _tracked: TrackedObjects

    def __init__(self, **objects: Any) -> None:
        for name in objects:
            if name.startswith("_") or hasattr(type(self), name):
                raise ValueError(
                    f"a checkpoint object cannot be called {name!r}, as a method of Checkpoint is or because of its "
                    f"underscore; choose another name: Checkpoint(my_{name.strip('_')}=...)"
                )
        object.__setattr__(self, "_tracked", TrackedObjects(objects))

    def __repr__(self) -> str:
        return f"<Checkpoint of {', '.join(self._tracked.objects) or 'nothing'}>"

    def __getattr__(self, name: str) -> Any:
        tracked = self.__dict__.get("_tracked")
        objects = {} if tracked is None else tracked.objects
        if name not in objects:
            raise AttributeError(f"the checkpoint has no object {name!r}; it has {sorted(objects)}")
        return objects[name]

    def __setattr__(self, name: str, value: Any) -> None:
        objects = self._tracked.objects
        if name not in objects:
            raise AttributeError(
                f"the checkpoint has no object {name!r}, it has {sorted(objects)}; "
                f"give it to the constructor: Checkpoint({name}=...)"
            )
        self._tracked.set(name, value)

    @property
    def save_counter(self) -> int:
        """Number of saves so far, those before ``restore`` included."""
        return self._tracked.save_counter

    # Saving -------------------------------------------------------------------------------------------------------

    def save(self, prefix: str | os.PathLike[str], *, sharded: bool = False, async_save: bool = False) -> str:
        """Write a numbered checkpoint: ``save("out/ckpt")`` gives ``out/ckpt-1``, then ``out/ckpt-2``.

        Collective over the ranks of the strategy whose variables are saved: call it on every rank, in the same
        order. ON_READ variables are aggregated over all replicas; the first rank writes; all return once the
        checkpoint is on the disk. It is written under another name and renamed, so a crash leaves no half
        checkpoint under its name; one of the same name is replaced. Under the default strategy, OneDeviceStrategy
        and MirroredStrategy of one process each process is for itself: in a job of several ranks call it on one
        of them, or with a prefix of each one's own. Two processes that save to one name is an error, where it shows.

        Args:
            prefix: Directory and name; the directory is made where it is missing.
            sharded: Every rank writes a part, all at the same time, for models that take long to write. The directory
                must be one that all ranks share. Extension.
            async_save: Return as soon as the values are copied; a thread writes. The next ``save``, ``restore`` or
                ``wait`` waits for it and raises what went wrong, on all ranks; so does the end of the program, by
                itself. Extension.

        Returns:
            The path, on every rank.

        Raises:
            OSError: It could not be written; on the rank where that was. The others raise PeerError. Nothing of it is
                left, and the checkpoints that were there are.
            RuntimeError: Called inside ``strategy.run``.
            TypeError: An iterator whose state JSON cannot hold, or an object with nothing to save in its attributes.
            ValueError: Variables of several strategies, objects that not all ranks have, or a prefix without a name.
        """
        numbered(prefix, 0)  # an argument error comes before any communication
        self.wait()
        number = self.save_counter + 1
        return self._tracked.save(numbered(prefix, number), number, SaveOptions(sharded, async_save))

    def write(self, path: str | os.PathLike[str], *, sharded: bool = False, async_save: bool = False) -> str:
        """Write a checkpoint under the very name ``path``; ``save_counter`` stays. Otherwise as :meth:`save`."""
        numbered(path, 0)
        self.wait()
        return self._tracked.save(Path(path), self.save_counter, SaveOptions(sharded, async_save))

    def wait(self) -> None:
        """Return once what ``save(..., async_save=True)`` began is on the disk; collective as ``save``. Extension.

        Raises:
            OSError: It could not be written; on the rank where that was. The others raise PeerError.
        """
        self._tracked.wait()

    def sync(self) -> None:
        """Do what :meth:`wait` does (tf.train.Checkpoint.sync)."""
        self.wait()

    # Restoring ----------------------------------------------------------------------------------------------------

    def restore(self, path: str | os.PathLike[str]) -> LoadStatus:
        """Give the objects the values of a checkpoint.

        Collective over the ranks of the strategy whose variables are restored: call it on every rank. The first
        rank reads and broadcasts, so only it has to see the files, and they are read once, not once per rank.
        Everything is checked before anything is changed. Iterators come first: if one raises, nothing else has changed.
        Slots of an optimizer that has not made them yet are kept for when it does, and so are values of variables of an
        object: each gets its own at its first use.

        Args:
            path: What ``save`` returned. That of the first rank counts.

        Returns:
            A status that says whether everything matched; ``restore(path).assert_consumed()`` insists on it.

        Raises:
            FileNotFoundError: No checkpoint is there; on the first rank. The others raise PeerError for this and
                whatever else goes wrong there.
            DamagedCheckpointError: Something was altered or is missing; a ValueError.
            ValueError: Shapes or dtypes that differ, read-only arrays, objects that not all ranks have, or a checkpoint
                that has nothing of what is asked for. The objects keep their values.
            RuntimeError: Called inside ``strategy.run``.
        """
        if path is None:
            raise ValueError(
                "path is None, as latest_checkpoint() returns where there is no checkpoint; expected the path of one: "
                "start from scratch, or use restore_latest(directory), which returns None then"
            )

        def read() -> Read:
            manifest = storage.read_manifest(Path(path))
            return Read(Path(path), manifest, storage.read_arrays(Path(path), manifest))

        status, _ = self._tracked.restore(read, f"checkpoint {os.fspath(path)}")
        assert status is not None
        return status

    def restore_latest(self, directory: str | os.PathLike[str]) -> LoadStatus | None:
        """Restore the checkpoint of ``directory`` that was saved last; None where there is none. Extension.

        Collective as ``restore``; the first rank looks for all, so ranks cannot find different ones. Instead of a
        damaged checkpoint the one before it is restored, on all ranks; the first rank warns of that, and says why.

        Raises:
            DamagedCheckpointError: There are checkpoints, and all are damaged.
        """
        status, unusable = self._tracked.restore_newest(lambda: checkpoints_in(Path(directory)), os.fspath(directory))
        if status is not None:
            self._tracked.warn_of_unusable(unusable, status.path)
        return status


def tracked_by(checkpoint: Checkpoint) -> TrackedObjects:
    """Return what a checkpoint works with, of which only its objects and methods are seen by a program."""
    return checkpoint._tracked
