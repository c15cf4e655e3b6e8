"""Small messages between service threads: notifications, requests and their replies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mpidist.collectives.mpi.exchange import drain
from mpidist.collectives.rpc import Endpoint, Handlers, Reply, service
from mpidist.core.concurrency import wait_at_most
from mpidist.topology import import_mpi
from mpidist.topology.start import duplicate
from tests.support.speed import scaled

pytestmark = [pytest.mark.nodes, pytest.mark.counts]


@contextmanager
def endpoint(handlers: Handlers) -> Iterator[tuple[Endpoint, int, int]]:
    comm = duplicate(import_mpi().COMM_WORLD, "testing")
    opened = Endpoint(comm, 1, handlers)
    opened.open()
    try:
        yield opened, comm.Get_rank(), comm.Get_size()
    finally:
        comm.Barrier()
        opened.close()
        drain(comm, [opened.mailbox.count], "closing a test")
        comm.Free()


def test_a_notification_reaches_every_rank() -> None:
    heard: list[str] = []
    with endpoint({"greet": lambda _, text: heard.append(text)}) as (own, rank, size):
        service.call(lambda: [own.notify(other, "greet", f"from {rank}") for other in range(size)])
        wait_at_most(scaled(5), lambda: len(heard) == size, 0.01)
        assert sorted(heard) == [f"from {other}" for other in range(size)]


def test_replies_arrive_in_time_or_not_at_all() -> None:
    def answer(reply: Reply, delay: float) -> None:
        reply("at once")
        service.later(delay, lambda: reply("later"))

    heard: list[tuple[float, str]] = []
    ended: list[bool] = []

    def ask(own: Endpoint, rank: int) -> None:
        for delay, seconds in ((0.1, 5.0), (1.2, 1.0)):
            own.request(rank, "ask", delay, seconds=seconds, hear=lambda text, delay=delay: heard.append((delay, text)))
        service.later(2.0, lambda: ended.append(True))

    with endpoint({"ask": answer}) as (own, rank, size):
        service.call(lambda: ask(own, (rank + 1) % size))
        wait_at_most(scaled(10), lambda: bool(ended), 0.01)
        assert sorted(heard) == [(0.1, "at once"), (0.1, "later"), (1.2, "at once")]
