"""ClusterSpec: forms, questions, equality, errors."""

from __future__ import annotations

import pytest

from mpidist.cluster_resolver import ClusterSpec

pytestmark = pytest.mark.one_rank

DENSE = {"ps": ["a:1"], "worker": ["b:1", "c:1"]}


def test_dense_jobs() -> None:
    spec = ClusterSpec(DENSE)
    assert spec.jobs == ["ps", "worker"]
    assert spec.as_dict() == DENSE
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [0, 1]
    assert spec.task_address("worker", 1) == "c:1"
    assert spec.job_tasks("worker") == ["b:1", "c:1"]


def test_a_job_with_gaps() -> None:
    spec = ClusterSpec({"worker": {3: "d:1", 1: "b:1"}})
    assert spec.as_dict() == {"worker": {1: "b:1", 3: "d:1"}}
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [1, 3]
    assert spec.job_tasks("worker") == [None, "b:1", None, "d:1"]
    assert spec.as_cluster_def() == {"worker": {1: "b:1", 3: "d:1"}}


def test_a_dict_without_gaps_is_a_list_and_keys_may_be_text() -> None:
    assert ClusterSpec({"worker": {"1": "b:1", "0": "a:1"}}).as_dict() == {"worker": ["a:1", "b:1"]}
    assert ClusterSpec({"worker": ("a:1",)}) == {"worker": ["a:1"]}


def test_an_empty_job_and_an_empty_cluster() -> None:
    assert ClusterSpec({"worker": []}).as_dict() == {"worker": {}}
    assert ClusterSpec({"worker": []}).job_tasks("worker") == []
    assert not ClusterSpec({})
    assert ClusterSpec({"worker": []})


def test_a_copy_is_equal_and_separate() -> None:
    given = {"worker": {0: "a:1"}}
    spec = ClusterSpec(given)
    given["worker"][1] = "b:1"
    assert spec.num_tasks("worker") == 1
    assert ClusterSpec(spec) == spec


def test_equality() -> None:
    assert ClusterSpec(DENSE) == ClusterSpec(dict(reversed(DENSE.items())))
    assert ClusterSpec(DENSE) == DENSE
    assert ClusterSpec(DENSE) != ClusterSpec({"worker": ["b:1", "c:1"]})
    assert ClusterSpec(DENSE) != {"worker": 3}
    assert ClusterSpec(DENSE) != 3


def test_text_is_sorted_by_job() -> None:
    assert repr(ClusterSpec({"worker": ["b:1"], "ps": ["a:1"]})) == "ClusterSpec({'ps': ['a:1'], 'worker': ['b:1']})"
    assert str(ClusterSpec({})) == "ClusterSpec({})"


@pytest.mark.parametrize("ask", ["num_tasks", "task_indices", "job_tasks"])
def test_unknown_job(ask: str) -> None:
    with pytest.raises(ValueError, match=r"'chief'; the jobs of this cluster are \['ps', 'worker'\]"):
        getattr(ClusterSpec(DENSE), ask)("chief")


def test_unknown_task() -> None:
    with pytest.raises(ValueError, match="chief"):
        ClusterSpec(DENSE).task_address("chief", 0)
    with pytest.raises(ValueError, match=r"task_index is 2; job 'worker' has the tasks \[0, 1\]"):
        ClusterSpec(DENSE).task_address("worker", 2)


@pytest.mark.parametrize(
    "cluster",
    [
        ["a:1"],
        None,
        {"worker": "a:1"},
        {"worker": 3},
        {"worker": [1]},
        {1: ["a:1"]},
        {"worker": {"first": "a:1"}},
        {"worker": {1.7: "a:1"}},
        {"worker": {1.0: "a:1"}},
        {"worker": {"1.7": "a:1"}},
        {1.7: ["a:1"]},
    ],
)
def test_wrong_types(cluster: object) -> None:
    with pytest.raises(TypeError, match="expected"):
        ClusterSpec(cluster)  # type: ignore[arg-type]


def test_negative_index() -> None:
    with pytest.raises(ValueError, match="-1; expected at least 0"):
        ClusterSpec({"worker": {-1: "a:1"}})
