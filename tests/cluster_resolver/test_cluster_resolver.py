"""The abstract resolver: what a class derived from it gets."""

from __future__ import annotations

import pytest

from mpidist.cluster_resolver import ClusterResolver, ClusterSpec
from mpidist.cluster_resolver.cluster_resolver import format_master_url
from mpidist.topology.topology import visible_devices

pytestmark = pytest.mark.one_rank


class OneHost(ClusterResolver):
    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec({"worker": ["localhost:1"]})

    def master(self, task_type=None, task_id=None, rpc_layer=None) -> str:
        return format_master_url("localhost:1", rpc_layer or self.rpc_layer)


def test_it_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        ClusterResolver()  # type: ignore[abstract]


def test_what_is_not_known_is_none_and_can_be_set() -> None:
    resolver = OneHost()
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert resolver.environment == ""
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 0, "grpc"
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.master() == "grpc://localhost:1"
    assert resolver.master(rpc_layer="mpi") == "mpi://localhost:1"
    assert (OneHost().task_type, OneHost().rpc_layer) == (None, None)


def test_accelerators_are_those_of_this_process() -> None:
    resolver = OneHost()
    resolver.task_type, resolver.task_id = "worker", 0
    here = {"GPU": len(visible_devices())} if visible_devices() else {}
    assert resolver.num_accelerators() == here
    assert resolver.num_accelerators("worker", 0) == here
    assert resolver.num_accelerators("worker", 1) == {}
    assert resolver.num_accelerators("ps") == {}
