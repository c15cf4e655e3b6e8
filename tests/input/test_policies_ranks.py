"""The policies over the real Communicator, on however many ranks there are, against the slow references."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.collectives import Communicator
from mpidist.core.errors import MismatchError, PeerError
from mpidist.input import SHARD_HINT, AutoShardPolicy, Dataset, InputWorkers, distribute_dataset
from mpidist.input.sources import FileNames
from tests.input.test_dealing import reference, reference_b
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


def counts_of(size, replicas, uneven):
    """Return the local replicas of every worker; uneven: the last one has one more."""
    return (*(replicas,) * (size - 1), replicas + (uneven and size > 1))


@settings(max_examples=60)
@given(
    policy=st.sampled_from(POLICIES),
    lengths=st.lists(st.integers(0, 6), min_size=4, max_size=8),
    size=st.integers(1, 9),
    replicas=st.integers(1, 2),
    uneven=st.booleans(),
    drop=st.booleans(),
    is_stream=st.booleans(),
)
def test_policies_agree_with_the_references(communicator, policy, lengths, size, replicas, uneven, drop, is_stream):
    counts = counts_of(communicator.size, replicas, uneven)
    rank = communicator.rank
    workers = InputWorkers(communicator.size, rank, counts, communicator if communicator.size > 1 else None, True)
    total = sum(lengths)
    starts = [0, *itertools.accumulate(lengths)]
    names = [f"{start}:{length}" for start, length in zip(starts, lengths, strict=False)]
    numbers = Dataset.from_generator(lambda: iter(range(total))) if is_stream else Dataset.range(total)
    source = {
        "FILE": lambda: Dataset(FileNames(names)).interleave(lambda path: Dataset.from_files([path], read), 1),
        "HINT": lambda: numbers.shard(SHARD_HINT, SHARD_HINT),
    }.get(policy, lambda: numbers)()
    options = {"block": {"assignment": "block"}}.get(policy) or {"auto_shard_policy": AutoShardPolicy[policy]}
    dataset = source.batch(size, drop_remainder=drop).with_options(**options)
    found = steps_of(distribute_dataset(dataset, workers, None))

    def batches(rows):
        cut = [rows[i : i + size] for i in range(0, len(rows), size)]
        return [batch for batch in cut if len(batch) == size or not drop]

    if policy in ("DATA", "block") or sum(counts) == 1:
        rule = "tf" if len(set(counts)) == 1 and policy != "block" else "block"
        assert found == [tuple(reference(batch, counts, rule)[rank]) for batch in batches(list(range(total)))]
        return
    own = []
    for worker in range(communicator.size):
        rows = {
            "FILE": list(itertools.chain(*(read(name) for name in names[worker :: communicator.size]))),
            "HINT": list(range(total))[worker :: communicator.size],
            "OFF": list(range(total)),
        }[policy]
        own.append(reference_b(itertools.chain(*batches(rows)), size, counts, worker))
    longest = max(map(len, own))
    assert found == own[rank] + [([],) * counts[rank]] * (longest - len(own[rank]))


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
