"""Workers as threads of one process, with the part of a Communicator that input uses."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from mpidist.core.errors import PeerError
from mpidist.input.input_options import InputWorkers
from mpidist.values import PerReplica


class Meeting:
    """Where the threads exchange values; one that failed wakes those that wait for it."""

    def __init__(self, size):
        self.size = size
        self.changed = threading.Condition()
        self.exchanges = {}
        self.failed = False

    def exchange(self, number, rank, value):
        with self.changed:
            values = self.exchanges.setdefault(number, {})
            values[rank] = value
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(values) == self.size or self.failed, timeout=60)
            if len(values) < self.size:
                raise PeerError(f"a worker failed, or did not come to exchange {number}")
            return [values[other] for other in range(self.size)]

    def fail(self):
        with self.changed:
            self.failed = True
            self.changed.notify_all()


class ThreadCommunicator:
    """Counts its exchanges, so that tests can say that there were none."""

    def __init__(self, meeting, rank):
        self.meeting = meeting
        self.rank = rank
        self.size = meeting.size
        self.exchanges = 0

    def all_gather_object(self, value):
        self.exchanges += 1
        return self.meeting.exchange(self.exchanges, self.rank, value)

    def all_reduce(self, op, value):
        assert op == "MAX"
        return np.max(self.all_gather_object(value), axis=0)

    @contextmanager
    def shared_errors(self, doing):
        try:
            yield
        except Exception:
            self.meeting.fail()
            raise


def run_workers(function, replica_counts):
    """Return what ``function(workers)`` returns on each worker; an exception object where it raises."""
    counts = tuple(replica_counts)
    if len(counts) == 1:
        return [function(InputWorkers(1, 0, counts, None, True))]
    meeting = Meeting(len(counts))

    def work(rank):
        workers = InputWorkers(len(counts), rank, counts, ThreadCommunicator(meeting, rank), True)
        try:
            return function(workers)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(counts)) as pool:
        return list(pool.map(work, range(len(counts))))


def lists(step):
    """Return the parts of a PerReplica of arrays as lists."""
    assert isinstance(step, PerReplica)
    return tuple(np.asarray(part).tolist() for part in step.values)


def steps_of(distributed):
    """Return one pass as a list of steps, each a tuple with the rows of each local replica."""
    return [lists(step) for step in distributed]
