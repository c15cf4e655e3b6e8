"""TF_CONFIG that no argument requests: it must describe this MPI job."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from mpi4py import MPI

import mpidist
from mpidist.cluster_resolver import TFConfigClusterResolver
from tests.support.ranks.pool import run

pytestmark = pytest.mark.one_rank

TWO = {"worker": ["a:1", "b:1"]}


def config(cluster: dict[str, list[str]], job: str, index: int) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


@pytest.mark.parametrize(
    "make",
    [
        mpidist.MultiWorkerMirroredStrategy,
        mpidist.v1.experimental.ParameterServerStrategy,
        mpidist.ParameterServerStrategy,
        lambda: mpidist.train_and_evaluate(
            mpidist.TrainSpec(lambda context: None, "never", max_steps=1), mpidist.EvalSpec(lambda context: {})
        ),
    ],
    ids=["mirrored", "v1 servers", "coordinator", "train_and_evaluate"],
)
def test_processes_that_were_started_one_by_one(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", config(TWO, "worker", 1))
    text = r"TF_CONFIG has 2 tasks \(worker:2\), and this process is worker:1\. MPI has 1 ranks.* mpirun -n 2 python"
    with pytest.raises(mpidist.LaunchError, match=text):
        make()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        json.dumps({"cluster": {"worker": ["a:1"]}}),
        config({"worker": ["a:1"]}, "worker", 0),
        config({"chief": ["a:1"]}, "chief", 0),
    ],
)
def test_what_tells_of_this_job_is_fine(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    mpidist.MultiWorkerMirroredStrategy().close()
    mpidist.v1.experimental.ParameterServerStrategy().close()


def test_what_is_asked_for_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", config(TWO, "worker", 1))
    with pytest.raises(ValueError, match="has 2 tasks .* and the MPI world has 1 ranks"):
        mpidist.MultiWorkerMirroredStrategy(TFConfigClusterResolver())
    monkeypatch.setenv("TF_CONFIG", "{")
    with pytest.raises(ValueError, match="TF_CONFIG"):
        mpidist.MultiWorkerMirroredStrategy()
    # Who names the ranks has said enough.
    mpidist.MultiWorkerMirroredStrategy(communicator=MPI.COMM_WORLD).close()


def made(texts: list[str]) -> Any:
    os.environ["TF_CONFIG"] = texts[MPI.COMM_WORLD.rank]
    try:
        mpidist.MultiWorkerMirroredStrategy().close()
    except mpidist.LaunchError as error:
        return str(error)
    return None


@pytest.mark.jobs
def test_on_two_ranks() -> None:
    for tasks in ([("worker", 0), ("worker", 1)], [("chief", 0), ("worker", 0)]):
        cluster = TWO if tasks[0][0] == "worker" else {"chief": ["a:1"], "worker": ["b:1"]}
        assert run(made, 2, [config(cluster, *task) for task in tasks]) == [None, None]
    swapped = run(made, 2, [config(TWO, "worker", 1), config(TWO, "worker", 0)])
    three = run(made, 2, [config({"worker": ["a:1", "b:1", "c:1"]}, "worker", rank) for rank in (0, 1)])
    for rank, text in [*enumerate(swapped), *enumerate(three)]:
        assert f"MPI has 2 ranks, and this process is rank {rank}, worker:{rank}" in text
