"""How the ranks of a pretended NCCL communicator reach one another: messages that are posted, and polled for.

Between processes they go over MPI. They have tags of their own on the world communicator, far from those of anybody
else: a communicator of their own could neither be made without all other ranks, nor given up by one rank alone. What
an aborted one has sent stays behind, so that a session of tests gives them a duplicate of the world, once.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
Steps = Generator[None, None, T]

# Tags per communicator: one to find one another, one for each lane of its messages.
JOINING, COLLECTIVES, ENDING = range(3)
_TAGS_EACH = 3
_FIRST_TAG = 1 << 15
_LENGTH = np.dtype(np.int64)
_NAP_SECONDS = 5e-5
_leaving: dict[int, MPI.Request] = {}
_duplicates: list[MPI.Comm] = []


class Transport(Protocol):
    """Messages between the ranks of a communicator, in order for each pair of ranks and lane."""

    rank: int
    size: int

    def send(self, peer: int, lane: int, data: bytes) -> Callable[[], bool]:
        """Post a message; returns what tells whether it has left."""
        ...

    def receive(self, peer: int, lane: int) -> Steps[bytes]:
        """Yield until the next message has come."""
        ...


class BetweenProcesses:
    """Messages over MPI.

    Args:
        world: All processes.
        rank: Of this process, in the communicator.
        world_ranks: Of all processes.
        number: Of the communicator; see ``tag``.
    """

    def __init__(self, world: MPI.Comm, rank: int, world_ranks: list[int], number: int) -> None:
        self.rank, self.size = rank, len(world_ranks)
        self._world, self._world_ranks, self._number = world, world_ranks, number

    def send(self, peer: int, lane: int, data: bytes) -> Callable[[], bool]:
        target, tag = self._world_ranks[peer], tag_of(self._number, lane)
        length = _sent(self._world.Isend(np.array([len(data)], _LENGTH), target, tag))
        content = _sent(self._world.Isend([np.frombuffer(data, np.uint8), len(data), _byte()], target, tag))
        # Both are tested each time: MPI need not move what nobody asks for.
        return lambda: all([length(), content()])

    def receive(self, peer: int, lane: int) -> Steps[bytes]:
        source, tag = self._world_ranks[peer], tag_of(self._number, lane)
        length = np.zeros(1, _LENGTH)
        yield from _received(self._world.Irecv(length, source, tag))
        content = np.empty(int(length[0]), np.uint8)
        yield from _received(self._world.Irecv([content, content.size, _byte()], source, tag))
        return content.tobytes()


class Board:
    """Where the ends of a communicator within one process leave their messages."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.messages: defaultdict[tuple[int, int, int], deque[bytes]] = defaultdict(deque)


class WithinProcess:
    """Messages between the ends of a communicator that one process has.

    Args:
        board: Which the ends have in common.
        rank: Of this end.
    """

    def __init__(self, board: Board, rank: int) -> None:
        self.rank, self.size = rank, board.size
        self._board = board

    def send(self, peer: int, lane: int, data: bytes) -> Callable[[], bool]:
        with self._board.lock:
            self._board.messages[self.rank, peer, lane].append(data)
        return lambda: True

    def receive(self, peer: int, lane: int) -> Steps[bytes]:
        waiting = self._board.messages[peer, self.rank, lane]
        while True:
            with self._board.lock:
                if waiting:
                    return waiting.popleft()
            yield


def _sent(request: MPI.Request) -> Callable[[], bool]:
    """Return what tells whether a message has left; until then it is kept, whoever gives up meanwhile."""
    _leaving[id(request)] = request

    def has_left() -> bool:
        done = bool(request.Test())
        if done:
            _leaving.pop(id(request), None)
        return done

    return has_left


def _received(request: MPI.Request) -> Steps[Any]:
    """Yield until a message has come; returns its status. Whoever gives up does not want it any more."""
    from mpi4py import MPI

    status = MPI.Status()
    try:
        while not request.Test(status):
            yield
    except GeneratorExit:
        request.Cancel()
        request.Wait()
        raise
    return status


def drive(steps: Steps[T], check: Callable[[], None]) -> T:
    """Run ``steps`` to the end, with ``check``, which may raise, in between."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            value: T = stop.value
            return value
        try:
            check()
        except BaseException:
            steps.close()
            raise
        time.sleep(_NAP_SECONDS)


def leave_the_world_alone() -> None:
    """Duplicate the world for all later messages (collective)."""
    from mpi4py import MPI

    _duplicates.append(MPI.COMM_WORLD.Dup())


def world_of_messages() -> MPI.Comm:
    """Return the communicator of all processes over which messages go."""
    from mpi4py import MPI

    return _duplicates[-1] if _duplicates else MPI.COMM_WORLD


def tag_of(number: int, lane: int) -> int:
    """Return the tag of a lane of communicator ``number``, unique among those that are in use."""
    from mpi4py import MPI

    rooms = (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) - _FIRST_TAG) // _TAGS_EACH
    return _FIRST_TAG + number % rooms * _TAGS_EACH + lane


def join(world: MPI.Comm, creator: int, number: int, size: int, mine: tuple[int, ...]) -> Steps[list[list[int]]]:
    """Return what each rank of a new communicator told of itself, in rank order.

    Args:
        world: All processes.
        creator: Rank in ``world`` of the process that made the unique id; it must be one of the ranks.
        number: Of the communicator.
        size: How many ranks there are.
        mine: What this one tells; its rank comes first.
    """
    from mpi4py import MPI

    tag = tag_of(number, JOINING)
    row = np.array(mine, _LENGTH)
    leaving = [_sent(world.Isend(row, creator, tag))]
    table = np.zeros((size, row.size), _LENGTH)
    if world.Get_rank() == creator:
        came: list[int] = []
        while len(came) < size:
            line = np.zeros_like(row)
            status = yield from _received(world.Irecv(line, MPI.ANY_SOURCE, tag))
            table[line[0]] = line
            came.append(status.Get_source())
        leaving += [_sent(world.Isend(table, rank, tag)) for rank in came if rank != creator]
    else:
        yield from _received(world.Irecv(table, creator, tag))
    while not all([has_left() for has_left in leaving]):
        yield
    rows: list[list[int]] = table.tolist()
    return rows


def _byte() -> Any:
    from mpi4py import MPI

    return MPI.BYTE
