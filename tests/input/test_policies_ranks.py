"""The policies over the real Communicator, on however many ranks there are, against the slow references."""

import itertools

import pytest

from mpidist.collectives import Communicator
from mpidist.core.errors import MismatchError, PeerError
from mpidist.input import SHARD_HINT, AutoShardPolicy, Dataset, InputWorkers, distribute_dataset
from mpidist.input.sources import FileNames
from tests.input.worker_threads import steps_of

pytestmark = pytest.mark.counts

POLICIES = ("DATA", "block", "FILE", "OFF", "HINT")


@pytest.fixture
def communicator():
    with Communicator() as opened:
        yield opened


def read(path):
    """Return the rows of a file: its name is their first number, a colon, and how many there are."""
    first, count = map(int, path.split(":"))
    return iter(range(first, first + count))


@pytest.mark.parametrize("policy", POLICIES)
def test_unseeded_orders_are_partitions_in_every_pass(communicator, policy):
    size = communicator.size
    workers = InputWorkers(size, communicator.rank, (2,) * size, communicator if size > 1 else None, True)
    names = [f"{7 * i}:7" for i in range(5)]
    rows = Dataset.range(35).shuffle()
    source = {
        "FILE": lambda: Dataset(FileNames(names)).shuffle().map(lambda path: Dataset.from_files([path], read)),
        "HINT": lambda: rows.shard(SHARD_HINT, SHARD_HINT),
    }.get(policy, lambda: rows)()
    if policy == "FILE":
        source = source.interleave(lambda part: part.shuffle(3)).shuffle(4)
    options = {"block": {"assignment": "block"}}.get(policy) or {"auto_shard_policy": AutoShardPolicy[policy]}
    distributed = distribute_dataset(source.batch(6).with_options(**options), workers, None)
    for _ in range(3):
        mine = [row for step in steps_of(distributed) for part in step for row in part]
        everything = sorted(itertools.chain(*communicator.all_gather_object(mine)))
        times = size if policy == "OFF" else 1
        assert everything == sorted(list(range(35)) * times)


@pytest.mark.min_ranks(2)
def test_too_few_files_and_other_files_are_errors_on_all_ranks(communicator):
    size = communicator.size
    workers = InputWorkers(size, communicator.rank, (1,) * size, communicator, True)
    with pytest.raises(ValueError, match=rf"{size - 1} files for {size} ranks"):
        distribute_dataset(Dataset.from_files(["a"] * (size - 1), read).batch(2), workers, None)
    others = ["0:1"] * (size + communicator.rank)
    with pytest.raises(MismatchError):
        distribute_dataset(Dataset.from_files(others, read).batch(2), workers, None)
    # A rank that sees fewer files than there are ranks tells the others, which see enough.
    fewer = ["0:1"] * (1 if communicator.rank == 0 else size)
    with pytest.raises(ValueError if communicator.rank == 0 else PeerError):
        distribute_dataset(Dataset.from_files(fewer, read).batch(2), workers, None)
