"""MultiWorkerMirroredStrategy and cluster resolvers that are not MPI's."""

from __future__ import annotations

import json

import pytest

import mpidist
from mpidist.cluster_resolver import SimpleClusterResolver, TFConfigClusterResolver
from mpidist.topology import world_topology

pytestmark = [pytest.mark.nodes, pytest.mark.counts]


def test_as_many_ranks_as_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_topology().world
    hosts = [f"host{rank}:1" for rank in range(world.size)]
    task = {"type": "worker", "index": world.rank}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": hosts}, "task": task}))
    strategy = mpidist.MultiWorkerMirroredStrategy(TFConfigClusterResolver())
    assert strategy.num_replicas_in_sync == world.size
    strategy.close()


def test_another_number_of_tasks_than_ranks() -> None:
    size = world_topology().size
    spec = {"chief": ["a:1"], "worker": [f"b{n}:1" for n in range(size)]}
    resolver = SimpleClusterResolver(mpidist.ClusterSpec(spec), task_type="chief", task_id=0)
    with pytest.raises(ValueError, match=rf"has {size + 1} tasks .*MPI world has {size} ranks.*mpirun -n {size + 1} "):
        mpidist.MultiWorkerMirroredStrategy(resolver)


def test_jobs_that_do_not_train() -> None:
    spec = {"ps": ["a:1"], "worker": [f"b{n}:1" for n in range(world_topology().size)]}
    resolver = SimpleClusterResolver(mpidist.ClusterSpec(spec), task_type="worker", task_id=0)
    with pytest.raises(ValueError, match=r"jobs that do not train \(.*ps:1.*\).*communicator="):
        mpidist.MultiWorkerMirroredStrategy(resolver)


@pytest.mark.min_ranks(2)
def test_two_ranks_that_take_themselves_for_one_task() -> None:
    spec = {"worker": [f"b{n}:1" for n in range(world_topology().size)]}
    resolver = SimpleClusterResolver(mpidist.ClusterSpec(spec), task_type="worker", task_id=0)
    with pytest.raises(ValueError, match="ranks 0 and 1 are both worker:0 by their SimpleClusterResolver"):
        mpidist.MultiWorkerMirroredStrategy(resolver)
