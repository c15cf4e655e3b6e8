"""What a state keeps: values of any kind, whatever became of them, and never anything but the newest commit."""

from __future__ import annotations

import json
import subprocess
import threading

import numpy as np
import pytest

import mpidist
from mpidist import elastic
from tests.elastic.test_run import needs_ulfm
from tests.support.ranks.jobs import run_script
from tests.support.ranks.pool import run

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank, pytest.mark.timeout(120)]

BEGINNING = """
import json, os, signal, time
import numpy as np
import mpidist
from mpidist import elastic
from mpi4py import MPI

me = MPI.COMM_WORLD.rank
def say(*what): print(json.dumps([me, *what]), flush=True)
pids = MPI.COMM_WORLD.allgather(os.getpid())
def wait_until_gone(pid):
    while True:
        try: state = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
        except FileNotFoundError: return
        if state == "Z": return
        time.sleep(0.01)
def sum_of_ones():
    return mpidist.get_replica_context().all_reduce("SUM", np.ones(2))
"""


def lines(job: subprocess.CompletedProcess[str]) -> list[list[object]]:
    assert job.returncode == 0, job.stderr
    return sorted(json.loads(line) for line in job.stdout.splitlines() if line.startswith("["))


def on_ranks(script: str, ranks: int) -> list[list[object]]:
    return lines(run_script(BEGINNING + script, ranks, flags=("--with-ft", "ulfm")))


@needs_ulfm
def test_values_are_those_of_the_last_commit_whatever_kind_they_have_become() -> None:
    found = on_ranks(
        """
def train(state):
    if state.commits:
        say("again", state.step, state.history, state.grows.tolist())
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        while state.step < 8:
            strategy.run(sum_of_ones)
            if state.history is None: state.history = []
            state.history.append(state.step)
            state.grows = np.append(state.grows, 1.0)
            state.step += 1
            state.commit()
            if state.step == 4 and me == 2: os.kill(os.getpid(), signal.SIGKILL)
        return state.step, state.history, len(state.grows)
say("end", *elastic.run(train, elastic.State(step=0, history=None, grows=np.zeros(0))))
""",
        3,
    )
    again = [["again", step, list(range(step)), [1.0] * step] for step in (4, 5)]
    assert [line[1:] for line in found if line[1] == "again"] in ([again[0]] * 2, [again[1]] * 2)
    assert [line[1:] for line in found if line[1] == "end"] == [["end", 8, list(range(8)), 8]] * 2


@needs_ulfm
def test_the_newest_commit_survives_a_second_loss() -> None:
    found = on_ranks(
        """
from mpidist.core.errors import RankLostError
calls = []
def train(state):
    calls.append(0)
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            v = mpidist.Variable(0.0, aggregation=mpidist.VariableAggregation.ONLY_FIRST_REPLICA)
            state.track(v=v)
        say(len(calls), state.step, state.commits, float(v.numpy()))
        if len(calls) == 2:
            strategy.run(sum_of_ones)
            if me == 0: os.kill(os.getpid(), signal.SIGKILL)
        while state.step < 10:
            strategy.run(sum_of_ones)
            strategy.run(lambda: v.assign_add(1.0))
            state.step += 1
            # Ranks 0 and 1 do not come to the sixth commit, which rank 2 alone has.
            if len(calls) == 1 and state.step == 6:
                if me in (0, 1): wait_until_gone(pids[3]); raise RankLostError("noticed just before the commit")
                if me == 3: os.kill(os.getpid(), signal.SIGKILL)
                from mpidist.checkpoint.checkpoint import TrackedObjects
                elastic._copy_of = lambda tracked, real=elastic._copy_of: real(lonely)
                lonely = TrackedObjects({"v": np.array(6.0)})
            state.commit()
        return state.step
elastic.run(train, elastic.State(step=0))
""",
        4,
    )
    later = sorted(line[1:] for line in found if line[1] != 1)
    assert later == [[2, 6, 6, 6.0]] * 3 + [[3, 6, 6, 6.0]] * 2


def test_wrong_names_and_values() -> None:
    for name in ("commit", "track", "commits", "_hidden"):
        with pytest.raises(ValueError, match=f"cannot be called '{name}'"):
            elastic.State(**{name: 1})
    with pytest.raises(TypeError, match=r"\['lock', 'step'\], cannot be pickled: cannot pickle"):
        elastic.State(step=0, lock=threading.Lock())
    state = elastic.State(step=0)
    with pytest.raises(ValueError, match="given 'step', which is a value of the state"):
        state.track(step=mpidist.Variable(0))
    state.track(v=mpidist.Variable(0))
    with pytest.raises(RuntimeError, match="second time; give it all objects in one call"):
        state.track(w=mpidist.Variable(0))
    with pytest.raises(AttributeError, match=r"no object 'other', it has \['step', 'v'\]; give it to the constructor"):
        state.other = 1


@needs_ulfm
def test_objects_of_one_process_are_refused() -> None:
    found = on_ranks(
        """
def train(state):
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        try: state.track(array=np.zeros(3))
        except RuntimeError as error: say(str(error))
        with strategy.scope(): state.track(array=np.zeros(3))
elastic.run(train, elastic.State(step=0))
""",
        2,
    )
    assert len(found) == 2
    assert all(
        "['array'], which belong to this process alone. Pass objects of a strategy" in str(line[1]) for line in found
    )


def test_arrays_among_the_values_are_copied_by_a_commit() -> None:
    state = elastic.State(best=np.zeros(2), names=["a"])
    state.best[:] = 1
    state.names.append("b")
    state.commit()
    assert state.best.tolist() == [1, 1]
    assert state.names == ["a", "b"]


def _commits_what_differs(kind: str) -> str:
    from mpi4py import MPI

    with mpidist.MultiWorkerMirroredStrategy(devices=["cpu:0"]) as strategy:
        is_odd = MPI.COMM_WORLD.rank == 1
        with strategy.scope():
            objects = {"w": mpidist.Variable(np.zeros(2)), "names": ["a"], "spare": []}
            more = mpidist.Variable(np.zeros(3))
            if is_odd and kind == "another name":
                objects["v"] = objects.pop("w")
        state = elastic.State(step=0)
        state.track(**objects)
        try:
            state.commit()
            if is_odd and kind == "another variable":
                state.spare.append(more)
            if is_odd:
                state.names.append("b")
            state.commit()
            strategy.reduce("SUM", 1.0, axis=None)
        except mpidist.MismatchError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize("kind", ["another name", "another variable"])
def test_ranks_that_track_other_objects_are_told_at_the_commit(kind: str) -> None:
    for found in run(_commits_what_differs, 2, kind):
        assert "commit() of the values ['step'] and of " in found
        assert "w: float64(2,)" in found
    assert run(_commits_what_differs, 2, "nothing differs") == ["no error"] * 2
