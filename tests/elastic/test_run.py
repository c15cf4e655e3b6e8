"""Trainings that lose ranks by kill -9 and go on: with every committed step, exactly, on the ranks that are left."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence

import numpy as np
import pytest

import mpidist
from mpidist import elastic
from mpidist.topology import import_mpi
from tests.support.ranks.jobs import run_script

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank, pytest.mark.timeout(120)]

STEPS = 60
TRAIN = """
import json, os, random, signal, sys, time
import numpy as np
import mpidist
from mpidist import elastic
from mpi4py import MPI

me, steps, where = MPI.COMM_WORLD.rank, int(sys.argv[1]), sys.argv[2]
deaths = json.loads(sys.argv[3])  # by rank of the job: at which step
min_ranks = int(sys.argv[4])

def die(place, step):
    if place == where and deaths.get(str(me)) == step:
        os.kill(os.getpid(), signal.SIGKILL)

def train(state):
    die("begin", state.step)
    with mpidist.Communicator() as everyone:
        everyone.barrier()
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            w = mpidist.Variable(np.zeros(3), aggregation=mpidist.VariableAggregation.ONLY_FIRST_REPLICA)
            total = mpidist.Variable(
                0.0,
                synchronization=mpidist.VariableSynchronization.ON_READ,
                aggregation=mpidist.VariableAggregation.SUM,
            )
            big = mpidist.Variable(np.zeros(100_000), aggregation=mpidist.VariableAggregation.ONLY_FIRST_REPLICA)
        dataset = mpidist.Dataset.range(1000).shuffle(seed=1).repeat().batch(12)
        iterator = iter(strategy.experimental_distribute_dataset(dataset))
        state.track(w=w, total=total, big=big, iterator=iterator)

        def replica_step(batch):
            context = mpidist.get_replica_context()
            w.assign_add(context.all_reduce("SUM", np.array([batch.sum(), len(batch), 0.0])) + [0, 0, 1])
            big.assign_add(context.all_reduce("MEAN", np.ones(100_000)))
            total.assign_add(float(batch.sum()))

        while state.step < steps:
            die("step", state.step)
            strategy.run(replica_step, args=(next(iterator),))
            state.step += 1
            die("commit", state.step)
            state.commit()
        die("end", state.step)
        return [*w.numpy().tolist(), float(total.numpy()), float(big.numpy().sum()), strategy.num_replicas_in_sync]

die("start", 0)
print(json.dumps(elastic.run(train, elastic.State(step=0), min_ranks=min_ranks)), flush=True)
"""


def open_mpi_version() -> int:
    found = re.search(r"Open MPI v(\d+)", import_mpi().Get_library_version())
    return 0 if found is None else int(found[1])


needs_ulfm = pytest.mark.skipif(open_mpi_version() < 5, reason="goes on without lost ranks with Open MPI 5 only")


def job(
    ranks: int,
    deaths: dict[int, int],
    where: str = "step",
    min_ranks: int = 1,
    ranks_per_node: int | None = None,
    flags: Sequence[str] = ("--with-ft", "ulfm"),
    timeout: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    arguments = (str(STEPS), where, json.dumps(deaths), str(min_ranks))
    return run_script(TRAIN, ranks, *arguments, flags=flags, ranks_per_node=ranks_per_node, timeout=timeout)


def results(found: subprocess.CompletedProcess[str]) -> list[list[float]]:
    return [json.loads(line) for line in found.stdout.splitlines() if line.startswith("[")]


def expected(replicas: int) -> list[float]:
    batches = iter(mpidist.Dataset.range(1000).shuffle(seed=1).repeat().batch(12))
    total = float(sum(int(next(batches).sum()) for _ in range(STEPS)))
    return [total, 12.0 * STEPS, float(STEPS), total, 100_000.0 * STEPS, replicas]


@needs_ulfm
@pytest.mark.parametrize(
    ("deaths", "where", "ranks_per_node"),
    [
        pytest.param({1: 20}, "step", None, marks=pytest.mark.long),
        ({0: 20}, "commit", 2),
        ({3: 20, 0: 40}, "step", None),
        pytest.param({1: 20, 2: 20}, "commit", 2, marks=pytest.mark.long),
        pytest.param({1: 20}, "commit", 2, marks=pytest.mark.long),
        pytest.param({0: 20}, "step", None, marks=pytest.mark.long),
        pytest.param({3: 20, 0: 40}, "commit", 2, marks=pytest.mark.long),
        pytest.param({1: 20, 2: 20}, "step", None, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_training_ends_as_if_no_rank_had_been_lost(
    deaths: dict[int, int], where: str, ranks_per_node: int | None
) -> None:
    found = job(4, deaths, where, ranks_per_node=ranks_per_node)
    assert found.returncode == 0, found.stderr
    left = 4 - len(deaths)
    assert results(found) == [expected(left)] * left
    assert "go on from commit" in found.stderr


@needs_ulfm
@pytest.mark.parametrize("where", ["start", pytest.param("begin", marks=pytest.mark.long), "end"])
def test_a_rank_is_lost_before_the_first_step_or_after_the_last(where: str) -> None:
    found = job(3, {1: STEPS if where == "end" else 0}, where)
    assert found.returncode == 0, found.stderr
    assert results(found) == [expected(2)] * 2


@needs_ulfm
@pytest.mark.parametrize("where", ["before", "after"])
def test_another_rank_is_lost_while_the_others_agree_to_go_on(where: str) -> None:
    dying = f"""
import os, signal
from mpi4py import MPI
take_over = elastic.State._take_over
def dies(self, comm):
    if {where == "after"}:
        take_over(self, comm)
    if MPI.COMM_WORLD.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if {where == "before"}:
        take_over(self, comm)
elastic.State._take_over = dies
"""
    script = TRAIN.replace("me, steps, where", f"{dying}\nme, steps, where", 1)
    found = run_script(script, 4, str(STEPS), "step", '{"1": 20}', "1", flags=("--with-ft", "ulfm"))
    assert found.returncode == 0, found.stderr
    assert results(found) == [expected(2)] * 2


@needs_ulfm
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_too_few_ranks_are_an_error(ranks: int) -> None:
    found = job(ranks, {1: 20}, min_ranks=ranks)
    assert found.returncode != 0
    said = f"1 of {ranks} ranks are lost, and {ranks - 1} are left; expected {ranks} at least (min_ranks)"
    assert f"RankLostError: {said}" in found.stderr


def test_without_fault_tolerance_the_launcher_ends_the_job() -> None:
    found = job(3, {1: 20}, flags=())
    assert found.returncode != 0
    assert results(found) == []


@needs_ulfm
def test_an_error_of_the_program_is_not_a_lost_rank() -> None:
    script = """
from mpidist import elastic
def train(state):
    raise ValueError("a bug")
elastic.run(train, elastic.State())
"""
    found = run_script(script, 2, flags=("--with-ft", "ulfm"))
    assert found.returncode != 0
    assert "ValueError: a bug" in found.stderr


def test_a_lone_process_just_trains() -> None:
    def train(state: elastic.State) -> int:
        state.track(weights=weights)
        while state.step < 3:
            weights[:] += 1
            state.step += 1
            state.commit()
        return int(state.step)

    weights = np.zeros(2)
    state = elastic.State(step=0)
    assert elastic.run(train, state) == 3
    assert state.commits == 3
    weights[:] = 9
    assert elastic.run(lambda again: (again.track(weights=weights), again.step)[1], state) == 3
    assert weights.tolist() == [3, 3]


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="expected mpidist.elastic.State"):
        elastic.run(lambda state: None, {"step": 0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_ranks is 0"):
        elastic.run(lambda state: None, elastic.State(), min_ranks=0)
    with pytest.raises(ValueError, match="min_ranks is 9, and the job has 1 ranks; expected 1 at most"):
        elastic.run(lambda state: None, elastic.State(), min_ranks=9)
    with pytest.raises(AttributeError, match="has no object 'missing'"):
        _ = elastic.State(step=0).missing
