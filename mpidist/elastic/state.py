"""State: what a training goes on from after ranks were lost, kept in the memory of every rank."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.snapshot import Snapshot, describe_objects, restore_snapshot, take_snapshot
from mpidist.topology import world_topology
from mpidist.topology.limited_calls import limited
from mpidist.topology.topology import has_world

if TYPE_CHECKING:
    from mpi4py import MPI


class _Commit(NamedTuple):
    """What :meth:`State.commit` keeps.

    Attributes:
        number: Of the commit, 0 for what there was in the beginning.
        values: Those given to the state, pickled.
        snapshot: Of what was tracked; None where nothing was.
    """

    number: int
    values: bytes
    snapshot: Snapshot | None


class State:
    """Named values, and objects of a strategy, of which :meth:`commit` keeps a copy in the memory of every rank.

    Values are given here: numbers, strings, arrays, lists and dicts of them, or anything else that can be pickled; the
    same on all ranks. They are attributes, live as long as the state, and are those of the last commit again after
    ranks were lost. What belongs to a strategy (variables, optimizers, metrics, iterators) is made anew by each call of
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

    _values: dict[str, Any]
    _tracked: Checkpoint | None
    _last: _Commit
    _commits: int
    # What all ranks have said to have in common.
    _agreed: str

    def __init__(self, **values: Any) -> None:
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
        if self._tracked is not None and name in self._tracked._objects:
            return self._tracked._objects[name]
        raise AttributeError(f"the state has no object {name!r}; it has {self._names()}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._values:
            self._values[name] = value
        elif self._tracked is not None and name in self._tracked._objects:
            setattr(self._tracked, name, value)
        else:
            raise AttributeError(
                f"the state has no object {name!r}, it has {self._names()}; give it to the constructor: "
                f"State({name}=...)"
            )

    @property
    def commits(self) -> int:
        """How many commits there have been."""
        return self._commits

    def track(self, **objects: Any) -> None:
        """Take objects of the present strategy along, and give them the values of the last commit.

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
        tracked = Checkpoint(**objects)
        strategy: Any = tracked._strategy("track()")
        if objects and not strategy.extended._spans_ranks() and _is_job_of_several():
            raise RuntimeError(
                f"track() was given {sorted(objects)}, which belong to this process alone; expected objects of a "
                "strategy of all ranks: call it inside `with strategy.scope():`, or give what is no variable to "
                "State(...)"
            )
        self.__dict__.update(_tracked=tracked, _agreed="")
        # The first rank has the newest commit, see `_take_over`.
        restore_snapshot(tracked, self._last.snapshot)

    def commit(self) -> None:
        """Keep a copy of everything, to go on from; collective: call it on every rank, after the same step.

        Every rank keeps all of it, so it survives as long as one rank does.

        Raises:
            MismatchError: Ranks track other variables, arrays or iterators, by name, shape or kind, or have values of
                other names. They say what they have where that is new.
        """
        values = _pickled(self._values)
        if self._tracked is not None:
            self._agree_on_objects(self._tracked)
        snapshot = self._last.snapshot if self._tracked is None else take_snapshot(self._tracked)
        self.__dict__.update(_commits=self._commits + 1, _last=_Commit(self._commits + 1, values, snapshot))

    def _agree_on_objects(self, tracked: Checkpoint) -> None:
        described = f"commit() of the values {sorted(self._values)} and of {describe_objects(tracked)}"
        if described != self._agreed:
            strategy: Any = tracked._strategy("commit()")
            strategy.extended._agree_on(lambda: described)
            self.__dict__["_agreed"] = described

    def _names(self) -> list[str]:
        tracked = [] if self._tracked is None else self._tracked._objects
        return sorted({*self._values, *tracked})

    def _forget_attempt(self) -> None:
        """Let go of the objects of the last call of the training function."""
        self.__dict__["_tracked"] = None

    def _take_over(self, comm: MPI.Intracomm) -> None:
        """Let the first rank have the newest commit of all, and every rank its values (collective)."""
        from mpi4py.util import pkl5

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


def _pickled(values: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps(values, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever the pickling of an object raises
        raise TypeError(
            f"a value of the state, {sorted(values)}, cannot be pickled: {error}; expected numbers, strings, arrays, "
            "lists and dicts of them; variables and other objects of a strategy go to state.track()"
        ) from error


def _is_job_of_several() -> bool:
    return has_world() and world_topology().world.Get_size() > 1
