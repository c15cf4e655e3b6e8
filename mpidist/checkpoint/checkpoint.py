"""Save and restore variables, optimizers and metrics on any number of ranks and replicas."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mpidist.checkpoint.agreement import Agreement, extended_of
from mpidist.checkpoint.alignment import align, give_shape
from mpidist.checkpoint.collecting import Leaves, Owned, collect
from mpidist.checkpoint.restoring import check_fit_of_all, fill, restore_iterators
from mpidist.checkpoint.saving import Save, SaveOptions
from mpidist.checkpoint.sources import Newest, OneCheckpoint, Source, find_whole
from mpidist.checkpoint.status import LoadStatus, Waiting
from mpidist.checkpoint.storage import checkpoints_in
from mpidist.core.context import get_replica_context, get_strategy, has_strategy, in_scope_of, is_default, outside
from mpidist.core.protocols import StrategyLike


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
    all replicas, and the restored sum is shared out. Of anything but variables, the first rank's is saved.

    Args:
        objects: Those to save, by name.

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

    def __init__(self, **objects: object) -> None:
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

    def __setattr__(self, name: str, value: object) -> None:
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
                ``wait`` waits for it and raises its error, on all ranks; so does the end of the program, by
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
        _check_name(prefix)  # an argument error comes before any communication
        tracked = self._tracked
        tracked.wait()
        number = tracked.save_counter + 1
        return tracked.save(Path(f"{os.fspath(prefix)}-{number}"), number, SaveOptions(sharded, async_save))

    def write(self, path: str | os.PathLike[str], *, sharded: bool = False, async_save: bool = False) -> str:
        """Write a checkpoint under the very name ``path``; ``save_counter`` stays. Otherwise as :meth:`save`."""
        _check_name(path)
        tracked = self._tracked
        tracked.wait()
        return tracked.save(Path(path), tracked.save_counter, SaveOptions(sharded, async_save))

    def wait(self) -> None:
        """Return once the last asynchronous save is on the disk; collective as ``save``. Extension.

        Raises:
            OSError: It could not be written; on the rank where that was. The others raise PeerError.
        """
        self._tracked.wait()

    def sync(self) -> None:
        """Wait as :meth:`wait` does (tf.train.Checkpoint.sync)."""
        self.wait()

    # Restoring ----------------------------------------------------------------------------------------------------

    def restore(self, path: str | os.PathLike[str]) -> LoadStatus:
        """Give the objects the values of a checkpoint.

        Collective over the ranks of the strategy whose variables are restored: call it on every rank. Ranks that see
        the files share the reading, each byte once, and hand on what they have read; only the first has to see them.
        Everything is checked before anything is changed. Iterators come first: if one raises, nothing else has changed.
        Slots of an optimizer that has not made them yet are kept for when it does, and so are values of variables of an
        object: each gets its own at its first use.

        Args:
            path: The result of ``save``. That of the first rank counts.

        Returns:
            A status that says whether everything matched; ``restore(path).assert_consumed()`` insists on it.

        Raises:
            FileNotFoundError: No checkpoint is there; on the first rank. The others raise PeerError for this and
                whatever else goes wrong there.
            DamagedCheckpointError: Something was altered or is missing; a ValueError.
            ValueError: Shapes or dtypes that differ, read-only arrays, objects that not all ranks have, or a checkpoint
                that has none of the objects. The objects keep their values.
            RuntimeError: Called inside ``strategy.run``.
        """
        if path is None:
            raise ValueError(
                "path is None, as latest_checkpoint() returns where there is no checkpoint; expected the path of one: "
                "start from scratch, or use restore_latest(directory), which returns None then"
            )

        status, _ = self._tracked.restore(OneCheckpoint(Path(path)), f"checkpoint {os.fspath(path)}")
        assert status is not None
        return status

    def restore_latest(self, directory: str | os.PathLike[str]) -> LoadStatus | None:
        """Restore the checkpoint of ``directory`` that was saved last; None where there is none. Extension.

        Collective as ``restore``; the first rank looks for all, so ranks cannot find different ones. Instead of a
        damaged checkpoint the one before it is restored, on all ranks; the first rank warns of that, and says why.

        Raises:
            DamagedCheckpointError: There are checkpoints, and all are damaged.
        """
        newest = Newest(lambda: checkpoints_in(Path(directory)))
        status, unusable = self._tracked.restore(newest, f"the latest checkpoint of {os.fspath(directory)}")
        if status is not None:
            self._tracked.warn_of_unusable(unusable, status.path)
        return status


def tracked_by(checkpoint: Checkpoint) -> TrackedObjects:
    """Return the tracked objects of a checkpoint, for its manager and others."""
    return checkpoint._tracked


class TrackedObjects:
    """The objects of a Checkpoint, and the calls that its manager makes.

    Most methods are collective.

    Args:
        objects: By name.

    Attributes:
        objects: By name, as the program has set them.
        save_counter: Number of saves so far, those before a restore included.
        run_calls: Counted by PreemptionCheckpointHandler, in all runs of the program.
    """

    def __init__(self, objects: dict[str, object]) -> None:
        self.objects = objects
        self.save_counter = 0
        self.run_calls = 0
        # The last sequence number in each directory.
        self._sequences: dict[Path, int] = {}
        self._unsettled: Save | None = None
        self._waiting: Waiting | None = None
        self._last_leaves = collect(objects)

    def set(self, name: str, value: object) -> None:
        """Let ``value`` be the object of a name, if a checkpoint can hold it."""
        collect({name: value})
        self.objects[name] = value

    def strategy(self, method: str) -> StrategyLike:
        """Return the strategy that the objects are saved or restored under, after checking the context."""
        return _strategy_of(self.collect("using"), method)

    def collect(self, action: str, *, is_to_save: bool = False) -> Leaves:
        """Return all parts; to save, also the values that wait for further parts."""
        try:
            self._last_leaves = leaves = collect(self.objects)
            if is_to_save:
                if self._waiting is not None:
                    self._waiting.look_at_all()
                    self._waiting.add_to(leaves)
                leaves.check_given()
        except Exception as error:
            self._announce(error, action)
            raise
        return leaves

    @contextmanager
    def shared_errors(self, action: str) -> Iterator[None]:
        """Tell the other ranks of an error in the block, before it is raised here."""
        try:
            yield
        except Exception as error:
            self._announce(error, action)
            raise

    def _announce(self, error: Exception, action: str) -> None:
        # Lists and dicts may have changed on this rank alone; the others are those of the last time.
        strategy = _strategy_of(self._last_leaves, f"{action} a checkpoint")
        extended_of(strategy).announce(error, action)

    # Saving -------------------------------------------------------------------------------------------------------

    def save(self, path: Path, number: int, options: SaveOptions) -> str:
        """Save a checkpoint, or begin to, and return its path on the chief."""
        leaves = self.collect("saving", is_to_save=True)
        strategy = _strategy_of(leaves, "save()")
        agreement = Agreement(strategy, "saving", f"checkpoint {path}")
        with in_scope_of(strategy):
            save = Save(agreement, leaves, path, options)
            save.start(partial(self._next_sequence, path.parent), number, self.run_calls)
            if options.is_async:
                self._unsettled = save
                save.counter_before = self.save_counter
            else:
                save.settle()
        self.save_counter = number
        return save.path

    def wait(self) -> None:
        """Settle the save that a thread writes."""
        unsettled = self._unsettled
        if unsettled is None:
            return
        _check_context("wait()")
        self._unsettled = None
        try:
            unsettled.settle()
        except BaseException:
            self.save_counter = unsettled.counter_before
            raise

    def _next_sequence(self, directory: Path) -> int:
        if directory not in self._sequences:
            found = checkpoints_in(directory).checkpoints
            self._sequences[directory] = found[-1][1].sequence if found else 0
        self._sequences[directory] += 1
        return self._sequences[directory]

    # Restoring ----------------------------------------------------------------------------------------------------

    def restore(self, source: Source, subject: str) -> tuple[LoadStatus | None, dict[str, str]]:
        """Return the status, or None without a checkpoint, and the unusable ones.

        Args:
            source: Knows, on the chief, which checkpoint is wanted.
            subject: Names the checkpoint, for messages.
        """
        self.wait()
        leaves = self.collect("restoring")
        strategy = _strategy_of(leaves, "restore()")
        agreement = Agreement(strategy, "restoring", subject)
        with in_scope_of(strategy):
            found = find_whole(agreement, source)
            if found is None:
                return None, {}
            path, manifest = found.path, found.manifest
            aligned = align(manifest, leaves)
            check_fit_of_all(agreement, leaves, aligned, path, found.values)
            restore_iterators(agreement, leaves, aligned.manifest)
            if give_shape(leaves, aligned.manifest):
                leaves = collect(self.objects)
            unused, deferred, values = fill(leaves, aligned, found.values)
        if self._waiting is not None:
            self._waiting.end()
        self._waiting = Waiting(path, self.objects, manifest, values)
        self.save_counter, self.run_calls = manifest.number, manifest.run_calls
        known = aligned.manifest.tensors.keys() | aligned.manifest.values.keys()
        missing = [key for key in leaves if key not in known]
        is_any = any(key in known for key in leaves)
        return LoadStatus(path, tuple(unused), missing, deferred, self._waiting, is_any), found.unusable

    def warn_of_unusable(self, unusable: dict[str, str], used: str) -> None:
        """Let the chief warn of checkpoints that were passed over, at the caller's line."""
        if unusable and self.strategy("restore()").extended.should_checkpoint:
            reasons = "; ".join(f"{path} ({reason})" for path, reason in unusable.items())
            warnings.warn(f"checkpoints that cannot be used: {reasons}; restored {used} instead", stacklevel=3)


def _check_name(path: str | os.PathLike[str]) -> None:
    """Raise ValueError for a checkpoint without a name, or with that of an unfinished one."""
    text = os.fspath(path)
    folder, name = os.path.split(text)
    if not name or name.startswith("."):
        better = os.path.join(text if name in ("", ".", "..") else folder, name.strip(".") or "ckpt")
        raise ValueError(
            f"the path of the checkpoint is {text!r}; expected a name after the directory that does not begin "
            f"with a dot, such as {better!r}"
        )


def _check_context(method: str) -> bool:
    """Raise RuntimeError inside ``strategy.run``; return whether a strategy is in scope."""
    is_in_scope = has_strategy()
    if is_in_scope and get_replica_context() is not None:
        raise RuntimeError(f"Checkpoint.{method} was called inside strategy.run(); call it outside, on every rank")
    return is_in_scope


def _strategy_of(leaves: Leaves, method: str) -> StrategyLike:
    """Return the strategy of variables and models, or that in scope, if it has checkpoints."""
    strategies = {get_strategy()} if _check_context(method) else set()
    for variable in leaves.variables.values():
        strategies.add(variable.distribute_strategy)
    # Those of other libraries that were made for the replicas of a strategy.
    strategies.update(owner.distribute_strategy for owner in leaves.deferring.values() if isinstance(owner, Owned))
    if len(strategies) > 1:
        strategies = {strategy for strategy in strategies if not is_default(strategy)}
    if len(strategies) > 1:
        names = sorted(type(strategy).__name__ for strategy in strategies)
        raise ValueError(
            f"Checkpoint.{method} involves the strategies {names}; expected variables of one strategy, the current "
            "one: make a checkpoint for each"
        )
    if strategies:
        strategy = strategies.pop()
    else:
        with outside():
            strategy = get_strategy()
    extended_of(strategy).require_checkpoints(method if method[0].isupper() else f"Checkpoint.{method}")
    return strategy
