"""Save and restore variables, optimizers and metrics on any number of ranks and replicas."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.checkpoint import reader
from mpidist.checkpoint.agreement import Agreement, digest, extended_of
from mpidist.checkpoint.directory import checkpoints_in
from mpidist.checkpoint.format import Manifest, Tensor, TensorPart
from mpidist.checkpoint.objects import Leaves, Owned, collect, is_on_read
from mpidist.checkpoint.restoring import (
    Aligned,
    LoadStatus,
    Waiting,
    align,
    check_fit_of_all,
    check_states,
    fill,
    find_paths,
    give_shape,
    restore_iterators,
)
from mpidist.checkpoint.writer import Job, Plan, deal, elements_of, file_names, plan_parts
from mpidist.core.context import (
    StrategyLike,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_scope_of,
    is_default,
    outside,
)
from mpidist.core.phases import CHECKPOINT
from mpidist.values.composite import is_by_position
from mpidist.values.placement import on_host


class Checkpoint:
    """Named objects that are saved and restored together (tf.train.Checkpoint).

    Objects are variables, optimizers, metrics, arrays (filled in place, but JAX arrays are replaced), torch modules,
    numbers, strings and None, iterators, dicts, lists and tuples of them, and any object of the program with such
    objects in its attributes, at any depth. Numbers and strings in attributes are settings, and not saved.

    The named objects are attributes of the checkpoint: ``checkpoint.epoch += 1`` changes the number that is saved next,
    and ``restore`` sets it to the saved one. The saved state of an iterator is the result of ``state()``, and
    ``restore(state)`` receives it. Any object can have these two methods.

    A checkpoint is a directory with ``manifest.json`` and safetensors files. It holds one value per variable, so you
    can restore it on another number of ranks and replicas: ON_READ variables are saved as the aggregate over all
    replicas, and a restored sum is divided over them. Of all other objects, the first rank's values are saved.

    Args:
        objects: Objects to save, by name.

    Raises:
        TypeError: An object that a checkpoint cannot hold.
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

    def save(self, prefix: str | os.PathLike[str], *, sharded: bool = False, async_save: bool = False) -> str:
        """Write a numbered checkpoint: ``save("out/ckpt")`` writes ``out/ckpt-1``, then ``out/ckpt-2``.

        Collective over the ranks of the strategy whose variables are saved: call it on every rank, in the same
        order. The first rank writes, and all ranks return when the checkpoint is on the disk. It is written under
        another name and renamed, so a crash leaves no unfinished checkpoint under its name. A checkpoint of the same
        name is replaced. Under the default strategy, OneDeviceStrategy and MirroredStrategy of one process, each
        process saves alone: in a job of several ranks call it on one of them, or with another prefix on each. If two
        processes save to one name, it is an error as soon as it is detected.

        Args:
            prefix: Directory and name. A missing directory is created.
            sharded: Let every rank write a part at the same time, for models that take long to write. All ranks must
                share the directory. Extension.
            async_save: Return when the values are copied, and write in a thread. The next ``save``, ``restore`` or
                ``wait`` waits for it and raises its error, on all ranks. The end of the program also waits. Extension.

        Returns:
            The path, on every rank.

        Raises:
            OSError: The checkpoint could not be written. Raised on the rank where this occurred, and as PeerError on
                the others. No file of it remains, and earlier checkpoints are unchanged.
            RuntimeError: Called inside ``strategy.run``.
            TypeError: The state of an iterator that JSON cannot hold, or an object with nothing to save in its
                attributes.
            ValueError: Variables of several strategies, objects that are not on all ranks, or a prefix without a name.
        """
        _check_name(prefix)  # argument errors come before any communication
        tracked = self._tracked
        tracked.wait()
        number = tracked.save_counter + 1
        return tracked.save(Path(f"{os.fspath(prefix)}-{number}"), number, SaveOptions(sharded, async_save))

    def write(self, path: str | os.PathLike[str], *, sharded: bool = False, async_save: bool = False) -> str:
        """Write a checkpoint under exactly the name ``path``, and keep ``save_counter``. Otherwise as :meth:`save`."""
        _check_name(path)
        tracked = self._tracked
        tracked.wait()
        return tracked.save(Path(path), tracked.save_counter, SaveOptions(sharded, async_save))

    def wait(self) -> None:
        """Return when the last asynchronous save is on the disk; collective as ``save``. Extension.

        Raises:
            OSError: It could not be written. Raised on the rank where this occurred, and as PeerError on the others.
        """
        self._tracked.wait()

    def sync(self) -> None:
        """Wait as :meth:`wait` does (tf.train.Checkpoint.sync)."""
        self.wait()

    def restore(self, path: str | os.PathLike[str]) -> LoadStatus:
        """Restore the objects from a checkpoint.

        Collective over the ranks of the strategy whose variables are restored: call it on every rank. Ranks that see
        the files share the reading, each byte once, and send each other the tensors. Only the first rank must see
        them. Everything is checked before anything is changed. Iterators come first: if one raises an error, no other
        object has changed. Slots that an optimizer has not created yet, and values of variables that an object has
        not created yet, are kept. Each variable receives its value before its first use.

        Args:
            path: The result of ``save``. The first rank's counts.

        Returns:
            A status that tells whether everything matched. ``restore(path).assert_consumed()`` requires it.

        Raises:
            FileNotFoundError: The checkpoint is missing. Errors of reading are raised on the first rank, and as
                PeerError on the others.
            DamagedCheckpointError: The checkpoint was altered, or a part is missing; a ValueError.
            ValueError: Other shapes or dtypes, read-only arrays, objects that are not on all ranks, or a checkpoint
                with none of the objects. The objects keep their values.
            RuntimeError: Called inside ``strategy.run``.
        """
        if path is None:
            raise ValueError(
                "path is None, as latest_checkpoint() returns where there is no checkpoint; expected the path of one: "
                "start from scratch, or use restore_latest(directory), which returns None then"
            )
        source = partial(reader.find_whole, reader.only(Path(path)))
        status, _ = self._tracked.restore(source, f"checkpoint {os.fspath(path)}")
        assert status is not None
        return status

    def restore_latest(self, directory: str | os.PathLike[str]) -> LoadStatus | None:
        """Restore the checkpoint of ``directory`` that was saved last, or return None without one. Extension.

        Collective as ``restore``. The first rank looks for all, so all ranks restore the same one. If it is damaged,
        all ranks restore the one before, and the first rank warns and says why.

        Raises:
            DamagedCheckpointError: All checkpoints are damaged.
        """
        source = partial(reader.find_whole, reader.newest(lambda: checkpoints_in(Path(directory))))
        status, unusable = self._tracked.restore(source, f"the latest checkpoint of {os.fspath(directory)}")
        if status is not None:
            self._tracked.warn_of_unusable(unusable, status.path)
        return status


def tracked_by(checkpoint: Checkpoint) -> TrackedObjects:
    """Return the tracked objects of a checkpoint, for its manager and others."""
    return checkpoint._tracked


class TrackedObjects:
    """The objects of a Checkpoint, and its collective calls, without the names of the program.

    Attributes:
        objects: Objects by name.
        save_counter: Number of saves so far, those before a restore included.
        run_calls: Steps counted by PreemptionCheckpointHandler, in all runs of the program.
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
        """Replace the object of a name, if a checkpoint can hold ``value``."""
        collect({name: value})
        self.objects[name] = value

    def strategy(self, method: str) -> StrategyLike:
        """Return the strategy of the objects, after checking the context."""
        return _strategy_of(self.collect("using"), method)

    def collect(self, action: str, *, is_to_save: bool = False) -> Leaves:
        """Return all parts; to save, also the values that wait for further parts."""
        with self.shared_errors(action):
            self._last_leaves = leaves = collect(self.objects)
            if is_to_save:
                if self._waiting is not None:
                    self._waiting.look_at_all()
                    self._waiting.add_to(leaves)
                leaves.check_given()
        return leaves

    @contextmanager
    def shared_errors(self, action: str) -> Iterator[None]:
        """Announce an error of the block to the other ranks, before it is raised here."""
        try:
            yield
        except Exception as error:
            # Lists and dicts may have changed on this rank alone. The strategy is that of the last time.
            strategy = _strategy_of(self._last_leaves, f"{action} a checkpoint")
            extended_of(strategy).announce(error, action)
            raise

    @CHECKPOINT
    def save(self, path: Path, number: int, options: SaveOptions) -> str:
        """Save a checkpoint, or begin to, and return its path on the first rank."""
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

    @CHECKPOINT
    def restore(self, source: reader.Source, subject: str) -> tuple[LoadStatus | None, dict[str, str]]:
        """Return the status, or None without a checkpoint, and the unusable checkpoints."""
        self.wait()
        leaves = self.collect("restoring")
        strategy = _strategy_of(leaves, "restore()")
        agreement = Agreement(strategy, "restoring", subject)
        with in_scope_of(strategy):
            found = source(agreement, partial(check_states, leaves))
            if found is None:
                return None, {}
            path, manifest = found.path, found.manifest
            aligned = align(manifest, leaves)
            check_fit_of_all(agreement, leaves, aligned, path, found.values)
            restore_iterators(agreement, leaves, aligned.manifest)
            if give_shape(leaves, aligned.manifest):
                leaves = collect(self.objects)
            unused, deferred, values = fill(leaves, aligned, found.values)
            for slots in leaves.slots.values():
                slots.find(partial(find_paths, self.objects, manifest))
            if agreement.is_chief:
                _warn_of_positions({*manifest.classes, *leaves.slots}, aligned, unused, path)
        if self._waiting is not None:
            self._waiting.end()
        self._waiting = Waiting(path, self.objects, manifest, values)
        self.save_counter, self.run_calls = manifest.number, manifest.run_calls
        known = aligned.manifest.tensors.keys() | aligned.manifest.values.keys()
        missing = [key for key in leaves if key not in known]
        is_any = any(key in known for key in leaves)
        return LoadStatus(path, tuple(unused), missing, deferred, self._waiting, is_any), found.unusable

    def warn_of_unusable(self, unusable: dict[str, str], used: str) -> None:
        """Warn about skipped checkpoints on the first rank, at the caller's line."""
        if unusable and self.strategy("restore()").extended.should_checkpoint:
            reasons = "; ".join(f"{path} ({reason})" for path, reason in unusable.items())
            warnings.warn(f"checkpoints that cannot be used: {reasons}; restored {used} instead", stacklevel=3)


def _warn_of_positions(optimizers: set[str], aligned: Aligned, unused: list[str], path: str) -> None:
    """Warn if slots of optimizers, given by key, were restored by position."""
    used = {aligned.source(key) for key in aligned.manifest.tensors.keys() - set(unused)}
    unchecked = sorted(
        owner
        for owner in optimizers
        if any(key.startswith(f"{owner}/") and is_by_position(key.removeprefix(f"{owner}/")) for key in used)
    )
    if unchecked:
        warnings.warn(
            f"checkpoint {path} has slots of {', '.join(map(repr, unchecked))} by the position of their variables, so "
            "the order of the variables could not be checked. Build the optimizer with the variables in the order that "
            "was saved, and save a new checkpoint",
            stacklevel=4,
        )


def _check_name(path: str | os.PathLike[str]) -> None:
    """Raise ValueError if a path has no name, or the name of an unfinished checkpoint."""
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
    """Return the strategy of variables and models, or else the one in scope."""
    strategies = {get_strategy()} if _check_context(method) else set()
    for variable in leaves.variables.values():
        strategies.add(variable.distribute_strategy)
    # Objects of other libraries that were created for the replicas of a strategy.
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


# One save, with all ranks -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SaveOptions:
    """Options of a save.

    Attributes:
        is_sharded: Whether all ranks write.
        is_async: Whether a thread writes.
        kept: The field of the manifest. The first rank's counts.
        finish: Called on the first rank when the checkpoint is on the disk, in the thread that wrote it.
        finished: Called on every rank with the result of ``finish``.
        failed: Called on every rank after a failure.
    """

    is_sharded: bool = False
    is_async: bool = False
    kept: tuple[float, tuple[str, ...]] | None = None
    finish: Callable[[Manifest], list[str]] | None = None
    finished: Callable[[list[str]], None] | None = None
    failed: Callable[[], None] | None = None


class Save:
    """One save on one rank: ``start`` and then ``settle``, both collective.

    It takes two collectives, and two more if several ranks or a thread write. ``path`` is the first rank's path once
    it has begun to write, ``counter_before`` the save counter to restore after a failure.
    """

    def __init__(self, agreement: Agreement, leaves: Leaves, path: Path, options: SaveOptions) -> None:
        self._agreement, self._leaves, self._options = agreement, leaves, options
        self.path = str(path)
        self.counter_before = 0
        self._is_divided = False
        self._job: Job | None = None

    def start(self, next_sequence: Callable[[], int], number: int, run_calls: int) -> None:
        """Copy all values, and begin to write if several ranks or a thread write."""
        agreement, leaves, options = self._agreement, self._leaves, self._options
        values: dict[str, object] = {}
        tensors: dict[str, Tensor] = {}
        names: list[str] = []
        own_id = agreement.extended.local_replica_ids[0] if options.is_sharded else 0

        def describe() -> list[int]:
            values.update(leaves.values())
            tensors.update(leaves.describe())
            if options.is_sharded:  # the plan depends on all sizes
                names.extend(f"{key} of shape {each.shape} and dtype {each.dtype}" for key, each in tensors.items())
            else:
                names.extend(leaves.names_of_all_ranks())
            return [own_id, digest(names)]

        answers = agreement.every_rank_does(describe)
        agreement.check_same(names, [theirs for _, theirs in answers])
        self._is_divided = options.is_sharded and len(answers) > 1
        rank, ranks, plan = 0, 1, {key: [(0, 0, tensor.size)] for key, tensor in tensors.items()}
        if self._is_divided:
            rank, ranks = [first for first, _ in answers].index(own_id), len(answers)
            itemsizes = {key: each.dtype.itemsize for key, each in (*leaves.variables.items(), *leaves.arrays.items())}
            plan = plan_parts({key: (tensor.size, itemsizes[key]) for key, tensor in tensors.items()}, ranks)
        is_writer = agreement.is_chief or self._is_divided
        # A rank may lack the memory for a copy.
        with agreement.extended.shared_errors("saving"):
            arrays = self._read(plan, rank if is_writer else None)

        def manifest() -> Manifest:
            names = file_names(ranks)
            for key, parts in plan.items():
                locations = tuple([TensorPart(names[rank], start, stop) for rank, start, stop in parts])
                tensors[key] = replace(tensors[key], parts=locations)
            known = leaves.manifest(tensors, values, number, run_calls)
            return replace(known, sequence=next_sequence(), kept=options.kept, is_shared=agreement.extended.spans_ranks)

        if is_writer:
            self._job = Job(Path(self.path), rank, ranks, arrays, manifest, options.finish)
        if self._is_divided or options.is_async:
            self._begin_on_all_ranks()

    def _begin_on_all_ranks(self) -> None:
        job = self._job
        try:
            self.path, directory = self._agreement.chief_does(lambda: [self.path, job.begin() if job else ""])
        except BaseException:
            if job is not None:
                job.discard()
            raise
        if job is not None:
            job.directory = Path(directory)
            if self._options.is_async:
                job.start_thread()

    def settle(self) -> None:
        """Write or wait for the thread. Raise its exception, or PeerError for another rank."""
        agreement, job, options = self._agreement, self._job, self._options
        try:
            records = agreement.every_rank_does(job.part) if job is not None and self._is_divided else None
            self.path, result = agreement.chief_does(lambda: (self.path, job.result(records) if job else None))
        except BaseException:
            if job is not None:
                job.settle(failed=True)
            if options.failed is not None:
                options.failed()
            raise
        if job is not None:
            job.settle(failed=False)
        if options.finished is not None and result is not None:
            options.finished(result)

    def _read(self, plan: Plan, writer: int | None) -> dict[str, Array]:
        """Return the parts that rank ``writer`` writes.

        Collective for ON_READ variables, and for divided arrays, because the first rank's value counts.
        """
        comm = self._agreement.extended.communicator
        wanted = {key: (start, stop) for key, parts in plan.items() for rank, start, stop in parts if rank == writer}
        arrays = {}
        for key, variable in self._leaves.variables.items():
            if key in wanted or is_on_read(variable):
                array = variable.as_array()
                if key in wanted:
                    arrays[key] = self._part_of(array, *wanted[key], is_on_read(variable))
        for key, array in sorted(self._leaves.arrays.items()):
            is_dealt = comm is not None and plan[key] != [(0, 0, array.size)]
            part = deal(comm, array, plan[key]) if comm is not None and is_dealt else array
            if key in wanted:
                arrays[key] = part if is_dealt else self._part_of(array, *wanted[key])
        return arrays

    def _part_of(self, array: Array, start: int, stop: int, is_temporary: bool = False) -> Array:
        if stop - start < array.size:
            part = elements_of(array, start, stop)
            # A view would keep all of an array that nobody else needs.
            array = part.copy() if is_temporary else part
        if not self._options.is_async:
            return array
        copied = array if isinstance(array, np.ndarray) else on_host(array)
        # The program may change it while a thread writes. An array from a device is a copy already.
        needs_copy = copied is array
        return np.array(copied) if needs_copy else copied
