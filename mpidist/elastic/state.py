"""Values and objects to go on from after ranks were lost, in every rank's memory."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.checkpoint.agreement import Agreement, extended_of
from mpidist.checkpoint.checkpoint import Checkpoint, TrackedObjects, tracked_by
from mpidist.checkpoint.format import Manifest, dtype_of
from mpidist.checkpoint.reader import StateCheck, Values, Whole
from mpidist.core.context import in_scope_of
from mpidist.topology import world_topology
from mpidist.topology.start import limited
from mpidist.topology.topology import has_world
from mpidist.values.placement import on_host

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Snapshot:
    """A copy of the values of tracked objects.

    Attributes:
        manifest: As of a checkpoint.
        arrays: Its tensors by key.
    """

    manifest: Manifest
    arrays: dict[str, Array]


class _Commit(NamedTuple):
    """A copy that :meth:`State.commit` keeps.

    Attributes:
        number: Of the commit, 0 for the values of the beginning.
        values: Those given to the state, pickled.
        snapshot: Of the tracked objects, or None.
    """

    number: int
    values: bytes
    snapshot: Snapshot | None


class State:
    """Values and objects of which :meth:`commit` keeps a copy on every rank.

    Values are given here: numbers, strings, arrays, lists and dicts of them, or anything else that can be pickled; the
    same on all ranks. They are attributes, live as long as the state, and are those of the last commit again after
    ranks were lost. Objects of a strategy (variables, optimizers, metrics, iterators) are made anew by each call of
    the training function, and given to :meth:`track` there.

    Args:
        values: By name.

    Raises:
        ValueError: A name that the state uses itself.
        TypeError: A value that cannot be pickled.

    >>> state = State(step=0)
    >>> state.step += 1
    >>> state.commit()
    >>> state.step
    1
    """

    _values: dict[str, object]
    _tracked: TrackedObjects | None
    _last: _Commit
    _commits: int
    # The description of the objects on which all ranks have agreed.
    _agreed: str

    def __init__(self, **values: object) -> None:
        for name in values:
            _check_name(name)
        first = _Commit(0, _pickled(values), None)
        self.__dict__.update(_values=values, _tracked=None, _agreed="", _commits=0, _last=first)

    def __repr__(self) -> str:
        return f"<State of {self._names()}, committed {self._commits} times>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._values:
            return self._values[name]
        if self._tracked is not None and name in self._tracked.objects:
            return self._tracked.objects[name]
        raise AttributeError(f"the state has no object {name!r}; it has {self._names()}")

    def __setattr__(self, name: str, value: object) -> None:
        if name in self._values:
            self._values[name] = value
        elif self._tracked is not None and name in self._tracked.objects:
            self._tracked.set(name, value)
        else:
            raise AttributeError(
                f"the state has no object {name!r}, it has {self._names()}; give it to the constructor: "
                f"State({name}=...)"
            )

    @property
    def commits(self) -> int:
        """The number of commits so far."""
        return self._commits

    def track(self, **objects: object) -> None:
        """Take up objects of the present strategy, and give them their last commit.

        Collective: call it on every rank, once in each call of the training function, after the objects are made and
        before the first step. Without a commit they keep their values.

        Args:
            objects: As for ``Checkpoint``.

        Raises:
            RuntimeError: The second call; or objects that belong to one process of several, as arrays do outside of
                ``with strategy.scope():``.
            ValueError: A name that is taken.
        """
        if self._tracked is not None:
            raise RuntimeError("track() was called for the second time; give it all objects in one call")
        for name in objects:
            _check_name(name)
            if name in self._values:
                raise ValueError(f"track() was given {name!r}, which is a value of the state; choose another name")
        tracked = tracked_by(Checkpoint(**objects))
        strategy = tracked.strategy("track()")
        is_job_of_several = has_world() and world_topology().world.Get_size() > 1
        if objects and not extended_of(strategy).spans_ranks and is_job_of_several:
            raise RuntimeError(
                f"track() was given {sorted(objects)}, which belong to this process alone; expected objects of a "
                "strategy of all ranks: call it inside `with strategy.scope():`, or give what is no variable to "
                "State(...)"
            )
        self.__dict__.update(_tracked=tracked, _agreed="")
        # The first rank has the newest commit, see `_take_over`.
        restore_snapshot(tracked, self._last.snapshot)

    def commit(self) -> None:
        """Keep a copy of everything; collective: call it on every rank, after the same step.

        Every rank keeps all of it, so it survives as long as one rank does.

        Raises:
            MismatchError: Ranks track other variables, arrays or iterators, by name, shape or kind, or have values of
                other names. They tell each other where that is new.
        """
        values = _pickled(self._values)
        if self._tracked is not None:
            self._agree_on_objects(self._tracked)
        snapshot = self._last.snapshot if self._tracked is None else take_snapshot(self._tracked)
        self.__dict__.update(_commits=self._commits + 1, _last=_Commit(self._commits + 1, values, snapshot))

    def _agree_on_objects(self, tracked: TrackedObjects) -> None:
        described = f"commit() of the values {sorted(self._values)} and of {describe_objects(tracked)}"
        if described != self._agreed:
            extended_of(tracked.strategy("commit()")).agree_on(lambda: described)
            self.__dict__["_agreed"] = described

    def _names(self) -> list[str]:
        tracked = [] if self._tracked is None else self._tracked.objects
        return sorted({*self._values, *tracked})

    def _forget_attempt(self) -> None:
        """Let go of the objects of the last call of the training function."""
        self.__dict__["_tracked"] = None

    def _take_over(self, comm: MPI.Intracomm) -> None:
        """Give the first rank the newest commit, and every rank its values (collective)."""
        from mpi4py.util import pkl5

        self._forget_attempt()
        world = pkl5.Intracomm(comm)
        rank = comm.Get_rank()
        with limited("handing the newest commit on"):
            numbers = comm.allgather(self._last.number)
            newest = max(numbers)
            holder = numbers.index(newest)
            values: bytes = world.bcast(self._last.values, holder)
            # A commit that a rank does not have is never said to be its own: it may be the one to hand it on next.
            if holder and rank == holder:
                world.send(self._last.snapshot, 0)
            elif holder and rank == 0:
                self.__dict__["_last"] = _Commit(newest, values, world.recv(source=holder))
        self.__dict__.update(_commits=newest, _values=pickle.loads(values))


def _check_name(name: str) -> None:
    if name.startswith("_") or hasattr(State, name):
        raise ValueError(
            f"an object of a state cannot be called {name!r}, as a method of State is or because of its underscore; "
            f"choose another name, such as my_{name.strip('_')}"
        )


def _pickled(values: dict[str, object]) -> bytes:
    try:
        return pickle.dumps(values, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever the pickling of an object raises
        raise TypeError(
            f"a value of the state, {sorted(values)}, cannot be pickled: {error}; expected numbers, strings, arrays, "
            "lists and dicts of them; variables and other objects of a strategy go to state.track()"
        ) from error


def take_snapshot(tracked: TrackedObjects) -> Snapshot:
    """Return a copy of all values of ``tracked``, whole on every rank; collective."""
    leaves = tracked.collect("keeping", is_to_save=True)
    with in_scope_of(tracked.strategy("keeping a snapshot")):
        arrays = {key: np.array(variable.numpy()) for key, variable in leaves.variables.items()}
        arrays.update({key: np.array(on_host(array)) for key, array in leaves.arrays.items()})
        values = leaves.values()
    manifest = leaves.manifest(leaves.describe(), values, tracked.save_counter, tracked.run_calls)
    return Snapshot(manifest, arrays)


def describe_objects(tracked: TrackedObjects) -> str:
    """Return names and kinds of the objects that all ranks must have, without values.

    Lists may grow on one rank alone.
    """
    leaves = tracked.collect("keeping")
    kinds = {key: f"{variable.dtype}{tuple(variable.shape)}" for key, variable in leaves.variables.items()}
    kinds.update({key: f"{array.dtype}{array.shape}" for key, array in leaves.arrays.items() if "/" not in key})
    kinds.update({key: type(iterator).__name__ for key, iterator in leaves.iterators.items() if "/" not in key})
    return ", ".join(f"{key}: {kind}" for key, kind in sorted(kinds.items())) or "no objects"


def restore_snapshot(tracked: TrackedObjects, snapshot: Snapshot | None) -> None:
    """Give tracked objects the values of the first rank's snapshot, if any; collective."""
    status, _ = tracked.restore(partial(_whole_of, snapshot), "the last commit")
    if status is not None:
        status.expect_partial()


def _whole_of(snapshot: Snapshot | None, agreement: Agreement, check: StateCheck) -> Whole | None:
    """Return the first rank's snapshot as a checkpoint, or None without one (collective)."""

    def propose() -> dict[str, object] | None:
        if snapshot is None:
            return None
        check(Path("a commit"), snapshot.manifest)
        return snapshot.manifest.to_json()

    content = agreement.chief_does(propose)
    if content is None:
        return None
    manifest = Manifest.from_json(content, "a commit")
    arrays = snapshot.arrays if snapshot is not None and agreement.is_chief else {}
    mine = {key: [np.ascontiguousarray(array).reshape(-1).view(np.uint8)] for key, array in arrays.items()}
    bytes_of = {key: tensor.size * dtype_of(tensor).itemsize for key, tensor in manifest.tensors.items()}
    holders = {key: [(0, size)] for key, size in bytes_of.items()}
    values = Values(agreement.extended.communicator, manifest.tensors, holders, mine)
    return Whole("a commit", manifest, values)
