"""AutoShardPolicy: what each worker reads and how it is cut, against slow references written from the text."""

import itertools
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.input import SHARD_HINT
from mpidist.input.dataset import Dataset
from mpidist.input.distribute import distribute_dataset, distribute_from_function
from mpidist.input.sources import FileNames
from tests.input import test_dealing
from tests.input.policy_helpers import (
    AUTO,
    DATA,
    FILE,
    HINT,
    OFF,
    as_lists,
    batches_of,
    distribute,
    error_of,
    named,
    padded,
    passes,
    read,
    rows_of,
    stream,
)
from tests.input.worker_threads import run_workers, steps_of

pytestmark = pytest.mark.one_rank

ALL_COUNTS = [(1,), (2,), (1, 1), (2, 2), (1, 1, 1), (3, 3), (2, 1), (1, 3)]


def test_rule_b_by_the_examples():
    # Every worker has a file of its own, whose rows are 0, 1, 2, ...
    counted = Dataset.from_files(["a", "b"], lambda _: iter(range(9)))
    found = distribute(counted.batch(7), (2, 2))
    assert [worker[:2] for worker in found] == [
        [([0, 1], [2, 3]), ([4, 5], [6])],
        [([0, 1], [2]), ([3, 4], [5, 6])],
    ]
    # range(10).batch(4) on 2 replicas: FILE and OFF fill in order, DATA cuts what is left.
    assert distribute(Dataset.range(10).batch(4), (2,), auto_shard_policy=OFF) == [
        [([0, 1], [2, 3]), ([4, 5], [6, 7]), ([8, 9], [])]
    ]
    assert distribute(Dataset.from_files(["a"], lambda _: iter(range(10))).batch(4), (2,)) == [
        [([0, 1], [2, 3]), ([4, 5], [6, 7]), ([8, 9], [])]
    ]
    assert distribute(Dataset.range(10).batch(4), (2,)) == [[([0, 1], [2, 3]), ([4, 5], [6, 7]), ([8], [9])]]
    assert distribute(Dataset.range(8).batch(4), (3,), auto_shard_policy=OFF) == [
        [([0, 1], [2], [3]), ([4, 5], [6], [7])]
    ]
    everything = [([0, 1, 2, 3],), ([4, 5, 6, 7],), ([8, 9, 10, 11],)]
    assert distribute(Dataset.range(12).batch(8), (1, 1), auto_shard_policy=OFF) == [everything] * 2


@settings(max_examples=100)
@given(
    rows=st.integers(0, 40),
    size=st.integers(1, 9),
    counts=st.sampled_from(ALL_COUNTS),
    drop=st.booleans(),
    is_stream=st.booleans(),
    hint=st.booleans(),
    repeats=st.integers(1, 2),
    after=st.sampled_from(["nothing", "repeat", "prefetch", "take", "skip"]),
)
def test_off_and_hint_cut_each_workers_own_elements_by_rule_b(
    rows, size, counts, drop, is_stream, hint, repeats, after
):
    source = stream(rows) if is_stream else Dataset.range(rows)
    dataset = source.shard(SHARD_HINT, SHARD_HINT) if hint else source
    dataset = dataset.repeat(repeats).batch(size, drop_remainder=drop)
    change = {
        "nothing": (lambda d: d, lambda batches: batches),
        "repeat": (lambda d: d.repeat(2), lambda batches: batches * 2),
        "prefetch": (lambda d: d.prefetch(2), lambda batches: batches),
        "take": (lambda d: d.take(2), lambda batches: batches[:2]),
        "skip": (lambda d: d.skip(1), lambda batches: batches[1:]),
    }[after]
    dataset = change[0](dataset)
    found = distribute(dataset, counts, auto_shard_policy=HINT if hint else OFF)
    num_workers = len(counts)
    own = [list(range(rows))[w::num_workers] if hint else list(range(rows)) for w in range(num_workers)]
    batches = [change[1](batches_of(mine * repeats, size, drop)) for mine in own]
    if counts == (1,):
        assert found == [[(batch,) for batch in batches[0]]]
    else:
        assert found == as_lists(padded([list(itertools.chain(*mine)) for mine in batches], size, counts))


@settings(max_examples=60)
@given(
    rows=st.integers(0, 30),
    size=st.integers(1, 9),
    num_workers=st.integers(1, 3),
    replicas=st.integers(1, 3),
    is_stream=st.booleans(),
)
def test_batches_of_unknown_size_are_cut_by_rule_a_on_each_worker(rows, size, num_workers, replicas, is_stream):
    source = stream(rows) if is_stream else Dataset.range(rows)
    dataset = source.batch(size).map(lambda batch: batch)  # after which nobody knows how many rows there are
    counts = (replicas,) * num_workers
    found = distribute(dataset, counts, auto_shard_policy=OFF)
    if counts == (1,):
        assert found == [[(batch,) for batch in batches_of(list(range(rows)), size, False)]]
        return
    cut = [
        part
        for batch in batches_of(list(range(rows)), size, False)
        for (part,) in test_dealing.reference(batch, (1,) * sum(counts), "tf")
    ]
    expected = [tuple(cut[i : i + replicas]) for i in range(0, len(cut), replicas)]
    assert found == [expected] * num_workers


@pytest.mark.parametrize("counts", ALL_COUNTS)
@pytest.mark.parametrize("rows", [0, 1, 5, 23, 24])
@pytest.mark.parametrize("policy", [AUTO, DATA, FILE, HINT])
def test_every_pass_is_a_partition(counts, rows, policy):
    """With orders that nobody fixed, on each worker made anew: none is lost and none seen twice."""

    def make():
        if policy is FILE:
            names, _ = named([rows // 9 + (i < rows % 9) for i in range(9)])
            files = Dataset(FileNames(names)).shuffle()
            return files.interleave(lambda path: Dataset.from_files([path], read).shuffle(3)).shuffle(5).batch(4)
        source = Dataset.range(rows).shuffle()
        return (source.shard(SHARD_HINT, SHARD_HINT) if policy is HINT else source).batch(4)

    found = passes(make, counts, 3, auto_shard_policy=policy)
    for number in range(3):
        assert sorted(row for worker in found for row in rows_of(worker[number])) == list(range(rows))
    if rows > 20:
        orders = {tuple(tuple(rows_of(worker[number])) for worker in found) for number in range(3)}
        assert len(orders) == 3


@pytest.mark.parametrize("make_source", [lambda: Dataset.range(12), lambda: stream(12)], ids=["rows", "stream"])
def test_off_gives_each_worker_all_elements_in_an_order_of_its_own(make_source):
    found = passes(lambda: make_source().shuffle(12).batch(4), (1, 1), 2, auto_shard_policy=OFF)
    orders = [rows_of(worker[number]) for worker in found for number in range(2)]
    assert [sorted(order) for order in orders] == [list(range(12))] * 4
    assert len(set(map(tuple, orders))) == 4
    seeded = passes(lambda: make_source().shuffle(12, seed=3).batch(4), (1, 1), 1, auto_shard_policy=OFF)
    assert seeded[0] == seeded[1]


def test_off_takes_pipelines_that_differ_and_then_shuffles_them_alike():
    def work(workers):
        dataset = Dataset.range(20).shuffle().shard(2, workers.worker_id).batch(4)
        return steps_of(distribute_dataset(dataset.with_options(auto_shard_policy=OFF), workers, None))

    found = run_workers(work, (1, 1))
    assert sorted(row for worker in found for row in rows_of(worker)) == list(range(20))


def test_hint_without_a_placeholder_is_off():
    dataset = Dataset.range(12).batch(8)
    assert distribute(dataset, (1, 1), auto_shard_policy=HINT) == distribute(dataset, (1, 1), auto_shard_policy=OFF)


@pytest.mark.parametrize("counts", [(1,), (2,), (1, 1)])
def test_a_placeholder_needs_hint(counts):
    dataset = Dataset.range(12).shard(SHARD_HINT, SHARD_HINT).batch(4)
    errors = run_workers(lambda workers: error_of(lambda: distribute_dataset(dataset, workers, None)), counts)
    for error in errors:
        assert isinstance(error, ValueError)
        assert "AutoShardPolicy.HINT" in str(error)
    with pytest.raises(ValueError, match=r"with_options\(auto_shard_policy=AutoShardPolicy.HINT\)"):
        list(dataset)
    assert dataset.cardinality() == -2
    with pytest.raises(ValueError, match="num_shards is -1 and index 0"):
        Dataset.range(3).shard(SHARD_HINT, 0)


def test_a_placeholder_in_a_function_is_refused():
    def dataset_fn(context):
        return Dataset.range(4).shard(SHARD_HINT, SHARD_HINT).batch(1)

    (error,) = run_workers(
        lambda workers: error_of(lambda: list(distribute_from_function(dataset_fn, workers, None))), (2,)
    )
    assert "pass numbers" in str(error)


def test_shards_of_batches_are_dealt_by_hint():
    dataset = Dataset.range(12).batch(4).shard(SHARD_HINT, SHARD_HINT)
    assert distribute(dataset, (1, 1), auto_shard_policy=HINT) == [
        [([0, 1],), ([2, 3],), ([8, 9],), ([10, 11],)],
        [([4, 5],), ([6, 7],), ([],), ([],)],
    ]


def test_rows_of_others_are_not_read():
    asked = {0: [], 1: []}

    class Samples:
        def __init__(self, worker):
            self.worker = worker

        def __len__(self):
            return 20

        def __getitem__(self, index):
            asked[self.worker].append(index)
            return index

    def work(workers):
        dataset = Dataset.from_source(Samples(workers.worker_id)).shard(SHARD_HINT, SHARD_HINT).batch(8)
        return steps_of(distribute_dataset(dataset.with_options(auto_shard_policy=HINT), workers, None))

    found = run_workers(work, (1, 1))
    assert asked == {0: list(range(0, 20, 2)), 1: list(range(1, 20, 2))}
    assert [rows_of(worker) for worker in found] == [asked[0], asked[1]]


@pytest.mark.parametrize("policy", [AUTO, OFF, HINT])
@pytest.mark.parametrize("drop", [False, True])
def test_nothing_is_exchanged_in_a_step_where_the_rows_of_each_worker_are_known(policy, drop):
    def work(workers):
        dataset = Dataset.range(101)
        if policy is HINT:
            dataset = dataset.shard(SHARD_HINT, SHARD_HINT)
        dataset = dataset.batch(7, drop_remainder=drop).repeat(2).prefetch(1).with_options(auto_shard_policy=policy)
        distributed = distribute_dataset(dataset, workers, None)
        iterator = iter(distributed)
        before = workers.communicator.exchanges
        return sum(1 for _ in iterator) - distributed.cardinality(), workers.communicator.exchanges - before

    assert run_workers(work, (2, 2)) == [(0, 0)] * 2


def test_endless_streams_need_no_vote_under_rule_b():
    def work(workers):
        dataset = stream(5).repeat().batch(5).with_options(auto_shard_policy=OFF)
        distributed = distribute_dataset(dataset, workers, None)
        iterator = iter(distributed)
        before = workers.communicator.exchanges
        steps = [next(iterator).values[0].tolist() for _ in range(3)]
        iterator.close()
        return distributed.cardinality(), steps, workers.communicator.exchanges - before

    assert run_workers(work, (1, 1)) == [
        (-1, [[0, 1, 2], [3, 4], [0, 1, 2]], 0),
        (-1, [[0, 1], [2, 3, 4], [0, 1]], 0),
    ]


def test_parts_keep_structure_dtype_and_other_sizes():
    def reader(path):
        return ({"x": np.full(3, i, np.float16), "y": (np.uint8(i),)} for i in read(path))

    names, _ = named([5, 1])

    def shapes(workers):
        dataset = Dataset.from_files(names, reader).batch(4)
        return [
            [(leaf.shape, leaf.dtype.name) for leaf in (*step["x"].values, *step["y"][0].values)]
            for step in distribute_dataset(dataset, workers, None)
        ]

    first, second = run_workers(shapes, (1, 1))
    assert first == [[((n, 3), "float16"), ((n,), "uint8")] for n in (2, 2, 1)]
    assert second == [[((n, 3), "float16"), ((n,), "uint8")] for n in (1, 0, 0)]


def test_specs_of_own_streams():
    def shapes(dataset, counts):
        def work(workers):
            distributed = distribute_dataset(dataset.with_options(auto_shard_policy=OFF), workers, None)
            return [spec.shape for spec in distributed.element_spec.specs]

        return run_workers(work, counts)

    assert shapes(Dataset.range(9).batch(3), (2,)) == [[(None,), (None,)]]
    assert shapes(Dataset.range(9).batch(3, drop_remainder=True), (2,)) == [[(2,), (1,)]]
    assert shapes(Dataset.range(9).batch(3, drop_remainder=True), (1, 1)) == [[(None,)]] * 2


@pytest.mark.parametrize("policy", [OFF, FILE, HINT])
def test_unbatched_values_are_refused(policy):
    source = Dataset.from_files(["0:3", "3:3"], read) if policy is FILE else Dataset.range(4)
    for error in run_workers(
        lambda workers: error_of(
            lambda: distribute_dataset(source.with_options(auto_shard_policy=policy), workers, None)
        ),
        (1, 1),
    ):
        assert isinstance(error, ValueError)
        assert "batch(global_batch_size)" in str(error)


def test_unbatched_vectors_are_split_on_their_first_axis():
    vectors = Dataset.from_tensor_slices(np.arange(8).reshape(2, 4))
    for policy in (AUTO, OFF):
        assert distribute(vectors, (2,), auto_shard_policy=policy) == [[([0, 1], [2, 3]), ([4, 5], [6, 7])]]


def test_torch_tensors_are_joined_across_batches():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed; it is an optional source")

    def tensors():
        yield torch.arange(3)
        yield torch.arange(3, 6)

    def work(workers):
        dataset = Dataset.from_generator(tensors).with_options(auto_shard_policy=OFF)
        parts = [part for step in distribute_dataset(dataset, workers, None) for part in step.values]
        return [type(part) for part in parts], [part.tolist() for part in parts]

    assert run_workers(work, (2,)) == [([torch.Tensor] * 4, [[0, 1], [2], [3, 4], [5]])]


@pytest.mark.parametrize(
    ("make", "policy", "text"),
    [
        (lambda: Dataset.range(8).batch(4), AUTO, "rank 1 of 2 reads its part of each global batch ('tf') of range(0"),
        (lambda: Dataset.from_files(named([1] * 9)[0], read).batch(3), AUTO,
         "rank 1 of 2 reads 4 files, '1:1', '3:1', '5:1' and 1 more, in sub-batches of 1, 2 rows of from_files("),
        (lambda: Dataset(FileNames(named([1] * 4)[0])).shuffle().map(read).batch(3), FILE,
         "rank 1 of 2 reads 2 files, '1:1', '3:1', in sub-batches of"),
        (lambda: Dataset(FileNames(named([1] * 4)[0])).take(3).map(read).batch(3), FILE,
         "rank 1 of 2 reads its files,"),
        (lambda: Dataset.range(8).batch(4), OFF,
         "rank 1 of 2 reads all elements, in sub-batches of 2, 2 rows of range("),
        (lambda: Dataset.range(8).batch(4).map(lambda x: x), OFF, "each batch cut into a part for each replica of all"),
        (lambda: Dataset.range(8).shard(SHARD_HINT, SHARD_HINT).batch(4), HINT, "rank 1 of 2 reads its shard, in sub"),
    ],
)  # fmt: skip
def test_each_worker_says_in_one_line_what_it_reads(make, policy, text, caplog):
    with caplog.at_level(logging.INFO, "mpidist"):
        run_workers(
            lambda workers: distribute_dataset(make().with_options(auto_shard_policy=policy), workers, None), (1, 1)
        )
    lines = sorted(record.getMessage() for record in caplog.records if " reads " in record.getMessage())
    assert len(lines) == 2
    assert lines[0].startswith("rank 0 of 2 reads ")
    assert f"(AutoShardPolicy.{policy.name if policy else 'FILE' if 'files' in text else 'DATA'})" in lines[0]
    assert text in lines[1]
    assert all(record.levelno == logging.INFO for record in caplog.records)


def test_each_worker_says_in_one_line_what_a_function_made(caplog):
    with caplog.at_level(logging.INFO, "mpidist"):
        run_workers(
            lambda workers: distribute_from_function(
                lambda context: Dataset.range(4 + context.input_pipeline_id).batch(2), workers, None
            ),
            (1, 1),
        )
    lines = sorted(record.getMessage() for record in caplog.records)
    assert lines == [f"rank {i} of 2 reads range(0, {4 + i}).batch(2) (from a function)" for i in (0, 1)]
