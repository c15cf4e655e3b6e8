"""TF_CONFIG, right and wrong."""

from __future__ import annotations

import json

import pytest

from mpidist.cluster_resolver import TFConfigClusterResolver

# The environment of one process.
pytestmark = pytest.mark.one_rank

CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


@pytest.fixture
def tf_config(monkeypatch: pytest.MonkeyPatch):
    def put(config: object) -> None:
        monkeypatch.setenv("TF_CONFIG", config if isinstance(config, str) else json.dumps(config))

    monkeypatch.delenv("TF_CONFIG", raising=False)
    return put


@pytest.mark.parametrize("index", [1, "1"])
def test_cluster_task_and_address(tf_config, index: object) -> None:
    tf_config({"cluster": CLUSTER, "task": {"type": "worker", "index": index}, "rpc_layer": "grpc"})
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec().as_dict() == CLUSTER
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
    assert type(resolver.task_id) is int
    assert resolver.master() == "grpc://c:1"
    assert resolver.master("ps", 0, rpc_layer="mpi") == "mpi://d:1"
    assert resolver.master(task_id=0) == "grpc://b:1"
    assert resolver.environment == ""


def test_arguments_come_first(tf_config) -> None:
    tf_config({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}, "rpc_layer": "grpc", "environment": "cloud"})
    resolver = TFConfigClusterResolver("chief", 0, "mpi", "here")
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("chief", 0, "mpi")
    assert resolver.environment == "here"
    assert resolver.master() == "mpi://a:1"
    assert TFConfigClusterResolver().environment == "cloud"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 0, "x"
    assert resolver.master() == "x://b:1"


def test_sparse_clusters(tf_config) -> None:
    tf_config({"cluster": {"worker": {"1": "b:1"}, "chief": ["a:1"]}, "task": {"type": "worker", "index": 1}})
    assert TFConfigClusterResolver().master() == "b:1"


def test_without_the_variable_the_cluster_is_empty(tf_config) -> None:
    resolver = TFConfigClusterResolver()
    assert not resolver.cluster_spec()
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer, resolver.master()) == (None, None, None, "")
    tf_config({"cluster": CLUSTER, "task": {"type": "chief", "index": 0}})
    assert resolver.task_type == "chief"  # read anew each time


def test_special_masters(tf_config) -> None:
    tf_config({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})
    assert TFConfigClusterResolver().master() == ""
    tf_config({"cluster": CLUSTER, "session_master": "z:9"})
    assert TFConfigClusterResolver().master() == "z:9"


def test_an_evaluator_is_outside_of_the_cluster(tf_config) -> None:
    tf_config({"cluster": CLUSTER, "task": {"type": "evaluator", "index": 0}})
    assert TFConfigClusterResolver().task_type == "evaluator"


def test_task_type_is_a_string(tf_config) -> None:
    """TensorFlow's testTaskTypeCastToString."""
    tf_config({"cluster": {"123": ["a:1", "b:1"], "worker": ["c:1"]}, "task": {"type": 123, "index": "1"}})
    resolver = TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("123", 1, "b:1")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"cluster": ', "is not JSON"),
        ("worker:3", "is not JSON"),
        ("[1]", "is a list"),
        ({"cluster": ["a:1"]}, "no usable 'cluster'"),
        ({"cluster": {"worker": "a:1"}}, "no usable 'cluster'.*'a:1'"),
        ({"cluster": {"worker": {"x": "a:1"}}}, "no usable 'cluster'.*'x'"),
        ({"clsuter": CLUSTER}, r"unknown keys \['clsuter'\]. Known are cluster, task"),
        ({"cluster": {**CLUSTER, "wroker": ["e:1"]}}, "unknown job 'wroker' in its cluster. Known are chief, worker"),
        ({"cluster": {"chief": ["a:1", "b:1"]}}, "has 2 tasks 'chief', but at most one is possible"),
        ('{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}}', "has the key 'worker' twice"),
        ({"cluster": {"worker": {"01": "a:1", "1": "b:1"}}}, "no usable 'cluster'.*job 'worker' has task 1 twice"),
        ({"cluster": {"worker": ["a:1", " "]}}, "no usable 'cluster'.*an address of job 'worker' is ' '"),
        ({"cluster": CLUSTER, "task": "worker"}, "has 'task': 'worker'"),
        ({"cluster": CLUSTER, "task": {"type": 7, "index": 0}}, "task of type '7', but the jobs of its cluster are"),
        ({"cluster": CLUSTER, "task": {"type": True, "index": 0}}, "task type True"),
        ({"cluster": CLUSTER, "task": {"type": "boss", "index": 0}}, "task type 'boss'.*chief, worker, evaluator, ps"),
        (
            {"cluster": CLUSTER, "task": {"type": "worker", "index": " 1"}},
            "task index ' 1', which is not a whole number",
        ),
        ({"cluster": CLUSTER, "task": {"type": "worker", "index": "\u0661"}}, "task index '\u0661'"),
        ({"cluster": {"worker": {"1_0": "a:1"}}}, "no usable 'cluster': a task index of job 'worker' is '1_0'"),
        (
            {"cluster": {"worker": ["a:1"]}, "task": {"type": "ps", "index": 0}},
            r"type 'ps', but the jobs .*\['worker'\]",
        ),
        (
            {"cluster": CLUSTER, "task": {"type": "worker", "index": 2}},
            r"task index 2, but job 'worker' has .*\[0, 1\]",
        ),
        ({"cluster": CLUSTER, "task": {"type": "worker", "index": -1}}, "task index -1"),
        ({"cluster": CLUSTER, "task": {"type": "worker", "index": "9" * 5000}}, "task index '999"),
        ({"cluster": CLUSTER, "task": {"type": "worker", "index": 0.5}}, "task index 0.5"),
        ({"cluster": CLUSTER, "task": {"type": "worker", "index": True}}, "task index True"),
        ({"cluster": CLUSTER, "task": {"type": ["worker"], "index": 0}}, r"task type \['worker'\]"),
    ],
)
def test_bad_variables_are_quoted(tf_config, config: object, said: str) -> None:
    tf_config(config)
    text = config if isinstance(config, str) else json.dumps(config)
    for ask in ("cluster_spec", "master"):
        with pytest.raises(ValueError, match=said) as caught:
            getattr(TFConfigClusterResolver(), ask)()
        assert repr(text) in str(caught.value)
    with pytest.raises(ValueError, match=said):
        TFConfigClusterResolver().task_type


def test_a_task_that_is_not_known(tf_config) -> None:
    tf_config({"cluster": CLUSTER})
    with pytest.raises(ValueError, match="does not name the task of this process"):
        TFConfigClusterResolver().master()
    with pytest.raises(ValueError, match="job_name is 'boss'"):
        TFConfigClusterResolver().master("boss", 0)
