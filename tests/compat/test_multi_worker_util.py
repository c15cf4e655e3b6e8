"""Who is chief, how many workers, which number among them."""

from __future__ import annotations

import pytest

from mpidist.cluster_resolver import ClusterSpec
from mpidist.compat import multi_worker_util as util

pytestmark = pytest.mark.one_rank

CHIEF = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "evaluator": ["d:1"]}
WORKERS = {"worker": ["b:1", "c:1"]}
SERVERS = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["e:1", "f:1"]}


@pytest.mark.parametrize("form", [dict, ClusterSpec])
@pytest.mark.parametrize(
    ("cluster", "task", "chief", "number", "workers", "leader"),
    [
        (CHIEF, ("chief", 0), True, 0, 3, "/job:chief/replica:0/task:0"),
        (CHIEF, ("worker", 0), False, 1, 3, "/job:chief/replica:0/task:0"),
        (CHIEF, ("worker", 1), False, 2, 3, "/job:chief/replica:0/task:0"),
        (CHIEF, ("evaluator", 0), True, 0, 1, ""),
        (WORKERS, ("worker", 0), True, 0, 2, "/job:worker/replica:0/task:0"),
        (WORKERS, ("worker", 1), False, 1, 2, "/job:worker/replica:0/task:0"),
        (SERVERS, ("worker", 1), False, 2, 3, "/job:chief/replica:0/task:0"),
        ({"worker": ["a:1"]}, ("worker", 0), True, 0, 1, "/job:worker/replica:0/task:0"),
        ({"chief": ["a:1"]}, ("chief", 0), True, 0, 1, "/job:chief/replica:0/task:0"),
    ],
)
def test_roles(form, cluster, task, chief, number, workers, leader) -> None:
    spec = form(cluster)
    assert util.is_chief(spec, *task) is chief
    assert util.id_in_cluster(spec, *task) == number
    assert util.worker_count(spec, task[0]) == workers
    assert util.collective_leader(spec, *task) == leader


def test_parameter_servers_have_no_number() -> None:
    assert util.is_chief(SERVERS, "ps", 0) is False
    assert util.collective_leader(SERVERS, "ps", 1) == "/job:chief/replica:0/task:0"
    with pytest.raises(ValueError, match="task_type is 'ps'"):
        util.id_in_cluster(SERVERS, "ps", 0)
    with pytest.raises(ValueError, match="task_type is 'ps'"):
        util.worker_count(SERVERS, "ps")


def test_an_evaluator_need_not_be_in_the_cluster() -> None:
    assert util.is_chief(WORKERS, "evaluator", 0) is True
    assert util.id_in_cluster(WORKERS, "evaluator", 0) == 0
    assert util.collective_leader(WORKERS, "evaluator", 0) == ""


def test_has_worker() -> None:
    assert util.has_worker(WORKERS)
    assert util.has_worker({"chief": ["a:1"]})
    assert not util.has_worker({"ps": ["a:1"], "evaluator": ["b:1"]})
    assert not util.has_worker({})


def test_an_empty_cluster_has_no_leader() -> None:
    assert util.collective_leader({}, "worker", 0) == ""


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "said"),
    [
        (None, "worker", 0, "expected a"),
        (WORKERS, None, 0, "expected all three"),
        (WORKERS, "worker", None, "expected all three"),
        (["a:1"], "worker", 0, "expected a ClusterSpec or a dict"),
        (WORKERS, "boss", 0, "task_type is 'boss'; expected one of chief, worker, evaluator, ps"),
        (WORKERS, "chief", 0, "task_type is 'chief'; expected a job of the cluster: worker"),
        (WORKERS, "worker", 2, "task_id is 2; 'worker' has 2 tasks, so expected 0 to 1"),
        (WORKERS, "worker", -1, "task_id is -1"),
        ({**WORKERS, "chief": ["a:1", "a:2"]}, "worker", 0, "2 tasks 'chief'; expected at most one"),
        ({**WORKERS, "evaluator": ["a:1", "a:2"]}, "worker", 0, "2 tasks 'evaluator'; expected at most one"),
        ({**WORKERS, "boss": ["a:1"]}, "worker", 0, r"the jobs \['boss'\]; expected only chief"),
    ],
)
def test_validation(cluster, task_type, task_id, said: str) -> None:
    for question in (util.is_chief, util.id_in_cluster, util.collective_leader):
        with pytest.raises(ValueError, match=said):
            question(cluster, task_type, task_id)
