"""Continue after ranks were lost: ``mpidist.elastic.run(train, state)``."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.checkpoint.agreement import Agreement, extended_of
from mpidist.checkpoint.checkpoint import Checkpoint, TrackedObjects, tracked_by
from mpidist.checkpoint.format import Manifest, dtype_of
from mpidist.checkpoint.reader import StateCheck, Values, Whole
from mpidist.checkpoint.writer import give_up_all
from mpidist.collectives.channel.channel import lose_all
from mpidist.core.context import in_scope_of
from mpidist.core.errors import RankLostError
from mpidist.topology import import_mpi, world_topology
from mpidist.topology.exit import agree, can_go_on, means_loss
from mpidist.topology.start import limited
from mpidist.topology.topology import has_world, replace_world
from mpidist.values.placement import on_host

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["State", "run"]

_log = logging.getLogger("mpidist")
T = TypeVar("T")


class _Commit(NamedTuple):
    """A copy that :meth:`State.commit` keeps. Its number is 0 for the initial values.

    ``values`` are the pickled values of the state. Manifest and arrays describe the tracked objects as a checkpoint.
    """

    number: int
    values: bytes
    manifest: Manifest | None = None
    arrays: dict[str, Array] = {}  # noqa: RUF012 - never modified


class State:
    """Values and objects of which :meth:`commit` keeps a copy on every rank.

    Pass values to the constructor: numbers, strings, arrays, lists and dicts of them, or other objects that can be
    pickled, the same on all ranks. They are attributes that live as long as the state. After ranks were lost, they are
    those of the last commit again. Objects of a strategy (variables, optimizers, metrics, iterators) are created again
    by each call of the training function, which passes them to :meth:`track`.

    Args:
        values: Values by name.

    Raises:
        ValueError: The state uses a name itself.
        TypeError: A value cannot be pickled.

    >>> state = State(step=0)
    >>> state.step += 1
    >>> state.commit()
    >>> state.step
    1
    """

    _values: dict[str, object]
    _tracked: TrackedObjects | None
    _last: _Commit
    # Number of commits of the job. The last commit of this rank may be older.
    _commits: int
    # The description of the objects on which all ranks have agreed.
    _agreed: str

    def __init__(self, **values: object) -> None:
        for name in values:
            _check_name(name)
        first = _Commit(0, _pickled(values))
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
        """Add objects of the current strategy, and restore them from the last commit.

        Collective: call it on every rank, once in each call of the training function, after the objects are created and
        before the first step. Without a commit they keep their values.

        Args:
            objects: As for ``Checkpoint``.

        Raises:
            RuntimeError: It was called before; or the objects belong to one process of several, as arrays do outside of
                ``with strategy.scope():``.
            ValueError: A name is taken.
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
                f"track() was given {sorted(objects)}, which belong to this process alone. Pass objects of a strategy "
                "of all ranks, and call track() inside `with strategy.scope():`. Pass other values to State(...)"
            )
        self.__dict__.update(_tracked=tracked, _agreed="")
        # Rank 0 has the newest commit, see `_take_over`.
        status, _ = tracked.restore(partial(_whole_of, self._last), "the last commit")
        if status is not None:
            status.expect_partial()

    def commit(self) -> None:
        """Keep a copy of everything; collective: call it on every rank, after the same step.

        Every rank keeps all of it, so it survives as long as one rank does.

        Raises:
            MismatchError: Ranks track different variables, arrays or iterators, by name, shape or kind, or have values
                of different names. Ranks compare them after each change.
        """
        number, values = self._commits + 1, _pickled(self._values)
        if self._tracked is None:
            last = self._last._replace(number=number, values=values)
        else:
            described = f"commit() of the values {sorted(self._values)} and of {_describe(self._tracked)}"
            if described != self._agreed:
                extended_of(self._tracked.strategy("commit()")).agree_on(lambda: described)
                self.__dict__["_agreed"] = described
            last = _Commit(number, values, *_copy_of(self._tracked))
        self.__dict__.update(_commits=number, _last=last)

    def _names(self) -> list[str]:
        tracked = [] if self._tracked is None else self._tracked.objects
        return sorted({*self._values, *tracked})

    def _forget_attempt(self) -> None:
        """Forget the objects of the last call of the training function."""
        self.__dict__["_tracked"] = None

    def _take_over(self, comm: MPI.Intracomm) -> None:
        """Send the newest commit to rank 0, and its values to every rank (collective)."""
        from mpi4py.util import pkl5

        self._forget_attempt()
        world = pkl5.Intracomm(comm)
        rank = comm.Get_rank()
        with limited("handing the newest commit on"):
            numbers = comm.allgather(self._last.number)
            newest = max(numbers)
            holder = numbers.index(newest)
            values: bytes = world.bcast(self._last.values, holder)
            # Other ranks keep the number of their own last commit, because they may have to send it next time.
            if holder and rank == holder:
                world.send(self._last, 0)
            elif holder and rank == 0:
                self.__dict__["_last"] = world.recv(source=holder)
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
    except Exception as error:  # pickling calls methods of the program's objects
        raise TypeError(
            f"a value of the state, {sorted(values)}, cannot be pickled: {error}; expected numbers, strings, arrays, "
            "lists and dicts of them; variables and other objects of a strategy go to state.track()"
        ) from error


def _copy_of(tracked: TrackedObjects) -> tuple[Manifest, dict[str, Array]]:
    """Return a copy of all values of ``tracked``, complete on every rank (collective)."""
    leaves = tracked.collect("keeping", is_to_save=True)
    with in_scope_of(tracked.strategy("keeping a snapshot")):
        arrays = {key: np.array(variable.numpy()) for key, variable in leaves.variables.items()}
        arrays.update({key: np.array(on_host(array)) for key, array in leaves.arrays.items()})
        values = leaves.values()
    manifest = leaves.manifest(leaves.describe(), values, tracked.save_counter, tracked.run_calls)
    return manifest, arrays


def _describe(tracked: TrackedObjects) -> str:
    """Return names and kinds of the objects that all ranks must have. Lists may grow on one rank alone."""
    leaves = tracked.collect("keeping")
    kinds = {key: f"{variable.dtype}{tuple(variable.shape)}" for key, variable in leaves.variables.items()}
    kinds.update({key: f"{array.dtype}{array.shape}" for key, array in leaves.arrays.items() if "/" not in key})
    kinds.update({key: type(iterator).__name__ for key, iterator in leaves.iterators.items() if "/" not in key})
    return ", ".join(f"{key}: {kind}" for key, kind in sorted(kinds.items())) or "no objects"


def _whole_of(commit: _Commit, agreement: Agreement, check: StateCheck) -> Whole | None:
    """Return the first rank's commit as a checkpoint, or None without one (collective)."""

    def propose() -> dict[str, object] | None:
        if commit.manifest is None:
            return None
        check(Path("a commit"), commit.manifest)
        return commit.manifest.to_json()

    content = agreement.chief_does(propose)
    if content is None:
        return None
    manifest = Manifest.from_json(content, "a commit")
    arrays = commit.arrays if agreement.is_chief else {}
    mine = {key: [np.ascontiguousarray(array).reshape(-1).view(np.uint8)] for key, array in arrays.items()}
    bytes_of = {key: tensor.size * dtype_of(tensor).itemsize for key, tensor in manifest.tensors.items()}
    holders = {key: [(0, size)] for key, size in bytes_of.items()}
    return Whole("a commit", manifest, Values(agreement.extended.communicator, manifest.tensors, holders, mine))


# Recovery -----------------------------------------------------------------------------------------------------------


def run(train: Callable[[State], T], state: State, *, min_ranks: int = 1) -> T:
    """Return the result of ``train(state)``, and continue without ranks that are lost.

    Collective: call it on every rank, once, with the same arguments. ``train`` creates its strategy, variables,
    optimizer and dataset, passes them to ``state.track``, and commits now and then. When a rank is lost, the others
    give up their calls, agree on the remaining ranks, and call ``train`` again. A strategy created then has the
    remaining ranks, and ``track`` restores the objects from the last commit.

    This needs Open MPI 5 and ``mpirun --with-ft ulfm``. With any other MPI the launcher ends the job when a rank is
    lost, and this is the same as ``train(state)``: save checkpoints, and start the job again.

    Args:
        train: Function that is called with ``state``.
        state: The values and objects to continue from.
        min_ranks: The job ends with an error if fewer ranks remain.

    Raises:
        RankLostError: Fewer ranks than ``min_ranks`` remain.
        ValueError: The job starts with fewer ranks.
        Exception: Other errors of ``train``.

    >>> def train(state):
    ...     while state.step < 3:
    ...         state.step += 1
    ...         state.commit()
    ...     return state.step
    >>> run(train, State(step=0))
    3
    """
    if not isinstance(min_ranks, int) or min_ranks < 1:
        raise ValueError(f"min_ranks is {min_ranks!r}; expected a whole number of 1 or more")
    if not isinstance(state, State):
        raise TypeError(f"state is {state!r}; expected mpidist.elastic.State(step=0, ...)")
    import_mpi()
    state._forget_attempt()
    if can_go_on() and not has_world():
        _begin(min_ranks)
    size = world_topology().world.Get_size()
    if size < min_ranks:
        raise ValueError(f"min_ranks is {min_ranks}, and the job has {size} ranks; expected {size} at most")
    if size == 1 or not can_go_on():
        return train(state)
    while True:
        result: list[T] = []
        lost: BaseException | None = None
        try:
            result.append(train(state))
        except Exception as error:
            if not _is_loss(error):
                raise
            lost = error
            # Ranks that wait for this rank in a collective must come here, too.
            lose_all()
        if _agree(world_topology().world, lost is None, "agreeing that the training is over"):
            return result[0]
        _continue(state, lost, min_ranks)


def _begin(min_ranks: int) -> None:
    """Create the world of mpidist, even if a rank is lost before that (collective)."""
    everyone = import_mpi().COMM_WORLD
    lost: BaseException | None = None
    try:
        world_topology()
    except Exception as error:
        if not isinstance(error, RankLostError) and not means_loss(error, everyone):
            raise
        lost = error
    if not _agree(everyone, lost is None, "agreeing to begin"):
        _check_number(everyone.Get_size(), _make_world(everyone, replace_world), min_ranks, lost)


def _is_loss(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RankLostError) or means_loss(seen, world_topology().world):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _agree(world: MPI.Intracomm, mine: bool, doing: str) -> bool:
    """Return, the same on all ranks, whether all say True and none is lost (MPI_Comm_agree)."""
    with limited(doing):
        return agree(world, mine)


def _make_world(old: MPI.Intracomm, prepare: Callable[[MPI.Intracomm], None]) -> MPI.Intracomm:
    """Return a communicator of the remaining ranks, after ``prepare`` on all of them."""
    while True:
        with limited("finding out which ranks are left"):
            world = cast("MPI.Intracomm", old.Shrink())
        try:
            prepare(world)
            is_well = True
        except import_mpi().Exception as error:
            if not means_loss(error, world):
                raise
            # Another rank is lost. Ranks that wait for this one must get an error, too.
            is_well = False
            world.Revoke()
        # Ranks may have seen different failures, so all continue or all repeat.
        if _agree(world, is_well, "agreeing to go on"):
            return world
        old = world


def _check_number(before: int, world: MPI.Intracomm, min_ranks: int, lost: BaseException | None) -> None:
    size = world.Get_size()
    if size < min_ranks:
        raise RankLostError(
            f"{before - size} of {before} ranks are lost, and {size} are left; expected {min_ranks} at least "
            "(min_ranks): start the job again, from its checkpoint"
        ) from lost


def _continue(state: State, lost: BaseException | None, min_ranks: int) -> None:
    """Replace the world by the remaining ranks (collective). Rank 0 gets the newest commit."""
    start = time.monotonic()
    lose_all()
    # Writes that wait for a lost rank would block the next ones.
    give_up_all()
    old = world_topology().world
    before = old.Get_size()
    old.Revoke()

    def take_over(world: MPI.Intracomm) -> None:
        state._take_over(world)
        replace_world(world)

    world = _make_world(old, take_over)
    _check_number(before, world, min_ranks, lost)
    if world.Get_rank() == 0:
        _log.warning(
            "mpidist: %d of %d ranks are lost; %d go on from commit %d, after %.2f s",
            before - world.Get_size(), before, world.Get_size(), state.commits, time.monotonic() - start,
        )  # fmt: skip
