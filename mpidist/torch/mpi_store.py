"""Rendezvous by MPI, without MASTER_ADDR, and torch's store over MPI, without sockets.

Rank 0 keeps the contents of all stores. Other ranks send it small messages, which a thread of rank 0 answers.
"""

from __future__ import annotations

import multiprocessing.process
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, cast
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from mpidist.collectives.channel.progress import mpi_takes_threads
from mpidist.collectives.channel.shutdown import after_shutdown
from mpidist.collectives.mpi.exchange import Mailbox
from mpidist.core import message_tags
from mpidist.core.concurrency import DaemonThread, Deadline, Stopwatch
from mpidist.core.errors import LaunchError
from mpidist.topology import trains_alone, world_topology
from mpidist.topology.start import duplicate
from mpidist.torch.groups import check_place
from mpidist.torch.variables import set_missing

if TYPE_CHECKING:
    from mpi4py import MPI

# Requests often follow each other. Otherwise the thread leaves the core to the program.
_BUSY_SECONDS, _IDLE_SECONDS, _BUSY_FOR_SECONDS = 2e-4, 1e-2, 0.2
_SHORTEST_NAP_SECONDS, _LONGEST_NAP_SECONDS = 5e-5, 2e-3
# Stands for the number of a request.
_SHUTDOWN = -1
# Key of an address at which programs may open a store of their own.
_ADDRESS = "mpidist/address"


def meet(url: str, timeout: timedelta | None = None, **_: object) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield a store, rank and number of ranks (collective); the handler of ``env://`` for torch.

    Args:
        url: URL with the rank and the number of ranks, if the program passed them.
        timeout: Timeout of the store.

    Raises:
        LaunchError: The program passed another rank or number of ranks than MPI has.
    """
    world = world_topology()
    query = parse_qs(urlparse(url).query)
    rank, size = [int(query.get(name, ["-1"])[0]) for name in ("rank", "world_size")]
    check_place(rank, size)
    if (world.size, size) == (1, -1) and multiprocessing.process.parent_process() is not None:
        error = trains_alone("no rank and world_size", "N")
        raise LaunchError(f"{error} If one process alone is intended, pass rank=0 and world_size=1.")
    set_missing(RANK=world.rank, WORLD_SIZE=world.size, LOCAL_RANK=world.local_rank, LOCAL_WORLD_SIZE=world.local_size)
    store = _open_store(timeout or dist.default_pg_timeout)
    if world.rank == 0:
        store.set(_ADDRESS, f"{'localhost' if world.num_nodes == 1 else socket.gethostname()} {_free_port()}")
    address, port = store.get(_ADDRESS).decode().split()
    set_missing(MASTER_ADDR=address, MASTER_PORT=port)
    yield store, world.rank, world.size
    raise RuntimeError("torch has called the rendezvous handler again. Ranks of MPI have one rendezvous.")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def _open_store(timeout: timedelta) -> dist.Store:
    """Return a new store of all ranks (collective). Without MPI_THREAD_MULTIPLE it is a TCPStore."""
    world = world_topology().world
    if mpi_takes_threads("the ranks of torch.distributed share a TCPStore"):
        if not _lines:
            _lines.append(StoreLine(duplicate(world, "making a store for torch.distributed")))
        stores = _lines[0].stores
        stores.append(MpiStore(_lines[0], len(stores), timeout))
        return stores[-1]
    size, is_first = world.Get_size(), world.Get_rank() == 0
    host, port = world.bcast(None) if not is_first else (socket.gethostname(), 0)
    store = dist.TCPStore(host, port, size, is_first, timeout, wait_for_workers=False)
    if is_first:
        world.bcast((store.host, store.port))
    return store


class StoreLine:
    """The connection of a rank to the contents of all stores, which rank 0 keeps."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._mailbox = Mailbox(comm, message_tags.TORCH_STORE)
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        # C++ keeps its half of a store alive, but not the Python object.
        self.stores: list[MpiStore] = []
        self._contents: defaultdict[int, dist.HashStore] = defaultdict(_contents)
        self._lock, self._asked = threading.Lock(), 0
        if self._rank == 0 and self._size > 1:
            _store_thread.watch(self)
            after_shutdown(_store_thread.stop)

    def ask(self, number: int, name: str, *args: object) -> object:
        """Return the result of a method of store ``number``, called on rank 0."""
        if self._rank == 0:
            return getattr(self._contents[number], name)(*args)
        with self._lock:
            self._asked += 1
            self._mailbox.send(0, (self._asked, (number, name, *args)))
            answer = self._next_answer()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _next_answer(self) -> object:
        deadline, naps = Deadline(None, _no_answer), _naps()
        while True:
            deadline.check()
            for _, (request, answer) in self._mailbox.received():
                if request == _SHUTDOWN:
                    raise dist.DistNetworkError("Rank 0, which keeps the store, has shut down.")
                # An interrupted request has left its answer behind.
                if request == self._asked:
                    # Forget the messages that have been sent.
                    self._mailbox.all_sent()
                    return answer
            next(naps)

    def answer(self) -> bool:
        """Answer other ranks, on rank 0. Return whether there was anything to do."""
        was_asked = False
        for source, (request, call) in self._mailbox.received():
            try:
                result = self.ask(*call)
            except Exception as error:  # of the rank that asks, such as add() to text
                result = error
            self._mailbox.send(source, (request, result))
            was_asked = True
        return not self._mailbox.all_sent() or was_asked

    def shutdown(self) -> None:
        """Tell other ranks that they get no more answers."""
        for rank in range(1, self._size):
            self._mailbox.send(rank, (_SHUTDOWN, None))


def _contents() -> dist.HashStore:
    store = dist.HashStore()
    # The rank that asks for a key waits. The thread must not, if the key was deleted since.
    store.set_timeout(timedelta(milliseconds=1))
    return store


def _naps() -> Iterator[None]:
    """Sleep between the iterations of a loop that polls."""
    nap = _SHORTEST_NAP_SECONDS
    while True:
        time.sleep(nap)
        yield
        nap = min(1.5 * nap, _LONGEST_NAP_SECONDS)


def _no_answer(waited: float) -> dist.DistNetworkError:
    return dist.DistNetworkError(
        f"Rank 0, which keeps the store, has not answered for {waited:.0f} s. Find out if it was stopped, or set "
        "MPIDIST_TIMEOUT=SECONDS to allow more time."
    )


class StoreThread(DaemonThread[StoreLine]):
    """The thread of rank 0 that answers requests."""

    def __init__(self) -> None:
        super().__init__("store")
        self._busy_until = 0.0

    def look(self) -> float:
        """Answer all requests, and return the seconds until the next poll."""
        now = time.monotonic()
        if any([line.answer() for line in self.watched]):
            self._busy_until = now + _BUSY_FOR_SECONDS
        return _BUSY_SECONDS if now < self._busy_until else _IDLE_SECONDS

    def stop(self) -> None:
        """End the thread, and tell the other ranks."""
        lines = list(self.watched)
        super().stop()
        for line in lines:
            line.shutdown()


_store_thread = StoreThread()
# The line of this process, when it has one.
_lines: list[StoreLine] = []


def _forwarded(name: str) -> Callable[..., object]:
    """Return the method of MpiStore that calls torch's method of this name on rank 0."""

    def method(self: MpiStore, *args: object) -> object:
        return self.ask(name, *args)

    method.__doc__, method.__name__ = f"See ``{name}`` of torch's Store.", name
    return method


class MpiStore(dist.Store):
    """torch's Store over MPI. ``number`` tells the stores of a job apart, ``timeout`` limits waits for keys."""

    def __init__(self, line: StoreLine, number: int, timeout: timedelta) -> None:
        super().__init__()
        self._line, self._number = line, number
        self.set_timeout(timeout)

    def ask(self, name: str, *args: object) -> object:
        """Return the result of a method, called on rank 0."""
        return self._line.ask(self._number, name, *args)

    set, add, append, compare_set = map(_forwarded, ("set", "add", "append", "compare_set"))
    check, delete_key, list_keys, num_keys = map(_forwarded, ("check", "delete_key", "list_keys", "num_keys"))

    def get(self, key: str) -> bytes:
        """Return a value when it is set."""
        self.wait([key])
        return cast("bytes", self.ask("get", key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are set. DistStoreError is raised after the timeout."""
        seconds, stopwatch, naps = (timeout or self.timeout).total_seconds(), Stopwatch(), _naps()
        while not self.ask("check", list(keys)):
            next(naps)
            if stopwatch.seconds > seconds:
                raise dist.DistStoreError(f"wait timeout after {1e3 * seconds:.0f}ms, keys: {', '.join(keys)}")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values when they are set."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return True: the store has append, multi_get and multi_set."""
        return True

    def clone(self) -> MpiStore:
        """Return the store, which all threads of a process may use at once."""
        return self

    # The names that C++ looks up.
    deleteKey, getNumKeys, hasExtendedApi = delete_key, num_keys, has_extended_api  # noqa: N815
