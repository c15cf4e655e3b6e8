"""The worked examples of input, in every layout: by their numbers where the layout is theirs, and by the rules."""

import numpy as np
import pytest

import mpidist
from mpidist import AutoShardPolicy, Dataset
from tests.acceptance.checks import ON_WRITE, SUM, is_default, is_single, local_ids, make_variable, num_workers
from tests.input.test_dealing import reference, reference_b
from tests.support.ranks.layouts import layouts

pytestmark = pytest.mark.counts


def place(strategy):
    """Return the number of workers, the replicas of each, and which worker this rank is."""
    local = len(local_ids(strategy))
    return num_workers(strategy), local, local_ids(strategy)[0] // local


def lists(strategy, batch):
    return tuple(np.asarray(part).tolist() for part in strategy.experimental_local_results(batch))


def steps_of(strategy, distributed):
    return [lists(strategy, batch) for batch in distributed]


def batches_of(rows, size, drop=False):
    cut = [list(rows)[i : i + size] for i in range(0, len(rows), size)]
    return [batch for batch in cut if len(batch) == size or not drop]


def by_rule_a(strategy, batches, assignment="tf"):
    """Return what this rank gets of global batches that all share."""
    workers, local, worker = place(strategy)
    return [tuple(reference(batch, (local,) * workers, assignment)[worker]) for batch in batches]


def padded(steps, longest, local):
    return steps + [([],) * local] * (longest - len(steps))


def stream(count):
    return Dataset.from_generator(lambda: iter(np.arange(count)))


RULE_A = {
    # rows, batch size, drop_remainder: {(workers, local replicas): the steps of every worker}
    "9": (4, 2, False, {(1, 2): [[([0], [1]), ([2], [3])]]}),
    "9, partial": (6, 4, False, {(1, 2): [[([0, 1], [2, 3]), ([4], [5])]]}),
    "10": (4, 4, False, {(1, 4): [[([0], [1], [2], [3])]]}),
    "10, three": (8, 4, False, {(1, 3): [[([0, 1], [2, 3], []), ([4, 5], [6, 7], [])]]}),
    "12": (12, 4, False, {(2, 1): [[([0, 1],), ([4, 5],), ([8, 9],)], [([2, 3],), ([6, 7],), ([10, 11],)]]}),
    "12, partial": (
        9,
        2,
        False,
        {(2, 1): [[([0],), ([2],), ([4],), ([6],), ([8],)], [([1],), ([3],), ([5],), ([7],), ([],)]]},
    ),
    "13": (
        15,
        4,
        False,
        {
            (2, 2): [
                [([0], [2]), ([4], [6]), ([8], [10]), ([12], [14])],
                [([1], [3]), ([5], [7]), ([9], [11]), ([13], [])],
            ]
        },
    ),
    "13, whole": (
        15,
        4,
        True,
        {(2, 2): [[([0], [2]), ([4], [6]), ([8], [10])], [([1], [3]), ([5], [7]), ([9], [11])]]},
    ),
    "14": (14, 8, False, {(2, 1): [[([0, 1, 2, 3],), ([8, 9, 10],)], [([4, 5, 6, 7],), ([11, 12, 13],)]]}),
}


@pytest.mark.parametrize("source", [Dataset.range, stream], ids=["rows", "stream"])
@pytest.mark.parametrize("example", RULE_A)
def test_examples_9_10_12_13_14_global_batches(strategy, example, source):
    rows, size, drop, numbers = RULE_A[example]
    dataset = source(rows).batch(size, drop_remainder=drop)
    expected = by_rule_a(strategy, batches_of(range(rows), size, drop))
    workers, local, worker = place(strategy)
    if (workers, local) in numbers:
        assert expected == numbers[workers, local][worker]
    distributed = strategy.experimental_distribute_dataset(dataset)
    for _ in range(2):
        assert steps_of(strategy, distributed) == expected


def test_example_9_run_on_what_comes(strategy):
    found = []
    for batch in strategy.experimental_distribute_dataset(Dataset.range(4).batch(2)):
        doubled = strategy.run(lambda x: x * 2, args=(batch,))
        found.append(lists(strategy, doubled))
    assert found == [tuple([2 * x for x in part] for part in step) for step in by_rule_a(strategy, [[0, 1], [2, 3]])]


def test_example_10_an_empty_part_keeps_its_shape(strategy):
    x = np.arange(3.0, dtype=np.float32).reshape(1, 3)
    dataset = Dataset.from_tensor_slices({"x": x}).batch(1)
    (batch,) = strategy.experimental_distribute_dataset(dataset)
    parts = strategy.experimental_local_results(batch)
    ids = [0] if is_single(strategy) else local_ids(strategy)
    assert [part["x"].shape for part in parts] == [(1 if i == 0 else 0, 3) for i in _parts(strategy, ids)]
    assert {part["x"].dtype.name for part in parts} == {"float32"}


def _parts(strategy, ids):
    """Return which part of a global batch each local replica gets."""
    workers, _, worker = place(strategy)
    return [replica * workers + worker for replica in range(len(ids))]


@pytest.mark.parametrize("drop", [False, True])
def test_example_11_batches_of_a_function(strategy, drop):
    distributed = strategy.distribute_datasets_from_function(lambda _: Dataset.range(9).batch(2, drop_remainder=drop))
    workers, local, _ = place(strategy)
    batches = batches_of(range(9), 2, drop)
    expected = [tuple(batches[i : i + local]) for i in range(0, len(batches), local)]
    if workers == 1 and drop:  # of static shapes a step that is short of batches is dropped
        expected = [step for step in expected if len(step) == local]
    expected = [(*step, *([[]] * (local - len(step)))) for step in expected]
    if (workers, local) == (1, 2):
        whole = [([0, 1], [2, 3]), ([4, 5], [6, 7])]
        assert expected == (whole if drop else [*whole, ([8], [])])
    assert steps_of(strategy, distributed) == expected


def test_example_13_blocks(strategy):
    dataset = Dataset.range(15).batch(4).with_options(assignment="block")
    expected = by_rule_a(strategy, batches_of(range(15), 4), "block")
    workers, local, worker = place(strategy)
    if (workers, local) == (2, 2):
        assert expected[0] == [([0], [1]), ([2], [3])][worker]
    assert steps_of(strategy, strategy.experimental_distribute_dataset(dataset)) == expected


def test_example_14_shards_of_a_function_and_off(strategy):
    def dataset_fn(context):
        return Dataset.range(14).batch(4).shard(context.num_input_pipelines, context.input_pipeline_id)

    workers, local, worker = place(strategy)
    batches = batches_of(range(14), 4)
    longest = max(-(-len(batches[w::workers]) // local) for w in range(workers))
    mine = batches[worker::workers]
    steps = [tuple((mine[i : i + local] + [[]] * local)[:local]) for i in range(0, len(mine), local)]
    expected = padded(steps, longest, local)
    if (workers, local) == (2, 1):
        assert expected == [[([0, 1, 2, 3],), ([8, 9, 10, 11],)], [([4, 5, 6, 7],), ([12, 13],)]][worker]
    assert steps_of(strategy, strategy.distribute_datasets_from_function(dataset_fn)) == expected

    everything = Dataset.range(12).batch(8).with_options(auto_shard_policy=AutoShardPolicy.OFF)
    found = steps_of(strategy, strategy.experimental_distribute_dataset(everything))
    if strategy.num_replicas_in_sync == 1:
        assert found == [(list(range(8)),), (list(range(8, 12)),)]
        return
    counts = (local,) * workers
    longest = max(len(reference_b(range(12), 8, counts, w)) for w in range(workers))
    assert found == padded(reference_b(range(12), 8, counts, worker), longest, local)
    if (workers, local) == (2, 1):
        assert found == [([0, 1, 2, 3],), ([4, 5, 6, 7],), ([8, 9, 10, 11],)]


@pytest.mark.parametrize("size", [7, 5])
def test_example_15_files_of_each_worker(strategy, size):
    workers, local, worker = place(strategy)
    names = [f"file {number}" for number in range(workers)]
    dataset = Dataset.from_files(names, lambda _: iter(range(20))).batch(size)
    found = steps_of(strategy, strategy.experimental_distribute_dataset(dataset))
    if strategy.num_replicas_in_sync == 1:
        assert [row for (part,) in found for row in part] == list(range(20))
        return
    counts = (local,) * workers
    streams = [reference_b(range(20), size, counts, w) for w in range(workers)]
    assert found == padded(streams[worker], max(map(len, streams)), local)
    if (workers, local, size) == (2, 2, 7):
        assert found[:2] == [[([0, 1], [2, 3]), ([4, 5], [6])], [([0, 1], [2]), ([3, 4], [5, 6])]][worker]
    if (workers, local, size) == (2, 1, 5):
        assert [len(part) for (part,) in found[:2]] == [[3, 2], [2, 3]][worker]


@pytest.mark.parametrize("source", [Dataset.range, stream], ids=["rows", "stream"])
def test_example_16_uneven_workers(strategy, source):
    workers, local, worker = place(strategy)
    distributed = strategy.distribute_datasets_from_function(
        lambda context: source(8 + context.input_pipeline_id).batch(2)
    )
    found = steps_of(strategy, distributed)
    longest = -(-batches_count(8 + workers - 1) // local)
    assert len(found) == longest
    assert [row for step in found for part in step for row in part] == list(range(8 + worker))
    if (workers, local) == (2, 1):
        assert [step[0] for step in found][-1] == [[], [8]][worker]


def batches_count(rows):
    return -(-rows // 2)


@pytest.mark.parametrize("policy", [AutoShardPolicy.AUTO, AutoShardPolicy.DATA])
def test_example_16_a_sum_over_all_rows(strategy, policy):
    total = make_variable(strategy, 0.0, ON_WRITE, SUM)
    dataset = Dataset.range(10).batch(4).with_options(auto_shard_policy=policy)
    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(lambda x: total.assign_add(np.sum(np.square(x), dtype=np.float64)), args=(batch,))
    assert float(total.numpy()) == 285.0


def test_example_17_endless(strategy):
    workers, local, worker = place(strategy)

    def dataset_fn(context):
        return Dataset.range(100).repeat().batch(5).shard(context.num_input_pipelines, context.input_pipeline_id)

    iterator = iter(strategy.distribute_datasets_from_function(dataset_fn))
    sums = [sum(part) for part in lists(strategy, next(iterator))]
    assert sums == [10 + 25 * (worker + workers * replica) for replica in range(local)]
    iterator.close()


@pytest.mark.parametrize("policy", AutoShardPolicy)
def test_all_policies_shuffle_alike_and_lose_nothing(strategy, policy):
    """The union over ranks is the data in every pass; of OFF each worker sees it all."""
    workers, _, _ = place(strategy)
    names = [str(10 * number) for number in range(workers + 1)]

    def read(name):
        return iter(range(int(name), int(name) + 10))

    rows = Dataset.range(10 * len(names)).shuffle()
    if policy is AutoShardPolicy.HINT and not is_default(strategy):
        rows = rows.shard(mpidist.SHARD_HINT, mpidist.SHARD_HINT)
    if policy is AutoShardPolicy.FILE:
        rows = Dataset.from_files(names, read).shuffle(7)
    distributed = strategy.experimental_distribute_dataset(rows.batch(7).with_options(auto_shard_policy=policy))
    for _ in range(2):
        mine = [np.array(part, np.int64) for step in steps_of(strategy, distributed) for part in step]
        counts = np.bincount(np.concatenate(mine), minlength=10 * len(names))
        total = _sum_over_ranks(strategy, counts)
        assert set(total.tolist()) == {workers if policy is AutoShardPolicy.OFF else 1}


def _sum_over_ranks(strategy, counts):
    """Return the sum of what each rank gives, however many replicas it has."""
    if num_workers(strategy) == 1:
        return counts
    return np.asarray(strategy.reduce("SUM", counts, axis=None))  # a plain value counts once per rank


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("strategy", layouts("multi_worker*"), indirect=True)
def test_fewer_files_than_workers_are_an_error_on_all_ranks(strategy):
    dataset = Dataset.from_files(["a file"], lambda _: iter(range(3))).batch(2)
    with pytest.raises(ValueError, match=r"1 files for .* ranks.*AutoShardPolicy\.DATA"):
        strategy.experimental_distribute_dataset(dataset)
    data = dataset.with_options(auto_shard_policy=AutoShardPolicy.DATA)
    found = steps_of(strategy, strategy.experimental_distribute_dataset(data))
    assert found == by_rule_a(strategy, [[0, 1], [2]])
