"""Kinds of mismatch between ranks of a strategy: each is an error on all of them, soon, and none a hang."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import ReduceOp
from tests.support.ranks.odd_rank import JOBS, Kind, Outcome, check, run_kinds

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

ROWS = np.ones((4, 2))
SLICES = mpidist.IndexedSlices(np.ones((2, 2)), np.array([0, 1]), (4, 2))
Strategy = mpidist.Strategy


def make() -> Strategy:
    return mpidist.MultiWorkerMirroredStrategy()


def make_of_two() -> Strategy:
    return mpidist.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])


kind = partial(Kind, make=make)


def world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


def context() -> mpidist.ReplicaContext:
    found = mpidist.get_replica_context()
    assert found is not None
    return found


def reduced(value: Any, op: str = "SUM") -> Callable[[Strategy], Any]:
    return lambda s: s.run(lambda: context().all_reduce(op, value))


def gathered(axis: int, value: Any = ROWS) -> Callable[[Strategy], Any]:
    return lambda s: s.run(lambda: context().all_gather(value, axis=axis))


def reduces_batch(length: int) -> Callable[[Strategy], Any]:
    return lambda s: s.extended.batch_reduce_to("SUM", [(ROWS, "cpu:0")] * length)


def variable(strategy: Strategy, value: Any = 0.0, **options: Any) -> mpidist.Variable:
    with strategy.scope():
        return mpidist.Variable(value, aggregation=mpidist.VariableAggregation.SUM, **options)


def one_more_variable(strategy: Strategy) -> Any:
    variable(strategy)
    return variable(strategy, np.zeros(3))


def one_variable(strategy: Strategy) -> Any:
    variable(strategy)
    return reduced(ROWS)(strategy)


def assigns(method: str, value: Any) -> Callable[[Strategy], Any]:
    def call(strategy: Strategy) -> Any:
        counter = variable(strategy, np.zeros(2))
        return strategy.run(lambda: getattr(counter, method)(value))

    return call


def reads_a_metric(reads: bool) -> Callable[[Strategy], Any]:
    """Return what reads the metric of all ranks, as in ``if rank == 0: print(loss.result())``, or goes on."""

    def call(strategy: Strategy) -> Any:
        with strategy.scope():
            loss = mpidist.metrics.Mean()
        strategy.run(lambda: loss.update_state(1.0))
        if reads:
            loss.result()
        return reduced(ROWS)(strategy)

    return call


def trains(
    order: int = 1, steps: int = 1, momentum: float = 0.0, names: Sequence[str | None] = "ab"
) -> Callable[[Strategy], Any]:
    def call(strategy: Strategy) -> Any:
        with strategy.scope():
            weights = [mpidist.Variable(np.zeros(3), name=name) for name in names]
            optimizer = mpidist.optimizers.SGD(0.1, momentum)
        pairs = [(np.ones(3), weight) for weight in weights][::order]
        for _ in range(steps):
            strategy.run(lambda: optimizer.apply_gradients(pairs))
        return strategy.reduce("SUM", 1.0, axis=None)

    return call


def summed_variables(strategy: Strategy) -> list[mpidist.Variable]:
    with strategy.scope():
        return [mpidist.Variable(np.zeros(3), aggregation=mpidist.VariableAggregation.SUM) for _ in range(2)]


def assigns_to(number: int) -> Callable[[Strategy], Any]:
    def call(strategy: Strategy) -> Any:
        variables = summed_variables(strategy)
        strategy.run(lambda: variables[number].assign(np.ones(3)))
        return strategy.reduce("SUM", 1.0, axis=None)

    return call


def reduces_for(order: int) -> Callable[[Strategy], Any]:
    def call(strategy: Strategy) -> Any:
        pairs = [(ROWS, variable) for variable in summed_variables(strategy)][::order]
        return strategy.extended.batch_reduce_to("SUM", pairs)

    return call


def dataset(rows: int = 24) -> mpidist.Dataset:
    return mpidist.Dataset.from_tensor_slices(np.arange(float(rows))).batch(12)


def epoch(steps: int) -> Callable[[Strategy], Any]:
    def call(strategy: Strategy) -> Any:
        batches = iter(strategy.experimental_distribute_dataset(dataset()))
        for _ in range(steps):
            strategy.run(lambda batch: context().all_reduce("SUM", np.sum(batch)), args=(next(batches),))
        return strategy.reduce("SUM", ROWS, axis=None)

    return call


def two_passes(passes: int) -> Callable[[Strategy], Any]:
    def call(strategy: Strategy) -> Any:
        distributed = strategy.experimental_distribute_dataset(dataset().shuffle(4))
        for _ in range(passes):
            iter(distributed)
        return [iter(distributed), strategy.reduce("SUM", 1.0, axis=None)]

    return call


def saves(does: bool) -> Callable[[Strategy], Any]:
    def call(strategy: Strategy) -> Any:
        counter = variable(strategy)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = mpidist.Checkpoint(counter=counter)
            if does:
                with strategy.scope():
                    checkpoint.save(f"{folder}/checkpoint")
            return reduced(ROWS)(strategy)

    return call


def fails_in_run(strategy: Strategy) -> Any:
    def step() -> Any:
        raise ZeroDivisionError("a bad batch")

    return strategy.run(step)


def fails_in_its_block(strategy: Strategy) -> Any:
    with strategy:
        raise KeyError("lost")


def fails_in_data(strategy: Strategy) -> Any:
    def fails(_: Any) -> Any:
        raise ZeroDivisionError("a bad row")

    return next(iter(strategy.experimental_distribute_dataset(dataset().map(fails))))


def reads_data(strategy: Strategy) -> Any:
    batches = iter(strategy.experimental_distribute_dataset(dataset().map(lambda row: row)))
    return strategy.reduce("SUM", next(batches), axis=None)


def updates(**others: Any) -> Callable[[Strategy], Any]:
    def call(strategy: Strategy) -> Any:
        return strategy.extended.reduce_to(others.get("op", "SUM"), others.get("value", ROWS), "cpu:0")

    return call


KINDS = {
    "shape": kind(reduced(np.ones(6)), reduced(np.ones(7))),
    "dtype": kind(reduced(np.ones(6)), reduced(np.ones(6, "f4"))),
    "op": kind(reduced(ROWS), reduced(ROWS, "MEAN")),
    "structure": kind(reduced({"a": ROWS, "b": ROWS}), reduced([ROWS, ROWS])),
    "keys": kind(reduced({"a": ROWS, "b": ROWS}), reduced({"a": ROWS, "c": ROWS})),
    "number of leaves": kind(reduced([ROWS]), reduced([ROWS, ROWS])),
    "sparse or dense": kind(reduced(ROWS), reduced(SLICES)),
    "reduce or all_reduce": kind(lambda s: s.reduce("SUM", ROWS, axis=0), reduced(ROWS)),
    "gather or reduce": kind(lambda s: s.gather(ROWS, axis=0), lambda s: s.reduce("SUM", ROWS, axis=None)),
    "axis of reduce": kind(lambda s: s.reduce("SUM", ROWS, axis=0), lambda s: s.reduce("SUM", ROWS, axis=1)),
    "axis of gather": kind(lambda s: s.gather(ROWS, axis=0), lambda s: s.gather(ROWS, axis=1)),
    "axis of all_gather": kind(gathered(0), gathered(1)),
    "dtype of all_gather": kind(gathered(0), gathered(0, ROWS.astype("f4"))),
    "MIN or MAX of a number": kind(reduced(1.0, "MIN"), reduced(1.0, "MAX")),
    "axis or none": kind(lambda s: s.reduce("SUM", ROWS, axis=0), lambda s: s.reduce("SUM", ROWS[0], axis=None)),
    "length of a batch": kind(reduces_batch(2), reduces_batch(3)),
    "reduce_to or broadcast_to": kind(updates(), lambda s: s.extended.broadcast_to(ROWS, "cpu:0")),
    "op of reduce_to": kind(updates(), updates(op=ReduceOp.MEAN)),
    "a variable too many": kind(one_variable, one_more_variable),
    "shape of a variable": kind(lambda s: variable(s, np.zeros(2)), lambda s: variable(s, np.zeros(3))),
    "dtype of a variable": kind(lambda s: variable(s, 0.0), lambda s: variable(s, 0)),
    "name of a variable": kind(lambda s: variable(s, name="a"), lambda s: variable(s, name="b")),
    "synchronization of a variable": kind(
        lambda s: variable(s, np.zeros(2)),
        lambda s: variable(s, np.zeros(2), synchronization=mpidist.VariableSynchronization.ON_READ),
    ),
    "assign or assign_add": kind(assigns("assign", np.ones(2)), assigns("assign_add", np.ones(2))),
    "a metric that one rank reads": kind(reads_a_metric(False), reads_a_metric(True)),
    "variables in another order": kind(trains(), trains(order=-1)),
    "unnamed variables in another order": kind(trains(names=[None] * 2), trains(names=[None] * 2, order=-1)),
    "variables of one name in another order": kind(trains(names="aa"), trains(names="aa", order=-1)),
    "assigning to another variable of one name": kind(assigns_to(0), assigns_to(1)),
    "reduced for another variable": kind(reduces_for(1), reduces_for(-1)),
    "a step too many": kind(trains(), trains(steps=2)),
    "a step of an epoch that is left out": kind(epoch(2), epoch(1)),
    "a pass too many": kind(two_passes(0), two_passes(1), shows_lines=False),
    "another data set": kind(
        lambda s: s.experimental_distribute_dataset(dataset()),
        lambda s: s.experimental_distribute_dataset(dataset().shuffle(3)),
        shows_lines=False,
    ),
    "length of the data": kind(
        lambda s: s.experimental_distribute_dataset(dataset(24)),
        lambda s: s.experimental_distribute_dataset(dataset(36)),
        shows_lines=False,
    ),
    "data on one rank only": kind(reduced(ROWS), lambda s: s.experimental_distribute_dataset(dataset())),
    "a checkpoint that one rank saves": kind(saves(False), saves(True)),
    "a strategy that one rank closes": kind(reduced(ROWS), lambda s: s.close()),
    "another kind of strategy": kind(
        lambda s: mpidist.MultiWorkerMirroredStrategy(), lambda s: mpidist.MirroredStrategy(communicator=world())
    ),
    "a strategy or a communicator": kind(
        lambda s: mpidist.MultiWorkerMirroredStrategy(), lambda s: mpidist.Communicator()
    ),
    "an error in run": kind(reduced(ROWS), fails_in_run, own_error=ZeroDivisionError),
    "an error in a block of the strategy": kind(reduced(ROWS), fails_in_its_block, own_error=KeyError),
    "an error in the data": kind(reads_data, fails_in_data, own_error=ZeroDivisionError),
    "an op that there is not": kind(
        lambda s: s.reduce("SUM", ROWS, axis=None), lambda s: s.reduce("SUMM", ROWS, axis=None), own_error=ValueError
    ),
    "an axis that there is not": kind(
        lambda s: s.reduce("SUM", ROWS, axis=0), lambda s: s.reduce("SUM", ROWS, axis=7), own_error=ValueError
    ),
    "an axis of another type": kind(
        lambda s: s.reduce("SUM", ROWS, axis=0), lambda s: s.reduce("SUM", ROWS, axis="rows"), own_error=TypeError
    ),
    "a value of another strategy's replicas": kind(
        lambda s: s.reduce("SUM", ROWS, axis=None),
        lambda s: s.reduce("SUM", mpidist.values.PerReplica((ROWS, ROWS, ROWS)), axis=None),
        own_error=ValueError,
    ),
    "arguments that are no tuple": kind(reduced(ROWS), lambda s: s.run(lambda: 1, args=ROWS), own_error=ValueError),
    "a reduction in the wrong context": kind(
        lambda s: s.run(lambda: context().all_reduce("SUM", ROWS)),
        lambda s: s.run(lambda: s.reduce("SUM", ROWS, axis=None)),
        own_error=RuntimeError,
    ),
    "shape, two replicas each": kind(reduced(np.ones(6)), reduced(np.ones(7)), make=make_of_two),
    "axis of gather, two replicas each": kind(gathered(0), gathered(1), make=make_of_two),
    "an error in run, two replicas each": kind(
        reduced(ROWS), fails_in_run, make=make_of_two, own_error=ZeroDivisionError
    ),
}


@pytest.fixture(scope="module", params=JOBS)
def job(request: pytest.FixtureRequest) -> tuple[dict[str, list[Outcome]], int]:
    ranks, ranks_per_node, odd_rank = request.param
    return run_kinds(__name__, ranks, ranks_per_node, odd_rank), odd_rank


@pytest.mark.parametrize("name", KINDS)
def test_it_is_an_error_on_all_ranks(job: tuple[dict[str, list[Outcome]], int], name: str) -> None:
    outcomes, odd_rank = job
    check(KINDS[name], outcomes[name], odd_rank)
