"""Call a training function again, on the remaining ranks, whenever ranks are lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from mpidist.checkpoint.writer import give_up_all
from mpidist.collectives.channel.channel import lose_all
from mpidist.core.errors import RankLostError
from mpidist.elastic.state import State
from mpidist.topology import import_mpi, world_topology
from mpidist.topology.exit import agree, can_go_on, means_loss
from mpidist.topology.start import limited
from mpidist.topology.topology import has_world, replace_world

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger("mpidist")
T = TypeVar("T")


def run(train: Callable[[State], T], state: State, *, min_ranks: int = 1) -> T:
    """Return the result of ``train(state)``, going on without ranks that are lost.

    Collective: call it on every rank, once, with the same arguments. ``train`` makes its strategy, variables, optimizer
    and dataset, gives them to ``state.track``, and commits now and then. When a rank is lost the others give up their
    calls, agree on who is left, and call ``train`` again: a strategy made then has the ranks that are left, and
    ``track`` gives the objects the values of the last commit.

    Ranks can be lost and the others go on with Open MPI 5 and ``mpirun --with-ft ulfm``. With any other MPI the
    launcher ends the job, and this is the same as ``train(state)``: save checkpoints, and start the job again.

    Args:
        train: Called with ``state``.
        state: The values and objects to go on from.
        min_ranks: With fewer ranks the job ends with an error instead.

    Raises:
        RankLostError: Fewer ranks than ``min_ranks`` are left.
        ValueError: The job has fewer from the beginning.
        Exception: Whatever else ``train`` raises.

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
        if lost is not None:
            # Those that wait for this rank in a collective are to come here, too.
            lose_all()
        # All have trained and none is lost: the same on all ranks.
        if _agree(world_topology().world, lost is None, "agreeing that the training is over"):
            return result[0]
        _go_on(state, lost, min_ranks)


def _begin(min_ranks: int) -> None:
    """Make the world of mpidist, even if a rank is lost before that (collective)."""
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
    """Return, the same on all ranks, whether all say so and none is lost.

    Calls MPI_Comm_agree.
    """
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
            # One more is lost. Those that wait for this rank are to come on, too.
            is_well = False
            world.Revoke()
        # Ranks may have seen different things: all go on, or all look again.
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


def _go_on(state: State, lost: BaseException | None, min_ranks: int) -> None:
    """Let the remaining ranks be the world, the first with the newest commit (collective)."""
    start = time.monotonic()
    lose_all()
    # Those that wait for a rank that is lost would stand in the way of the next ones.
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
