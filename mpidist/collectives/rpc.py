"""RPC: small messages between ranks, served by one thread per process.

The service thread polls the open endpoints, and runs handlers and timers, so that these need no locks. It answers while
the program computes or waits in a collective. No call here waits for another rank.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from mpidist.collectives.channel.progress import mpi_takes_threads
from mpidist.collectives.channel.shutdown import after_shutdown
from mpidist.collectives.mpi.exchange import Mailbox
from mpidist.collectives.mpi.waiting import Comm
from mpidist.core.concurrency import DaemonThread, Stopwatch

# More messages often follow one.
_IDLE_SECONDS, _BUSY_SECONDS, _BUSY_FOR_SECONDS = 0.25, 0.005, 1.0
_HURRY_SECONDS = 0.2
# Name of replies to requests.
_REPLY = ""
Handlers = Mapping[str, Callable[..., object]]
Reply = Callable[[object], None]
"""Answers a request. A handler may call it several times."""


class ServiceThread(DaemonThread["Endpoint"]):
    """The service thread, which runs while any endpoint is open."""

    def __init__(self) -> None:
        super().__init__("service")
        self._calls: deque[Callable[[], object]] = deque()
        # Timers do not expire while the job is suspended, so that late answers still count.
        self._stopwatch = Stopwatch()
        self._timers: list[tuple[float, Callable[[], object]]] = []
        # Also closed ones until MPI has sent all of their messages.
        self._endpoints: list[Endpoint] = []
        self._busy_until = self._hurry_until = 0.0
        self.ticks: list[Callable[[], object]] = []
        """Functions that the thread calls a few times a second. They must be fast."""

    def is_allowed(self) -> bool:
        """Return whether this process can have the thread. If not, log the reason once."""
        return mpi_takes_threads("a rank that waits cannot ask the others what they do")

    def watch(self, thing: Endpoint) -> None:
        """Serve an endpoint from now on."""
        after_shutdown(self.stop)
        with self.lock:
            self._endpoints.append(thing)
            super().watch(thing)

    def call(self, function: Callable[[], object]) -> None:
        """Run ``function`` in the thread soon. Any thread or signal handler may call this."""
        self._calls.append(function)
        self.wake()

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Run ``function`` after some seconds. Call this in the thread only."""
        self._timers.append((self._stopwatch.seconds + seconds, function))

    def hurry(self) -> None:
        """Poll without a pause for a moment, because messages follow whose times count. Call this in the thread."""
        self._hurry_until = time.monotonic() + _HURRY_SECONDS

    def look(self) -> float:
        """Run the requested calls, receive messages and run expired timers."""
        # Hold the lock, so that no endpoint is closed and its communicator freed in between.
        with self.lock:
            while self._calls:
                self._calls.popleft()()
            for endpoint in list(self.watched):
                for source, message in endpoint.mailbox.received():
                    self._busy_until = time.monotonic() + _BUSY_FOR_SECONDS
                    endpoint.receive(source, *message)
            self._endpoints = [each for each in self._endpoints if not each.mailbox.all_sent() or each in self.watched]
            now = self._stopwatch.seconds
            due = [function for moment, function in self._timers if moment <= now]
            self._timers = [timer for timer in self._timers if timer[0] > now]
            for function in (*due, *self.ticks):
                function()
        if time.monotonic() < self._hurry_until:
            return 0.0
        return _BUSY_SECONDS if self._timers or time.monotonic() < self._busy_until else _IDLE_SECONDS


service = ServiceThread()


class Endpoint:
    """Small messages between the ranks of a communicator. The loss of a rank closes it.

    A message must fit MPI's eager buffers of a few KiB. MPI sends a larger one only when its receiver polls. The
    service thread calls the handler of a message's name with a Reply and the arguments. Drain ``mailbox.count`` before
    you free ``comm`` (see ``exchange.drain``).
    """

    def __init__(self, comm: Comm, tag: int, handlers: Handlers, service: ServiceThread = service) -> None:
        # The program detects a failed rank in its collectives.
        self.mailbox = Mailbox(comm, tag, on_loss=lambda _: self.close())
        self.is_open = False
        self._rank, self._handlers, self._service = comm.Get_rank(), handlers, service
        self._numbers = count(1)
        self._requests: dict[int, Callable[[Any], object]] = {}

    def open(self) -> None:
        """Send and receive from now on. The first open endpoint starts the thread."""
        self.is_open = True
        self._service.watch(self)

    def close(self) -> None:
        """Stop sending and receiving. The last endpoint ends the thread."""
        self.is_open = False
        self._service.forget(self)

    def notify(self, rank: int, name: str, *args: object) -> None:
        """Send a one-way message. Call this in the service thread."""
        self._send(rank, name, 0, args)

    def request(self, rank: int, name: str, *args: object, seconds: float, hear: Callable[[Any], object]) -> None:
        """Send a request, and call ``hear`` with each reply within ``seconds``. Call this in the service thread."""
        number = next(self._numbers)
        self._requests[number] = hear
        self._service.later(seconds, lambda: self._requests.pop(number))
        self._send(rank, name, number, args)

    def receive(self, source: int, name: str, number: int, args: tuple[object, ...]) -> None:
        """Act on a message. The service calls this."""
        if name != _REPLY:
            self._handlers[name](lambda answer: self._send(source, _REPLY, number, (answer,)), *args)
        elif number in self._requests:
            self._requests[number](*args)

    def _send(self, rank: int, name: str, number: int, args: tuple[object, ...]) -> None:
        if self.is_open and rank == self._rank:
            self.receive(rank, name, number, args)
        elif self.is_open:
            self.mailbox.send(rank, (name, number, args))
