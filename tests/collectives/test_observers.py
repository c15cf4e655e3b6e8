"""Observers: what a program sees of the collectives of its communicator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist import Communicator
from mpidist.collectives import Chunk, Observer, Operation


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
        self.seen.append(("waited", operation.is_work))


def test_the_events_of_a_call() -> None:
    events = Events()
    with Communicator() as comm:
        comm.add_observer(events)
        comm.all_reduce("SUM", np.ones(3))
        assert events.seen == [
            *[("issued", "all_reduce SUM"), ("began", 2)],
            *[("wait for others",), ("met",), ("ended", "handshake", "NoneType")],
        ]
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
    numbers = [event[2] for event in events.seen if event[:2] == ("chunk", "copy chunk")]
    assert numbers == sorted(set(numbers))
    assert numbers


@pytest.mark.min_ranks(2)
def test_the_error_of_a_call() -> None:
    events = Events()
    comm = Communicator()
    comm.add_observer(events)
    with pytest.raises(Exception, match="different calls"):
        comm.all_reduce("SUM", np.ones(3 + comm.rank))
    assert events.seen[-1] == ("ended", "handshake", "MismatchError")
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
