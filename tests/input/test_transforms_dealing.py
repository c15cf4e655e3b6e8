"""Every step of tf.data's everyday names, dealt to replicas and gone on with in the middle of a pass."""

import tempfile
from itertools import islice

import numpy as np
import pytest

from mpidist.collectives import Communicator
from mpidist.input import AutoShardPolicy, Dataset
from mpidist.input.distribute import distribute_dataset
from mpidist.input.input_options import InputWorkers
from tests.input.policy_helpers import DATA, FILE, HINT, named, read, rows_of, stream
from tests.input.resume_helpers import LAYOUTS, Case, all_rows, begin, go_on
from tests.input.worker_threads import lists, run_workers, steps_of

NAMES, _ = named([7, 1, 5, 9])
MORE, _ = named([4, 3, 2])
FOLDER = tempfile.TemporaryDirectory(prefix="mpidist-test-")  # removed with the module


def files(names=NAMES):
    return Dataset.from_files(names, read)


def ragged(source):
    return source.map(lambda x: [int(x)] * (int(x) % 3 + 1))


def first_column(batch):
    return batch[:, 0]


def sampled(source, other):
    return Dataset.sample_from_datasets([source, other], [0.7, 0.3])


def flat_windows(source, size):
    return source.window(size, shift=size + 1, stride=2).flat_map(lambda window: window.batch(size))


CASES = {
    "from_tensors": Case(lambda size: Dataset.from_tensors(np.arange(7)).repeat(3)),
    "concatenated rows": Case(
        lambda size: Dataset.range(9).shuffle().concatenate(Dataset.range(5)).shuffle().batch(size)
    ),
    "concatenated batches": Case(lambda size: Dataset.range(9).batch(size).concatenate(Dataset.range(6).batch(size))),
    "concatenated streams": Case(lambda size: stream(9).shuffle(3).concatenate(Dataset.range(6).shuffle()).batch(size)),
    "concatenated files": Case(lambda size: files().shuffle(5).concatenate(files(MORE)).batch(size), FILE),
    "unbatched": Case(lambda size: Dataset.range(17).shuffle().batch(3).unbatch().batch(size)),
    "unbatched files": Case(lambda size: files().batch(3).map(lambda x: x).unbatch().batch(size), FILE),
    "padded": Case(lambda size: ragged(Dataset.range(17).shuffle()).padded_batch(size).map(first_column)),
    "padded files": Case(lambda size: ragged(files()).padded_batch(size, [4]).map(first_column), FILE),
    "windows": Case(lambda size: flat_windows(Dataset.range(17).shuffle(seed=1), size)),
    "windows of files": Case(lambda size: flat_windows(files(), size), FILE),
    "sampled rows": Case(lambda size: sampled(Dataset.range(9).shuffle(), Dataset.range(5)).batch(size)),
    "sampled batches": Case(lambda size: sampled(Dataset.range(9).batch(size), Dataset.range(5).batch(size))),
    "sampled streams": Case(lambda size: sampled(stream(9), Dataset.range(5)).shuffle(3).batch(size)),
    "sampled files": Case(lambda size: sampled(files(), files(MORE)).batch(size), FILE),
    "cached rows": Case(lambda size: Dataset.range(17).shuffle().map(lambda x: x).cache().shuffle().batch(size)),
    "cached batches": Case(lambda size: Dataset.range(17).map(lambda x: x).shuffle().batch(size).cache().shuffle()),
    "cached elements": Case(lambda size: stream(17).shuffle(5).cache().shuffle(3).batch(size)),
    "cached batches of a stream": Case(lambda size: stream(17).shuffle(5).batch(size).cache()),
    "cached files": Case(lambda size: files().shuffle(5).cache().batch(size), FILE),
    "cached shard": Case(lambda size: Dataset.range(17).shard(-1, -1).map(lambda x: x).cache().batch(size), HINT),
    "in a file": Case(lambda size: stream(17).shuffle(5).cache(FOLDER.name + "/a").shuffle(3).batch(size)),
    "rows in a file": Case(lambda size: Dataset.range(17).shuffle().batch(size).cache(FOLDER.name + "/b")),
    "files in a file": Case(lambda size: files().shuffle(5).cache(FOLDER.name + "/c").batch(size), FILE),
}
SIZE = 4
OWN_WINDOWS = "windows of files"  # each rank has those of its own files, which are other ones than those of all files


def alone(case):
    """Return the rows of a pass of the dataset gone through by a single process, and of another one."""
    dataset = case.make(SIZE)
    if case.policy is HINT:
        return [sorted(range(17))] * 2
    return [sorted(np.concatenate([np.asarray(batch) for batch in dataset]).tolist()) for _ in range(2)]


@pytest.mark.one_rank
@pytest.mark.parametrize("name", [name for name in CASES if name != OWN_WINDOWS])
def test_a_pass_of_all_replicas_is_the_dataset_gone_through_alone(name):
    case = CASES[name]
    expected = alone(case)
    for counts in LAYOUTS:
        workers = run_workers(lambda own: [steps_of(each) for each in [case.distribute(own, SIZE)] * 2], counts)
        for number in range(2):
            assert sorted(row for worker in workers for row in rows_of(worker[number])) == expected[number]


@pytest.mark.one_rank
@pytest.mark.parametrize("counts", [(1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_same_layout_goes_on_as_if_nothing_had_been(name, counts):
    case = CASES[name]
    steps = len(begin(case, counts, SIZE, 100)[0][0])
    for taken in range(steps + 1):
        begun = begin(case, counts, SIZE, taken, passes=1)
        for (_, _, rest, following), (first, _, more, next_pass) in zip(
            begun, go_on(case, counts, SIZE, [begun[0][1]]), strict=True
        ):
            assert (first, more) == (rest, [])
            assert next_pass == following


@pytest.mark.one_rank
@pytest.mark.parametrize(("old", "new"), [((1, 1), (1, 1, 1)), ((1, 1, 1), (2,)), ((1,), (1, 2))], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_other_layouts_get_the_rest(name, old, new):
    case = CASES[name]
    whole = sorted(all_rows(worker[0] for worker in begin(case, old, SIZE, 100)))
    for taken in (1, 2):
        begun = begin(case, old, SIZE, taken)
        after = go_on(case, new, SIZE, [begun[0][1]])
        seen = all_rows(worker[0] for worker in begun) + all_rows(worker[0] for worker in after)
        assert sorted(seen) == sorted(all_rows(worker[0] for worker in begun) + all_rows(worker[2] for worker in begun))
        if "windows" not in name:
            assert sorted(seen) == whole


@pytest.mark.counts
@pytest.mark.parametrize("name", CASES)
def test_ranks(name):
    case = CASES[name]
    with Communicator() as communicator:
        size = communicator.size
        workers = InputWorkers(size, communicator.rank, (1,) * size, communicator if size > 1 else None, True)
        distributed = case.distribute(workers, SIZE)
        iterator = iter(distributed)
        first = [lists(step) for step in islice(iterator, 2)]
        state = iterator.state()
        rest = [lists(step) for step in iterator]
        iterator.restore(state)
        assert [lists(step) for step in iterator] == rest
        everyone = communicator.all_gather_object(rows_of(first + rest))
        if name != OWN_WINDOWS or size == 1:
            assert sorted(row for rows in everyone for row in rows) == alone(case)[0]


@pytest.mark.one_rank
def test_each_rank_reads_and_keeps_its_own_rows_of_cached_tables():
    def work(workers):
        asked = []
        dataset = Dataset.range(12).map(lambda x: asked.append(int(x)) or x).cache().concatenate(Dataset.range(4))
        distributed = distribute_dataset(dataset.batch(4), workers, None)
        rows = [rows_of(steps_of(distributed)) for _ in range(2)]
        return asked, rows

    for asked, (rows, again) in run_workers(work, (1, 1)):
        assert asked == rows[:6]
        assert rows == again


@pytest.mark.one_rank
def test_files_and_other_sources_together_are_no_files():
    both = files().concatenate(Dataset.range(5)).batch(2)
    with pytest.raises(ValueError, match="the source range.*which is no files"):
        distribute_dataset(both.with_options(auto_shard_policy=FILE), InputWorkers(1, 0, (2,), None, True), None)
    few = files().concatenate(files(MORE[:1])).batch(2)
    errors = run_workers(lambda workers: distribute_dataset(few, workers, None), (1, 1))
    assert all("1 files for 2 ranks" in str(error) for error in errors)


@pytest.mark.one_rank
def test_options_of_several_datasets():
    one, other = Dataset.range(2).with_options(auto_shard_policy=DATA), Dataset.range(2)
    for together in (one.concatenate(other), other.concatenate(one), Dataset.sample_from_datasets([other, one])):
        assert together._options == one._options
    with pytest.raises(ValueError, match=r"concatenate\(\) got datasets with different options"):
        one.concatenate(other.with_options(auto_shard_policy=AutoShardPolicy.OFF))


@pytest.mark.one_rank
def test_windows_cannot_be_dealt():
    with pytest.raises(TypeError, match="flat_map"):
        distribute_dataset(Dataset.range(9).window(3), InputWorkers(1, 0, (2,), None, True), None)
