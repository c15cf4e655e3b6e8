"""Resolvers that ask nobody: the simple one, the union, and those that are not offered."""

from __future__ import annotations

import pytest

from mpidist import cluster_resolver
from mpidist.cluster_resolver import (
    ClusterSpec,
    SimpleClusterResolver,
    UnionClusterResolver,
    UnionResolver,
)

pytestmark = pytest.mark.one_rank

SPEC = ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})


def test_simple_answers_what_it_was_given() -> None:
    resolver = SimpleClusterResolver(SPEC, "m:1", "worker", 0, "cloud", {"GPU": 8}, "grpc")
    assert resolver.cluster_spec() == SPEC
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 0, "cloud")
    assert resolver.num_accelerators("ps", 0) == {"GPU": 8}
    assert resolver.master() == "grpc://m:1"
    assert resolver.master("worker", 0) == "grpc://a:1"
    assert resolver.master("worker", 1, "mpi") == "mpi://b:1"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "ps", 0, None
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("ps", 0, "m:1")


def test_simple_by_default() -> None:
    resolver = SimpleClusterResolver(SPEC)
    assert (resolver.task_type, resolver.task_id, resolver.environment, resolver.rpc_layer) == (None, None, "", None)
    assert resolver.master() == ""
    assert resolver.num_accelerators() == {}


def test_simple_with_wrong_arguments() -> None:
    with pytest.raises(
        TypeError, match=r"cluster_spec is \{'worker': \['a:1'\]\} of type dict; expected a ClusterSpec"
    ):
        SimpleClusterResolver({"worker": ["a:1"]})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="master is 3 of type int"):
        SimpleClusterResolver(SPEC, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="job_name is 'boss'"):
        SimpleClusterResolver(SPEC).master("boss", 0)
    with pytest.raises(ValueError, match="task_index is 2"):
        SimpleClusterResolver(SPEC).master("worker", 2)


def simple(cluster: dict[str, object], **arguments: object) -> SimpleClusterResolver:
    return SimpleClusterResolver(ClusterSpec(cluster), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("clusters", "merged"),
    [
        ([{"worker": ["a:1"]}], {"worker": ["a:1"]}),
        ([{"worker": ["a:1"]}, {"worker": ["b:1", "c:1"]}], {"worker": ["a:1", "b:1", "c:1"]}),
        ([{"worker": ["b:1"]}, {"ps": ["a:1"], "worker": ["a:1"]}], {"worker": ["b:1", "a:1"], "ps": ["a:1"]}),
        ([{"worker": ["a:1"]}, {"worker": {3: "d:1"}}], {"worker": {0: "a:1", 3: "d:1"}}),
        ([{"worker": {1: "b:1"}}, {"worker": ["a:1"]}], {"worker": ["a:1", "b:1"]}),
        ([{"worker": {5: "b:1"}}, {"worker": {2: "a:1"}}], {"worker": {2: "a:1", 5: "b:1"}}),
    ],
)
def test_union_merges(clusters, merged: dict[str, object]) -> None:
    assert UnionResolver(*map(simple, clusters)).cluster_spec().as_dict() == merged


def test_union_with_the_same_index_twice() -> None:
    with pytest.raises(KeyError, match=r"job 'worker' has the tasks \[1\] in two resolvers"):
        UnionResolver(simple({"worker": {1: "a:1"}}), simple({"worker": ["b:1", "c:1"]})).cluster_spec()


def test_union_asks_the_first() -> None:
    first = simple(
        {"worker": ["a:1"]},
        master="m:1",
        task_type="worker",
        task_id=4,
        environment="cloud",
        num_accelerators={"GPU": 2},
        rpc_layer="grpc",
    )
    union = UnionResolver(first, simple({"ps": ["b:1"]}, master="n:1", task_type="ps", task_id=0))
    assert (union.task_type, union.task_id, union.environment, union.rpc_layer) == ("worker", 4, "cloud", "grpc")
    assert union.num_accelerators() == {"GPU": 2}
    assert union.master() == "grpc://m:1"
    assert union.master("ps", 0) == "grpc://b:1"


def test_union_with_values_of_its_own() -> None:
    union = UnionResolver(
        simple({"worker": ["a:1"]}, task_type="ps", task_id=4), rpc_layer="mpi", task_type="worker", task_id=0
    )
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 0, "mpi")
    union.task_type, union.task_id, union.rpc_layer = "chief", 1, "x"
    assert (union.task_type, union.task_id, union.rpc_layer) == ("chief", 1, "x")


def test_union_with_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="at least one"):
        UnionResolver()
    with pytest.raises(TypeError, match="'a:1' is of type str; expected ClusterResolver"):
        UnionResolver("a:1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the keywords \['task'\] are not known"):
        UnionResolver(simple({}), task="worker")


def test_the_other_name_of_the_union() -> None:
    assert UnionClusterResolver is UnionResolver


@pytest.mark.parametrize(
    "name", ["KubernetesClusterResolver", "GCEClusterResolver", "TPUClusterResolver", "SageMakerClusterResolver"]
)
def test_what_is_not_offered_says_what_is(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"does not offer {name}.*MPIClusterResolver.*SimpleClusterResolver"):
        getattr(cluster_resolver, name)(project="p")
