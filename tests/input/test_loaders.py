"""DataLoaders of PyTorch as datasets: the ranks together get what the loader would give, batch by batch."""

from __future__ import annotations

import functools
import itertools
import json
import os
import pickle
import random
import signal
from collections import namedtuple

import numpy as np
import pytest

import mpidist
from mpidist.collectives import Communicator
from mpidist.core import context
from mpidist.core.errors import MismatchError, PeerError
from mpidist.input.dataset import Dataset
from mpidist.input.distribute import distribute_dataset, distribute_from_function
from mpidist.input.input_options import InputWorkers
from tests.input.worker_threads import lists
from tests.support.ranks.jobs import run_script

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.counts,
    # Of torch, where a process may use fewer cores than the tests have workers.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

ROWS = 23
Pair = namedtuple("Pair", "x y")


class Rows:
    """A map-style dataset at the top of a module, as worker processes need it; some rows may be other things."""

    def __init__(self, act=lambda index: None, count=ROWS):
        self.act, self.count = act, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.act(index)
        return torch.tensor(index)


class Streamed(torch.utils.data.IterableDataset):
    """Every worker process of a loader gives a part of the rows."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return iter(torch.arange(ROWS)[0 if info is None else info.id :: 1 if info is None else info.num_workers])


class OwnRandom(torch.utils.data.Sampler):
    """A sampler with a random source of its own, as users write them."""

    def __init__(self, source):
        self.source = source

    def __len__(self):
        return ROWS

    def __iter__(self):
        order = list(range(ROWS))
        self.source.shuffle(order)
        return iter(order)


class UnevenBatches(torch.utils.data.Sampler):
    """A batch sampler whose batches differ in size, in another order in each pass."""

    def __init__(self, generator):
        self.generator = generator

    def __len__(self):
        return 5

    def __iter__(self):
        order = torch.randperm(ROWS, generator=self.generator).split([7, 1, 4, 8, 3])
        return (batch.tolist() for batch in order)


def generator():
    return torch.Generator().manual_seed(7)


def loader(**arguments):
    """Return a loader over the rows; what is a function in the arguments is called for each loader."""
    made = {name: value() if callable(value) else value for name, value in arguments.items()}
    return torch.utils.data.DataLoader(made.pop("dataset", Rows()), **made)


def weighted():
    return torch.utils.data.WeightedRandomSampler(torch.arange(1.0, ROWS + 1), 17, generator=generator())


def in_bulk():
    return torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(range(ROWS), generator=generator()), 6, False)


def tensors():
    return torch.utils.data.StackDataset(torch.arange(ROWS))


LOADERS = {
    "in order": functools.partial(loader, batch_size=5),
    "shuffled": functools.partial(loader, batch_size=5, shuffle=True, generator=generator),
    "drop_last": functools.partial(loader, batch_size=5, shuffle=True, generator=generator, drop_last=True),
    "weighted": functools.partial(loader, batch_size=4, sampler=weighted),
    "a list": functools.partial(loader, batch_size=4, sampler=[5, 1, 7, 7, 3]),
    "own random": functools.partial(loader, batch_size=4, sampler=lambda: OwnRandom(random.Random(3))),
    "own of NumPy": functools.partial(loader, batch_size=4, sampler=lambda: OwnRandom(np.random.default_rng(3))),
    "own of old NumPy": functools.partial(loader, batch_size=4, sampler=lambda: OwnRandom(np.random.RandomState(3))),
    "batch_sampler": functools.partial(loader, batch_sampler=lambda: UnevenBatches(generator())),
    "lists of rows": functools.partial(loader, batch_sampler=[[3, 4], [5], [0, 1, 2]]),
    "in bulk": functools.partial(loader, dataset=lambda: torch.arange(ROWS), sampler=in_bulk, batch_size=None),
    "batches": functools.partial(loader, dataset=lambda: torch.arange(24).reshape(4, 6), batch_size=None),
    "iterable": functools.partial(loader, dataset=Streamed, batch_size=5),
    "iterable, drop_last": functools.partial(loader, dataset=Streamed, batch_size=5, drop_last=True),
}
loaders = pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)


@pytest.fixture
def communicator():
    with Communicator() as opened:
        yield opened


def workers_of(communicator, replicas=1):
    size = communicator.size
    return InputWorkers(size, communicator.rank, (replicas,) * size, communicator if size > 1 else None, True)


def distributed(made, communicator, replicas=1):
    return distribute_dataset(made, workers_of(communicator, replicas), context.get_strategy())


def together(steps, communicator):
    """Return the rows of each step of all ranks in the order of the batch (rule A)."""
    told = communicator.all_gather_object([lists(step) for step in steps])
    return [
        [row for parts in zip(*(rank[step] for rank in told), strict=True) for part in parts for row in part]
        for step in range(len(told[0]))
    ]


def batches_of(plain):
    return [batch.tolist() for batch in plain]


def joined(batches):
    return list(itertools.chain.from_iterable(batches))


@loaders
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.filterwarnings("ignore:mpidist")
def test_ranks_together_get_what_the_loader_gives(make, replicas, communicator):
    found, plain = distributed(make(), communicator, replicas), make()
    for _ in range(3):
        steps = list(found)
        assert together(steps, communicator) == batches_of(plain)
        assert {type(part) for step in steps for part in step.values} <= {torch.Tensor}
    if not isinstance(plain.dataset, torch.utils.data.IterableDataset):
        assert len(found) == len(plain)


@loaders
def test_a_pass_goes_on_to_the_batch_on_as_many_replicas_and_on_others(make, communicator):
    found = distributed(make(), communicator)
    list(found)
    iterator = iter(found)
    list(itertools.islice(iterator, 2))
    state = json.loads(json.dumps(iterator.state()))
    expected = [together(iterator, communicator), together(found, communicator)]
    for replicas in (1, 2):
        again = distributed(make(), communicator, replicas)
        iterator = iter(again)
        iterator.restore(state)
        assert [together(iterator, communicator), together(again, communicator)] == expected


def test_a_pass_goes_on_with_another_batch_size(communicator):
    first = distributed(loader(batch_size=4, shuffle=True), communicator)
    iterator = iter(first)
    taken = together(itertools.islice(iterator, 2), communicator)
    other = iter(distributed(loader(batch_size=5, shuffle=True), communicator))
    other.restore(iterator.state())
    rest = together(other, communicator)
    assert [len(batch) for batch in rest] == [5, 5, 5]
    assert sorted(joined(taken + rest)) == list(range(ROWS))


class DrawsFromProcess(torch.utils.data.Sampler):
    """A sampler that draws from the random numbers of the process."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return ROWS

    def __iter__(self):
        return iter(self.draw())


UNSEEDED = {
    "shuffle": functools.partial(loader, batch_size=5, shuffle=True),
    "subset": functools.partial(loader, batch_size=5, sampler=torch.utils.data.SubsetRandomSampler(range(ROWS))),
    "torch": functools.partial(loader, batch_size=5, sampler=DrawsFromProcess(lambda: torch.randperm(ROWS).tolist())),
    "NumPy": functools.partial(loader, batch_size=5, sampler=DrawsFromProcess(lambda: np.random.permutation(ROWS))),
    "random": functools.partial(
        loader, batch_size=5, sampler=DrawsFromProcess(lambda: random.sample(range(ROWS), ROWS))
    ),
}


@pytest.mark.parametrize("make", UNSEEDED.values(), ids=UNSEEDED)
def test_without_a_generator_all_ranks_have_the_order_of_the_first(make, communicator):
    torch.manual_seed(communicator.rank)
    found = distributed(make(), communicator, 2)
    passes = [joined(together(found, communicator)) for _ in range(3)]
    assert all(sorted(rows) == list(range(ROWS)) for rows in passes)
    assert len({tuple(rows) for rows in passes}) == 3
    torch.manual_seed(0)
    assert [joined(together(distributed(make(), communicator), communicator))] == passes[:1]


def test_random_numbers_of_the_program_are_left_as_they_are(communicator):
    sources = (torch.get_rng_state, lambda: np.random.get_state()[1], random.getstate)
    found = iter(distributed(loader(batch_size=5, sampler=DrawsFromProcess(lambda: range(ROWS))), communicator))
    mine = communicator.rank
    torch.manual_seed(mine), np.random.seed(mine), random.seed(mine)
    before = [str(source()) for source in sources[1:]]
    next(found)
    assert [str(source()) for source in sources[1:]] == before


@pytest.mark.min_ranks(2)
def test_generators_that_begin_elsewhere_are_named(communicator):
    made = loader(batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(communicator.rank))
    with pytest.raises(MismatchError, match="RandomSampler of 23 from"):
        distributed(made, communicator)


def test_a_rank_fetches_its_own_rows_alone(communicator):
    asked = []
    replicas = 2 * communicator.size
    made = loader(dataset=lambda: Rows(asked.append), batch_size=2 * replicas, shuffle=True)
    list(distributed(made, communicator, 2))
    everything = [row for rank in communicator.all_gather_object(asked) for row in rank]
    assert set(everything) == set(range(ROWS))
    # A part without rows, at the end, is cut from a batch of one.
    assert len(everything) - ROWS < replicas


class Samples:
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.make(index)


@pytest.mark.one_rank
def test_structures_are_those_that_collate_fn_made():
    def sample(index):
        return {"pair": Pair(torch.ones(2), index), "text": f"row {index}", "both": (1.5, np.zeros(3, np.float16))}

    plain = torch.utils.data.DataLoader(Samples(sample), batch_size=4)
    (batch, _), expected = Dataset.from_source(plain), next(iter(plain))
    assert type(batch["pair"]) is Pair
    assert torch.equal(batch["pair"].y, expected["pair"].y)
    assert batch["text"].tolist() == expected["text"]
    assert type(batch["both"]) is tuple
    assert [leaf.dtype for leaf in batch["both"]] == [torch.float64, torch.float16]
    workers = InputWorkers(1, 0, (4,), None, True)
    step = list(distribute_dataset(plain, workers, context.get_strategy()))[1]
    assert [part.tolist() for part in step["text"].values] == [["row 4"], ["row 5"], [], []]
    assert [tuple(part.shape) for part in step["both"][1].values] == [(1, 3), (1, 3), (0, 3), (0, 3)]


@pytest.mark.one_rank
def test_a_batch_is_not_copied():
    kept = torch.arange(6)
    made = torch.utils.data.DataLoader(Samples(int), batch_size=6, collate_fn=lambda rows: kept)
    workers = InputWorkers(1, 0, (1,), None, True)
    (step,) = distribute_dataset(made, workers, context.get_strategy())
    assert step.values[0] is kept


@pytest.mark.one_rank
def test_each_replica_has_its_rows_collated_by_themselves():
    made = torch.utils.data.DataLoader(
        Samples(lambda index: torch.ones(index + 1)), batch_size=6, collate_fn=torch.nn.utils.rnn.pad_sequence
    )
    workers = InputWorkers(1, 0, (2,), None, True)
    (step,) = distribute_dataset(made, workers, context.get_strategy())
    assert [tuple(part.shape) for part in step.values] == [(3, 3), (6, 3)]


@pytest.mark.one_rank
def test_a_replica_cannot_be_without_rows_of_a_structure_that_has_none():
    made = torch.utils.data.DataLoader(Samples(int), batch_size=5, collate_fn=lambda rows: {"count": len(rows)})
    workers = InputWorkers(1, 0, (2,), None, True)
    iterator = iter(distribute_dataset(made, workers, context.get_strategy()))
    assert next(iterator)["count"].values == (3, 2)
    with pytest.raises(ValueError, match="without axes"):
        next(iterator)


@pytest.mark.one_rank
def test_dtypes_that_numpy_has_not():
    made = torch.utils.data.DataLoader(Samples(lambda index: torch.ones(2, dtype=torch.bfloat16)), batch_size=4)
    found = distribute_dataset(made, InputWorkers(1, 0, (2,), None, True), context.get_strategy())
    assert str(found.element_spec.specs[0].dtype) == "bfloat16"
    assert {part.dtype for step in found for part in step.values} == {torch.bfloat16}


def shared(**arguments):
    return distribute_dataset(loader(**arguments), InputWorkers(1, 0, (2,), None, True), context.get_strategy())


class OwnLoader(torch.utils.data.DataLoader):
    def __iter__(self):
        return iter(())


REFUSED = {
    "dataset": (lambda: distribute(Samples(int)), TypeError, r"expected an mpidist.Dataset"),
    "torch dataset": (lambda: distribute(torch.utils.data.TensorDataset(torch.ones(3))), TypeError, "shuffle=True"),
    "iterable": (lambda: distribute(Streamed()), TypeError, r"DataLoader\(dataset, batch_size=global_batch_size\), or"),
    "own loader": (lambda: distribute(OwnLoader(Rows())), TypeError, "has its own __iter__"),
    "no length": (lambda: shared(sampler=itertools.count), TypeError, "no __len__"),
    "fork": (lambda: shared(num_workers=1, multiprocessing_context="fork"), ValueError, "'forkserver'"),
    "no order": (lambda: shared(num_workers=1, in_order=False), ValueError, "in_order=True"),
    "single rows": (lambda: shared(batch_size=None), ValueError, "cannot be split"),
    "wrong length": (lambda: list(shared(sampler=Wrong)), ValueError, "gave 2 items in a pass, and its __len__ says 3"),
    "keys": (lambda: list(shared(sampler=["a", "b"])), TypeError, "gave 'a' of type str; expected row numbers"),
    "keys for workers": (
        lambda: list(shared(dataset=lambda: Rows(nothing), sampler=["a"], num_workers=1)),
        TypeError,
        "gave 'a'",
    ),
    "cache": (lambda: Dataset.from_source(loader(batch_size=4)).cache(), ValueError, r"from_source\(dataset\).cache"),
    "other ranks": (
        lambda: shared(sampler=torch.utils.data.DistributedSampler(range(ROWS), 2, 0)),
        ValueError,
        "DistributedSampler of 2 replicas",
    ),
}


class Wrong:
    def __len__(self):
        return 3

    def __iter__(self):
        return iter([1, 2])


def distribute(given):
    return distribute_dataset(given, InputWorkers(1, 0, (2,), None, True), context.get_strategy())


@pytest.mark.one_rank
@pytest.mark.parametrize(("act", "kind", "text"), REFUSED.values(), ids=REFUSED)
def test_refused_with_what_to_type(act, kind, text):
    with pytest.raises(kind, match=text):
        act()


@pytest.mark.one_rank
def test_a_dataset_that_stops_in_the_middle_is_an_error():
    def stop(index):
        if index == 7:
            raise StopIteration

    with pytest.raises(RuntimeError, match="the dataset of the DataLoader raised StopIteration"):
        list(shared(dataset=lambda: Rows(stop), batch_size=4))


@pytest.mark.one_rank
def test_a_loader_in_a_dataset_is_pickled():
    dataset = Dataset.from_source(
        torch.utils.data.DataLoader(torch.arange(ROWS), batch_size=5, shuffle=True, generator=generator())
    )
    expected = [batch.tolist() for batch in dataset]
    assert [batch.tolist() for batch in pickle.loads(pickle.dumps(dataset))] != []
    assert sorted(joined(expected)) == list(range(ROWS))


@pytest.mark.one_rank
def test_a_loader_for_each_rank_of_a_function():
    def of_rank(input_context):
        sampler = torch.utils.data.DistributedSampler(range(ROWS), 2, 1, shuffle=False)
        return loader(sampler=sampler, batch_size=4)

    found = distribute_from_function(of_rank, InputWorkers(1, 0, (1,), None, True), context.get_strategy())
    assert next(lists(step) for step in found) == ([1, 3, 5, 7],)


def test_ranks_that_run_out_get_tensors_without_rows(communicator):
    def of_rank(input_context):
        rows = torch.ones(2 * input_context.input_pipeline_id + 2, 3, dtype=torch.bfloat16)
        return torch.utils.data.DataLoader(rows, batch_size=2)

    steps = list(distribute_from_function(of_rank, workers_of(communicator), context.get_strategy()))
    parts = [step.values[0] for step in steps]
    assert {(type(part), part.dtype) for part in parts} == {(torch.Tensor, torch.bfloat16)}
    mine = communicator.rank + 1
    assert [tuple(part.shape) for part in parts] == [(2, 3)] * mine + [(0, 3)] * (communicator.size - mine)


@pytest.mark.one_rank
def test_the_default_strategy_gives_the_same():
    found = mpidist.get_strategy().experimental_distribute_dataset(LOADERS["shuffled"]())
    assert batches_of(found) == batches_of(LOADERS["shuffled"]())
    assert iter(found).state()["steps"] == 0


def train_on(found, communicator):
    for _ in found:
        communicator.all_reduce("SUM", np.ones(1))


def test_an_error_of_the_dataset_reaches_all_ranks(communicator):
    def fail(index):
        if index == 20:
            raise OSError("the disk is gone")

    found = distributed(loader(dataset=lambda: Rows(fail), batch_size=5, shuffle=True), communicator)
    with pytest.raises((OSError, PeerError), match="the disk is gone"):
        train_on(found, communicator)


# Worker processes: functions and classes at the top of a module.


def mark(worker):
    torch.manual_seed(worker)
    os.environ["MPIDIST_TEST_WORKER"] = str(worker)


def needs_a_worker(index):
    assert os.environ["MPIDIST_TEST_WORKER"] in "01"
    assert "mpi4py.MPI" not in __import__("sys").modules


def fails(index):
    if index == 20:
        raise OSError("the disk is gone")


def dies(index):
    if index == 20:
        os.kill(os.getpid(), signal.SIGKILL)


def nothing(index):
    pass


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_give_the_same(persistent, communicator):
    def made(**workers):
        return loader(
            dataset=lambda: Rows(needs_a_worker if workers else nothing),
            batch_size=5,
            shuffle=True,
            generator=generator,
            **workers,
        )

    several = made(num_workers=2, worker_init_fn=lambda: mark, persistent_workers=persistent)
    found, plain = distributed(several, communicator, 2), made()
    iterator = iter(found)
    first = together(itertools.islice(iterator, 2), communicator)
    assert first == batches_of(plain)[:2]
    iterator.restore(iterator.state())
    assert len(together(iterator, communicator)) == 3
    assert together(found, communicator) == batches_of(plain)


def test_worker_processes_of_an_iterable_dataset(communicator):
    found = distributed(loader(dataset=Streamed, batch_size=5, num_workers=2), communicator)
    batches = together(found, communicator)
    assert batches[:2] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert sorted(joined(batches)) == list(range(ROWS))


@pytest.mark.parametrize(("act", "text"), [(fails, "the disk is gone"), (dies, "exited unexpectedly")])
def test_an_error_or_the_end_of_a_worker_process_reaches_all_ranks(act, text, communicator):
    found = distributed(loader(dataset=lambda: Rows(act), batch_size=5, num_workers=2), communicator)
    with pytest.raises((OSError, RuntimeError), match=text):
        train_on(found, communicator)


@pytest.mark.one_rank
def test_a_dataset_that_no_worker_can_be_given_is_named():
    with pytest.raises(TypeError, match="cannot be given its dataset.*at the top of a module. Or use num_workers=0"):
        list(shared(dataset=lambda: Rows(lambda index: None), batch_size=5, num_workers=1))


@pytest.mark.one_rank
def test_persistent_workers_serve_one_pass_at_a_time():
    found = shared(dataset=lambda: Rows(nothing), batch_size=5, num_workers=1, persistent_workers=True)
    first, second = iter(found), iter(found)
    next(first), next(second)
    with pytest.raises(RuntimeError, match="another pass over this DataLoader has begun"):
        next(first)
    assert len(list(second)) == 4


UNGUARDED = """
import torch
import mpidist

class Rows:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(index)

strategy = mpidist.MultiWorkerMirroredStrategy()
loader = torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=1)
list(strategy.experimental_distribute_dataset(loader))
"""


@pytest.mark.one_rank
@pytest.mark.jobs
def test_a_program_that_workers_would_run_again_ends_with_what_to_type():
    done = run_script(UNGUARDED, 2)
    assert done.returncode
    assert "below if __name__ == '__main__':" in done.stderr
    assert "exited unexpectedly" in done.stderr


def test_training_steps_and_a_checkpoint_in_the_middle_of_a_pass(tmp_path, communicator):
    folder = communicator.broadcast_object(str(tmp_path))

    def begin():
        data = torch.utils.data.TensorDataset(torch.arange(float(ROWS)), torch.arange(ROWS))
        made = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)
        return iter(strategy.experimental_distribute_dataset(made))

    def step(batch):
        x, y = batch
        assert type(x) is type(y) is torch.Tensor
        return x.sum()

    def total(iterator, steps=None):
        return sum(
            float(strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None))
            for batch in itertools.islice(iterator, steps)
        )

    with mpidist.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy, strategy.scope():
        iterator = begin()
        first = total(iterator, 2)
        path = mpidist.Checkpoint(iterator=iterator).save(f"{folder}/middle")
        other = begin()
        mpidist.Checkpoint(iterator=other).restore(path)
        assert first + total(other) == first + total(iterator) == sum(range(ROWS))
