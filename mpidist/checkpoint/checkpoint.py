"""Checkpoint: saves and restores variables, optimizers and metrics, on any number of ranks and replicas."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from mpidist.arrays.convert import Array
from mpidist.checkpoint import storage
from mpidist.checkpoint.agreement import chief_does, extended_of
from mpidist.checkpoint.collecting import collect
from mpidist.checkpoint.containers import give_shape
from mpidist.checkpoint.leaves import Leaves
from mpidist.checkpoint.links import align
from mpidist.checkpoint.manifest import Manifest
from mpidist.checkpoint.naming import Found, checkpoints_in, numbered
from mpidist.checkpoint.restoring import Read, check_fit_of_all, fill, read_newest, restore_iterators
from mpidist.checkpoint.save_steps import Save, SaveOptions, Unsettled
from mpidist.checkpoint.status import LoadStatus
from mpidist.checkpoint.waiting import Waiting
from mpidist.core.context import (
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    outside,
)
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

    _objects: dict[str, Any]
    # Counted by PreemptionCheckpointHandler, in all runs of the program.
    _run_calls: int

    def __init__(self, **objects: Any) -> None:
        for name in objects:
            if name.startswith("_") or hasattr(type(self), name):
                raise ValueError(
                    f"a checkpoint object cannot be called {name!r}, as a method of Checkpoint is or because of its "
                    f"underscore; choose another name: Checkpoint(my_{name.strip('_')}=...)"
                )
        object.__setattr__(self, "_objects", objects)
        object.__setattr__(self, "_save_counter", 0)
        object.__setattr__(self, "_run_calls", 0)
        object.__setattr__(self, "_sequences", {})
        object.__setattr__(self, "_unsettled", None)
        object.__setattr__(self, "_waiting", None)
        object.__setattr__(self, "_last_leaves", collect(objects))

    def __repr__(self) -> str:
        return f"<Checkpoint of {', '.join(self._objects) or 'nothing'}>"

    def __getattr__(self, name: str) -> Any:
        objects = self.__dict__.get("_objects", {})
        if name not in objects:
            raise AttributeError(f"the checkpoint has no object {name!r}; it has {sorted(objects)}")
        return objects[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._objects:
            raise AttributeError(
                f"the checkpoint has no object {name!r}, it has {sorted(self._objects)}; "
                f"give it to the constructor: Checkpoint({name}=...)"
            )
        collect({name: value})
        self._objects[name] = value

    @property
    def save_counter(self) -> int:
        """Number of saves so far, those before ``restore`` included."""
        counter: int = self.__dict__["_save_counter"]
        return counter

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
        return self._write(numbered(prefix, number), number, SaveOptions(sharded, async_save))

    def write(self, path: str | os.PathLike[str], *, sharded: bool = False, async_save: bool = False) -> str:
        """Write a checkpoint under the very name ``path``; ``save_counter`` stays. Otherwise as :meth:`save`."""
        numbered(path, 0)
        self.wait()
        return self._write(Path(path), self.save_counter, SaveOptions(sharded, async_save))

    def wait(self) -> None:
        """Return once what ``save(..., async_save=True)`` began is on the disk; collective as ``save``. Extension.

        Raises:
            OSError: It could not be written; on the rank where that was. The others raise PeerError.
        """
        unsettled: Unsettled | None = self.__dict__["_unsettled"]
        if unsettled is None:
            return
        _check_context("wait()")
        object.__setattr__(self, "_unsettled", None)
        try:
            unsettled.settle()
        except BaseException:
            object.__setattr__(self, "_save_counter", unsettled.counter_before)
            raise

    def sync(self) -> None:
        """Do what :meth:`wait` does (tf.train.Checkpoint.sync)."""
        self.wait()

    def _write(self, path: Path, number: int, options: SaveOptions) -> str:
        leaves = self._collect_to_save("saving")
        strategy = _strategy_of(leaves, "save()")
        before = self.save_counter
        with entered(strategy):
            save = Save(strategy, leaves, path, number, self._run_calls, options)
            unsettled = save.start(lambda: self._next_sequence(path.parent), before)
            if options.is_async:
                object.__setattr__(self, "_unsettled", unsettled)
            else:
                unsettled.settle()
        object.__setattr__(self, "_save_counter", number)
        return unsettled.path

    def _collect_to_save(self, doing: str) -> Leaves:
        """Return all parts, and what is waiting for parts that are yet to come."""
        leaves = self._collect(doing)
        waiting: Waiting | None = self.__dict__["_waiting"]
        if waiting is not None:
            with self._shared_errors(doing):
                waiting.look_at_all()
            waiting.add_to(leaves)
        with self._shared_errors(doing):
            leaves.check_given()
        return leaves

    def _collect(self, doing: str) -> Leaves:
        with self._shared_errors(doing):
            leaves = collect(self._objects)
        object.__setattr__(self, "_last_leaves", leaves)
        return leaves

    @contextmanager
    def _shared_errors(self, doing: str) -> Iterator[None]:
        """Let the other ranks learn of what goes wrong in the block on this one, before it meets them."""
        try:
            yield
        except Exception as error:
            # Lists and dicts may have changed on this rank alone; the others are those of the last time.
            before: Leaves = self.__dict__["_last_leaves"]
            extended_of(_strategy_of(before, f"{doing} a checkpoint")).announce(error, doing)
            raise

    def _next_sequence(self, directory: Path) -> int:
        sequences: dict[Path, int] = self.__dict__["_sequences"]
        if directory not in sequences:
            found = checkpoints_in(directory).checkpoints
            sequences[directory] = found[-1][1].sequence if found else 0
        sequences[directory] += 1
        return sequences[directory]

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

        status, _ = self._restore(read, f"restoring checkpoint {os.fspath(path)}")
        assert status is not None
        return status

    def restore_latest(self, directory: str | os.PathLike[str]) -> LoadStatus | None:
        """Restore the checkpoint of ``directory`` that was saved last; None where there is none. Extension.

        Collective as ``restore``; the first rank looks for all, so ranks cannot find different ones. Instead of a
        damaged checkpoint the one before it is restored, on all ranks; the first rank warns of that, and says why.

        Raises:
            DamagedCheckpointError: There are checkpoints, and all are damaged.
        """
        status, unusable = self._restore_newest(
            lambda: checkpoints_in(Path(directory)), f"restoring the latest checkpoint of {os.fspath(directory)}"
        )
        if unusable and status is not None and self._is_chief():
            warn_of_unusable(unusable, status.path)
        return status

    def _restore_newest(self, find: Callable[[], Found], doing: str) -> tuple[LoadStatus | None, dict[str, str]]:
        return self._restore(lambda: read_newest(find), doing)

    def _restore(self, read: Callable[[], Read | None], doing: str) -> tuple[LoadStatus | None, dict[str, str]]:
        """Return the status, None where there is no checkpoint, and what could not be used."""
        self.wait()
        leaves = self._collect("restoring")
        strategy = _strategy_of(leaves, "restore()")
        arrays: dict[str, Array] = {}

        def read_on_chief() -> Any:
            answer = read()
            if answer is None:
                return None
            arrays.update(answer.arrays)
            return str(answer.path), answer.manifest.to_json(), answer.unusable

        with entered(strategy):
            answer = chief_does(strategy, doing, read_on_chief)
            if answer is None:
                return None, {}
            path, content, unusable = answer
            manifest = Manifest.from_json(content, path)
            aligned = align(manifest, leaves)
            check_fit_of_all(strategy, leaves, aligned, path, arrays, doing)
            restore_iterators(strategy, leaves, aligned.manifest, doing)
            if give_shape(leaves, aligned.manifest):
                leaves = collect(self._objects)
            filled = fill(strategy, leaves, aligned, arrays)
        waiting = self._wait_with(path, manifest, filled.waiting)
        status = LoadStatus(path, filled.missing, filled.unused, filled.deferred, waiting, filled.is_any)
        object.__setattr__(self, "_save_counter", manifest.number)
        object.__setattr__(self, "_run_calls", manifest.run_calls)
        return status, unusable

    def _wait_with(self, path: str, manifest: Manifest, values: dict[str, Array]) -> Waiting | None:
        """Keep values of variables that objects have yet to make, in the place of those of an earlier restore."""
        before: Waiting | None = self.__dict__["_waiting"]
        if before is not None:
            before.end()
        waiting = Waiting(path, self._objects, manifest, values) if values else None
        object.__setattr__(self, "_waiting", waiting)
        return waiting

    def _count_run_call(self) -> None:
        object.__setattr__(self, "_run_calls", self._run_calls + 1)

    def _is_chief(self) -> bool:
        return self._strategy("restore()").extended.should_checkpoint

    def _strategy(self, method: str) -> StrategyLike:
        return _strategy_of(self._collect("using"), method)


def warn_of_unusable(unusable: dict[str, str], used: str) -> None:
    """Say which checkpoints were passed over, and why, at the line that called the method which calls this."""
    reasons = "; ".join(f"{path} ({reason})" for path, reason in unusable.items())
    warnings.warn(f"checkpoints that cannot be used: {reasons}; restored {used} instead", stacklevel=3)


def _check_context(method: str) -> None:
    if has_strategy() and get_replica_context() is not None:
        raise RuntimeError(f"Checkpoint.{method} was called inside strategy.run(); call it outside, on every rank")


def _strategy_of(leaves: Leaves, method: str) -> StrategyLike:
    """Return the strategy that the checkpoint is saved or restored under, after checking the context."""
    _check_context(method)
    with outside():
        default = get_strategy()
    strategies = {v.distribute_strategy for v in leaves.variables.values()} - {default}
    if has_strategy():
        strategies.add(get_strategy())
    if len(strategies) > 1:
        names = sorted(type(strategy).__name__ for strategy in strategies)
        raise ValueError(
            f"Checkpoint.{method} involves the strategies {names}; expected variables of one strategy, the current "
            "one: make a checkpoint for each"
        )
    strategy = strategies.pop() if strategies else default
    extended_of(strategy).require_checkpoints(method if method[0].isupper() else f"Checkpoint.{method}")
    return strategy


def entered(strategy: StrategyLike) -> AbstractContextManager[Any]:
    """Return the block in which ``strategy`` is in scope."""
    is_inside = in_cross_replica_context() and get_strategy() is strategy
    return nullcontext() if is_inside else strategy.scope()
