"""A store of torch over MPI: the dictionary that all ranks share, without a socket.

The first rank keeps it; the others ask by small messages beside the collectives, which a thread of the first answers.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed

from mpidist.collectives.channel.progress import mpi_takes_threads
from mpidist.collectives.channel.shutdown import after_shutdown
from mpidist.collectives.mpi.exchange import Mailbox
from mpidist.core import message_tags
from mpidist.core.concurrency import DaemonThread, Deadline, Stopwatch
from mpidist.topology import world_topology
from mpidist.topology.start import duplicate
from mpidist.torch.foreign import Foreign

if TYPE_CHECKING:
    from mpi4py import MPI

dist: Foreign = torch.distributed
_Store: Foreign = dist.Store
# Requests come in rows; between them the thread leaves the core to the program.
_BUSY_SECONDS, _IDLE_SECONDS, _BUSY_FOR_SECONDS = 2e-4, 1e-2, 0.2
_SHORTEST_NAP_SECONDS, _LONGEST_NAP_SECONDS = 5e-5, 2e-3
# In place of the number of a request.
_LEFT = -1


class Shelf:
    """The dictionaries of all stores of a job, on the first rank.

    A store is told apart by its number.
    """

    def __init__(self) -> None:
        self._items: dict[tuple[int, str], bytes] = {}
        self._lock = threading.Lock()

    def do(self, number: int, name: str, *args: Any) -> Any:
        """Carry out one request, which is the name of a method and its arguments."""
        method: Callable[..., Any] = getattr(self, f"_{name}")
        with self._lock:
            return method(number, *args)

    def _set(self, number: int, key: str, value: bytes) -> None:
        self._items[number, key] = value

    def _get(self, number: int, key: str) -> bytes | None:
        return self._items.get((number, key))

    def _add(self, number: int, key: str, amount: int) -> int:
        total = int(self._items.get((number, key), b"0")) + amount
        self._items[number, key] = str(total).encode()
        return total

    def _append(self, number: int, key: str, value: bytes) -> None:
        self._items[number, key] = self._items.get((number, key), b"") + value

    def _compare_set(self, number: int, key: str, expected: bytes, desired: bytes) -> bytes:
        present = self._items.get((number, key))
        if present == expected or (present is None and not expected):
            self._items[number, key] = present = desired
        return expected if present is None else present

    def _delete(self, number: int, key: str) -> bool:
        return self._items.pop((number, key), None) is not None

    def _check(self, number: int, keys: Sequence[str]) -> bool:
        return all((number, key) in self._items for key in keys)

    def _keys(self, number: int) -> list[str]:
        return [key for store, key in self._items if store == number]


class StoreLine:
    """The way to the shelf from one rank."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.mailbox = Mailbox(comm, message_tags.TORCH_STORE)
        self.shelf = Shelf() if comm.Get_rank() == 0 else None
        # C++ keeps its own half of a store alive, and not the Python object.
        self.stores: list[MpiStore] = []
        self._size = comm.Get_size()
        self._lock, self._asked = threading.Lock(), 0
        if self.shelf is not None and self._size > 1:
            store_thread.watch(self)
            after_shutdown(store_thread.stop)

    def ask(self, *request: Any) -> Any:
        """Return the answer to a request."""
        if self.shelf is not None:
            return self.shelf.do(*request)
        with self._lock:
            self._asked += 1
            self.mailbox.send(0, (self._asked, request))
            nap, deadline = _SHORTEST_NAP_SECONDS, Deadline(None, _no_answer)
            while True:
                deadline.check()
                for _, (number, answer) in self.mailbox.received():
                    if number == _LEFT:
                        raise dist.DistNetworkError("rank 0, which keeps the store, has left the program")
                    # One that was interrupted has left its answer behind.
                    if number == self._asked:
                        # Forgets those that have gone.
                        self.mailbox.all_sent()
                        return answer
                time.sleep(nap)
                nap = min(1.5 * nap, _LONGEST_NAP_SECONDS)

    def answer(self) -> bool:
        """Answer other ranks; return whether there was anything to do."""
        assert self.shelf is not None, "only the first rank is asked"
        was_asked = False
        for source, (number, request) in self.mailbox.received():
            self.mailbox.send(source, (number, self.shelf.do(*request)))
            was_asked = True
        return not self.mailbox.all_sent() or was_asked

    def leave(self) -> None:
        """Tell all other ranks that nobody answers any more."""
        for rank in range(1, self._size):
            self.mailbox.send(rank, (_LEFT, None))


def _no_answer(waited: float) -> dist.DistNetworkError:
    return dist.DistNetworkError(
        f"Rank 0, which keeps the store, gave no answer for {waited:.0f} s. Look for a process that was stopped; set "
        "MPIDIST_TIMEOUT=SECONDS to allow more time."
    )


class StoreThread(DaemonThread[StoreLine]):
    """The thread that answers the ranks that ask."""

    def __init__(self) -> None:
        super().__init__("store")
        self._busy_until = 0.0

    def look(self) -> float:
        """Answer all requests; return the seconds until the next look."""
        now = time.monotonic()
        if any([line.answer() for line in self.watched]):
            self._busy_until = now + _BUSY_FOR_SECONDS
        return _BUSY_SECONDS if now < self._busy_until else _IDLE_SECONDS

    def stop(self) -> None:
        """Tell the other ranks, and end."""
        lines = list(self.watched)
        super().stop()
        for line in lines:
            line.leave()


store_thread = StoreThread()
# The one of this process, once there is one.
_lines: list[StoreLine] = []


class MpiStore(_Store):
    """torch's Store over the messages of a StoreLine.

    Args:
        line: To the first rank.
        number: Of the store, in the order in which the ranks make them.
        timeout: Of a wait for a key.
    """

    def __init__(self, line: StoreLine, number: int, timeout: timedelta) -> None:
        super().__init__()
        self._line, self._number = line, number
        self.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._ask("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Return a value once it is there."""
        self.wait([key])
        value: bytes = self._ask("get", key)
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first, and return it."""
        total: int = self._ask("add", key, amount)
        return total

    def append(self, key: str, value: str | bytes) -> None:
        """Add bytes behind a value."""
        self._ask("append", key, _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a value if it is as expected, and return the present one."""
        value: bytes = self._ask("compare_set", key, _bytes(expected), _bytes(desired))
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        are_there: bool = self._ask("check", list(keys))
        return are_there

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are there.

        Raises:
            DistStoreError: They did not come in time.
        """
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        stopwatch, nap = Stopwatch(), _SHORTEST_NAP_SECONDS
        while not self.check(keys):
            if stopwatch.seconds > seconds:
                raise dist.DistStoreError(f"wait timeout after {1e3 * seconds:.0f}ms, keys: {', '.join(keys)}")
            time.sleep(nap)
            nap = min(1.5 * nap, _LONGEST_NAP_SECONDS)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values once they are there."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        """Remove a key, and return whether it was there."""
        was_there: bool = self._ask("delete", key)
        return was_there

    def list_keys(self) -> list[str]:
        """Return all keys."""
        keys: list[str] = self._ask("keys")
        return keys

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return len(self.list_keys())

    def has_extended_api(self) -> bool:
        """Return True: there are append, multi_get and multi_set."""
        return True

    def clone(self) -> MpiStore:
        """Return the store, which all threads of a process may use at once."""
        return self

    # The names that C++ looks up.
    deleteKey, getNumKeys, hasExtendedApi = delete_key, num_keys, has_extended_api  # noqa: N815

    def _ask(self, name: str, *args: Any) -> Any:
        return self._line.ask(self._number, name, *args)


def open_store(timeout: timedelta | None) -> Foreign:
    """Return a new store that all ranks share (collective).

    It is torch's TCPStore where MPI was started without MPI_THREAD_MULTIPLE.
    """
    world = world_topology()
    timeout = dist.default_pg_timeout if timeout is None else timeout
    if not mpi_takes_threads("the ranks of torch.distributed share a TCPStore"):
        return _tcp_store(world.world, timeout)
    if not _lines:
        _lines.append(StoreLine(duplicate(world.world, "making a store for torch.distributed")))
    line = _lines[0]
    line.stores.append(MpiStore(line, len(line.stores), timeout))
    return line.stores[-1]


def _tcp_store(world: MPI.Intracomm, timeout: timedelta) -> Foreign:
    if world.Get_rank() == 0:
        store = dist.TCPStore(socket.gethostname(), 0, world.Get_size(), True, timeout, wait_for_workers=False)
        world.bcast((store.host, store.port))
        return store
    host, port = world.bcast(None)
    return dist.TCPStore(host, port, world.Get_size(), False, timeout, wait_for_workers=False)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
