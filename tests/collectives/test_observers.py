"""Observers: what a program sees of the collectives of its communicator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import Communicator
from mpidist.collectives import Chunk, Observer, Operation
from mpidist.collectives.channel.operation import describe
from mpidist.collectives.mpi.exchange import first_does


class Events(Observer):
    """Writes down all that it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def issued(self, operation: Operation[Any]) -> None:
        self.seen.append(("issued", operation.description.title))

    def began(self, operation: Operation[Any]) -> None:
        self.seen.append(("began", operation.number))

    def phase(self, operation: Operation[Any], name: str) -> None:
        self.seen.append((name,))

    def met(self, operation: Operation[Any]) -> None:
        self.seen.append(("met",))

    def chunk(self, operation: Operation[Any], chunk: Chunk) -> None:
        self.seen.append(("chunk", chunk.event, chunk.number))

    def ended(self, operation: Operation[Any]) -> None:
        self.seen.append(("ended", *operation.algorithms, type(operation.error).__name__))

    def waited(self, operation: Operation[Any], start: int) -> None:
        self.seen.append(("waited", operation.is_async))


def test_the_events_of_a_call() -> None:
    events = Events()
    with Communicator() as comm:
        comm.add_observer(events)
        comm.all_reduce("SUM", np.ones(3))
        # The first one makes the algorithm, which the ranks meet for.
        rest: list[tuple[str, ...]] = [("wait for others",), ("met",), ("pack",), ("reduce",), ("unpack",)]
        node = comm._channel.node
        between_nodes = "mpi" if node.core is None else "leaders"
        on_one_node = "hierarchical" if comm.size > 1 else "alone"
        rest += [("ended", on_one_node if node.is_alone else between_nodes, "NoneType")]
        assert events.seen == [("issued", "all_reduce SUM"), ("began", 2), *rest]
        events.seen.clear()
        comm.remove_observer(events)
        comm.barrier()
        assert events.seen == []


def test_the_events_of_a_work() -> None:
    events = Events()
    with Communicator() as comm:
        comm.add_observer(events)
        comm.all_reduce_async("MAX", np.ones(1 << 16)).wait()
        kinds = [event[0] for event in events.seen]
    assert kinds[0] == "issued"
    assert kinds.index("began") < kinds.index("met") < kinds.index("ended")
    if comm.size > 1:
        assert {"pack", "wait for others", "reduce", "unpack"} <= set(kinds)


@pytest.mark.min_ranks(2)
def test_chunks_are_seen() -> None:
    events = Events()
    with Communicator() as comm:
        comm.add_observer(events)
        comm.all_reduce("SUM", np.ones(1 << 20))
        # A rank that is alone on its node copies nothing there: what it has goes to the others, and ends in any order.
        is_copied = comm._channel.node.has_neighbours
    found = ("chunk", "copy chunk" if is_copied else "chunk")
    numbers = [event[2] for event in events.seen if event[:2] == found]
    assert (numbers if is_copied else sorted(numbers)) == sorted(set(numbers))
    assert numbers


@pytest.mark.min_ranks(2)
def test_the_error_of_a_call() -> None:
    events = Events()
    comm = Communicator()
    comm.add_observer(events)
    with pytest.raises(Exception, match="different calls"):
        comm.all_reduce("SUM", np.ones(3 + comm.rank))
    assert events.seen[-1] == ("ended", "MismatchError")
    comm.close()


def test_an_error_of_an_observer_is_one_of_the_call() -> None:
    class Wrong(Observer):
        def issued(self, operation: Operation[Any]) -> None:
            raise ValueError("not mine")

    wrong = Wrong()
    with Communicator() as comm:
        comm.add_observer(wrong)
        with pytest.raises(ValueError, match="not mine"):
            comm.barrier()
        comm.remove_observer(wrong)
        comm.barrier()


def test_what_is_no_observer() -> None:
    with Communicator() as comm, pytest.raises(TypeError, match="expected an instance of a subclass of Observer"):
        comm.add_observer(print)  # type: ignore[arg-type]


@pytest.mark.min_ranks(2)
def test_an_error_when_a_call_is_issued_reaches_the_others() -> None:
    class Wrong(Observer):
        def issued(self, operation: Operation[Any]) -> None:
            raise ValueError("not mine")

    comm = Communicator()
    wrong = Wrong()
    if comm.rank == 0:
        comm.add_observer(wrong)
    with pytest.raises(ValueError if comm.rank == 0 else mpidist.PeerError, match="not mine"):
        comm.barrier()
    comm.remove_observer(wrong)
    comm.barrier()
    comm.close()


@pytest.mark.min_ranks(2)
def test_an_error_when_it_is_closed_is_logged_and_keeps_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(Observer):
        def closed(self) -> None:
            raise ValueError("not mine")

    comm = Communicator()
    if comm.rank == 0:
        comm.add_observer(Wrong())
    comm.close()
    assert ("not mine" in caplog.text) is (comm.rank == 0)


@pytest.mark.min_ranks(2)
def test_an_error_that_some_ranks_raise_together_reaches_those_of_another_communicator() -> None:
    def fail() -> None:
        raise ValueError("wrong on rank 0")

    comm = Communicator()
    part = comm.split(0 if comm.rank < comm.size - 1 else 1)
    assert part is not None
    if comm.rank < comm.size - 1:
        with pytest.raises(ValueError, match="wrong on rank 0"), comm.shared_errors("a test"):
            part._channel.run(Operation(first_does(part._channel.comm, fail), describe("a test")))
    else:
        with pytest.raises(mpidist.PeerError, match="wrong on rank 0"):
            comm.barrier()
    part.close()
    comm.close()
