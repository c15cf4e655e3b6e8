"""State: what a training goes on from after ranks were lost, kept in the memory of every rank."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.snapshot import Snapshot, restore_snapshot, take_snapshot

if TYPE_CHECKING:
    from mpi4py import MPI


class State:
    """Named objects as in a Checkpoint, of which :meth:`commit` keeps a copy in the memory of every rank.

    Numbers, strings, arrays and nests of them are given here, and live as long as the state. What belongs to a strategy
    (variables, optimizers, metrics, iterators) is made anew by each call of the training function, and given to
    :meth:`track` there.

    Args:
        values: By name; they are attributes of the state.

    >>> state = State(step=0)
    >>> state.step += 1
    >>> state.commit()
    >>> state.step
    1
    """

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_initial", copy.deepcopy(values))
        object.__setattr__(self, "_checkpoint", Checkpoint(**values))
        object.__setattr__(self, "_snapshot", None)
        object.__setattr__(self, "_commits", 0)

    def __getattr__(self, name: str) -> Any:
        if "_checkpoint" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_checkpoint"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._checkpoint, name, value)

    @property
    def commits(self) -> int:
        """How many commits there have been."""
        number: int = self.__dict__["_commits"]
        return number

    def track(self, **objects: Any) -> None:
        """Take objects of the present strategy along, and give all objects the values of the last commit.

        Collective: call it on every rank, once in each call of the training function, after the objects are made and
        before the first step. Without a commit they keep their values.

        Args:
            objects: As for ``Checkpoint``.
        """
        values = {name: getattr(self._checkpoint, name) for name in self._values}
        object.__setattr__(self, "_checkpoint", Checkpoint(**values, **objects))
        # The first rank has the newest commit, see `take_over`.
        restore_snapshot(self._checkpoint, self.__dict__["_snapshot"])

    def commit(self) -> None:
        """Keep a copy of everything, to go on from; collective: call it on every rank, after the same step.

        Every rank keeps all of it, so it survives as long as one rank does.
        """
        object.__setattr__(self, "_snapshot", take_snapshot(self._checkpoint))
        object.__setattr__(self, "_commits", self.commits + 1)

    def _forget_attempt(self) -> None:
        """Let go of the objects of a strategy that is lost, and give the values those that they began with."""
        object.__setattr__(self, "_checkpoint", Checkpoint(**copy.deepcopy(self._initial)))

    def _take_over(self, comm: MPI.Intracomm) -> None:
        """Let the first rank have the newest commit of all (collective)."""
        commits = comm.allgather(self.commits)
        newest = max(commits)
        holder = commits.index(newest)
        if holder:
            snapshot: Snapshot | None = self.__dict__["_snapshot"]
            if comm.Get_rank() == holder:
                comm.send(pickle.dumps(snapshot), 0)
            elif comm.Get_rank() == 0:
                object.__setattr__(self, "_snapshot", pickle.loads(comm.recv(source=holder)))
        object.__setattr__(self, "_commits", newest)
