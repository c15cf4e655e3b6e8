"""All-reduces of real jobs on four hosts: results, bytes on the wire, errors, and hosts with little /dev/shm."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from benchmarks.measuring.wire import least_bytes
from tests.cluster.jobs import PLACEMENTS, launch
from tests.cluster.lab import Lab

pytestmark = pytest.mark.cluster

# One element, less and more than the ranks, one that does not divide, and several chunks.
SIZES = "1,3,1000,65537,1048579"
DTYPES = "float32,float64,float16,int32,int64"
MIB = 1 << 20


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("by", ["mpirun", "srun"])
def test_results_in_every_placement(lab: Lab, by: str, placement: str) -> None:
    results = launch(lab, "all_reduce", SIZES, DTYPES, "SUM,MAX,MEAN", by=by, placement=placement)
    places = PLACEMENTS[placement]
    assert [result["host"] for result in results] == [f"node{host}" for host in places.hosts]
    for rank, result in enumerate(results):
        assert result["node_of_rank"] == places.node_of_rank()
        assert result["wrong"] == [], f"rank {rank}"
        assert result["digests"] == results[0]["digests"], f"bits of rank {rank} differ from those of rank 0"


def test_a_mismatch_between_hosts_is_an_error_on_all_ranks(lab: Lab) -> None:
    results = launch(lab, "mismatch", 5)
    for rank, result in enumerate(results):
        assert result["error"] == "MismatchError", f"rank {rank}: {result}"
        assert re.search(r"1000\b.*\b1001|1001\b.*\b1000", result["text"], re.DOTALL), f"rank {rank}: {result}"
        assert result["after"] == len(results)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_bytes_on_the_wire(lab: Lab, placement: str, capsys: pytest.CaptureFixture[str]) -> None:
    results = launch(lab, "sent", 64, "eth0", placement=placement)
    assert [result["wrong"] for result in results] == [0] * len(results)
    least = least_bytes(lab.settings.hosts, 64 * MIB)
    nodes = dict(zip(PLACEMENTS[placement].hosts, results, strict=True))
    with capsys.disabled():
        told = ", ".join(f"node{node} {found['data'] / MIB:.2f}" for node, found in sorted(nodes.items()))
        print(f"\n64 MiB, {placement}, {results[0]['algorithm']}: MiB of data sent: {told}; least {least / MIB:g}")
    most = max(found["data"] for found in nodes.values())
    # Less than the least says that the counters count something else.
    assert least * 0.99 < most < least * 1.02


@pytest.fixture
def small_shm(lab: Lab, request: pytest.FixtureRequest) -> Iterator[int]:
    """Hosts whose /dev/shm holds as many MiB as the parameter says."""

    def resize(size: str) -> None:
        for host in lab.settings.compute_hosts:
            done = lab.run(host, ["mount", "-o", f"remount,size={size}", "/dev/shm"])
            assert done.returncode == 0, done.stderr

    resize(f"{request.param}m")
    yield request.param
    resize("50%")


@pytest.mark.parametrize("small_shm", [64, 1], indirect=True)
@pytest.mark.parametrize("placement", ["block", "round-robin"])
def test_hosts_with_little_shared_memory(lab: Lab, small_shm: int, placement: str) -> None:
    results = launch(lab, "all_reduce", f"1000,{4 * MIB}", "float32", "SUM", placement=placement)
    assert [result["wrong"] for result in results] == [[]] * len(results)
