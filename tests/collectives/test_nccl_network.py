"""Which network NCCL takes between nodes, and which way arrays on GPUs take there."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpidist import Communicator
from mpidist.collectives.gpu import probes
from mpidist.collectives.gpu.probes import Fabric, rdma_fabric
from mpidist.collectives.reduce.registry import SHIPPED
from mpidist.topology import world_topology
from tests.support.fake_cupy import nccl as fake_nccl

VARIABLES = ("NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IB_DISABLE", "MPIDIST_STAGING_BYTES")
INFINIBAND = ("mlx5_0", "4: ACTIVE", "InfiniBand", "400 Gb/sec (4X NDR)")
ROCE = ("mlx5_1", "4: ACTIVE", "Ethernet", "100 Gb/sec (4X EDR)")
DOWN = ("mlx5_2", "1: DOWN", "InfiniBand", "10 Gb/sec (4X SDR)")
EFA = ("rdmap0s6", "4: ACTIVE", "Unknown", "100 Gb/sec (4X EDR)")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a network for RDMA, and with all libraries."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(probes, "_SYS", tmp_path)
    monkeypatch.setattr(probes, "_VERBS_DEVICES", tmp_path)
    monkeypatch.setattr(probes, "_FILES", (tmp_path / "nccl.conf",))
    monkeypatch.setattr(probes, "_loads", lambda _: True)
    (tmp_path / "uverbs0").touch()
    return tmp_path


def add(machine: Path, *ports: tuple[str, str, str, str]) -> None:
    for name, *facts in ports:
        folder = machine / "class" / "infiniband" / name / "ports" / "1"
        folder.mkdir(parents=True)
        for file, content in zip(("state", "link_layer", "rate"), facts, strict=True):
            (folder / file).write_text(content + "\n")


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("ports", "environment", "expected"),
    [
        ((), {}, None),
        ((INFINIBAND,), {}, Fabric("mlx5_0", 400.0)),
        ((DOWN, ROCE), {}, Fabric("mlx5_1", 100.0)),
        ((DOWN,), {}, None),
        ((INFINIBAND,), {"NCCL_NET": "Socket"}, None),
        ((INFINIBAND,), {"NCCL_NET": "IB"}, Fabric("mlx5_0", 400.0)),
        ((INFINIBAND,), {"NCCL_NET": "AWS Libfabric"}, None),
        ((INFINIBAND,), {"NCCL_IB_DISABLE": "1"}, None),
        ((INFINIBAND,), {"NCCL_IB_DISABLE": "0"}, Fabric("mlx5_0", 400.0)),
        ((EFA,), {}, Fabric("rdmap0s6 by libnccl-net.so", 100.0)),
        ((EFA,), {"NCCL_NET_PLUGIN": "none"}, None),
        ((EFA,), {"NCCL_NET_PLUGIN": "/opt/lib/ofi.so"}, Fabric("rdmap0s6 by /opt/lib/ofi.so", 100.0)),
    ],
)
def test_what_nccl_takes(
    machine: Path, monkeypatch: pytest.MonkeyPatch, ports: Any, environment: dict[str, str], expected: Fabric | None
) -> None:
    add(machine, *ports)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert rdma_fabric() == expected


@pytest.mark.one_rank
def test_slingshot_without_its_plugin_is_reached_by_sockets(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "class" / "cxi" / "cxi0").mkdir(parents=True)
    assert rdma_fabric() == Fabric("cxi0 by libnccl-net.so", 200.0)
    monkeypatch.setenv("NCCL_NET_PLUGIN", "ofi")
    monkeypatch.setattr(probes, "_loads", lambda name: name == "libnccl-net-ofi.so")
    assert rdma_fabric() == Fabric("cxi0 by libnccl-net-ofi.so", 200.0)
    monkeypatch.setattr(probes, "_loads", lambda _: False)
    assert rdma_fabric() is None


@pytest.mark.one_rank
@pytest.mark.parametrize("lacks", ["device", "library", "leave"])
def test_infiniband_that_a_process_may_not_use(machine: Path, monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    add(machine, INFINIBAND)
    if lacks == "device":
        (machine / "uverbs0").unlink()
    elif lacks == "library":
        monkeypatch.setattr(probes, "_loads", lambda _: False)
    else:
        (machine / "nccl.conf").write_text("# of this cluster\nNCCL_IB_DISABLE=1\n")
    assert rdma_fabric() is None


@pytest.mark.one_rank
def test_chunks_are_larger_on_fast_networks(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes.staging_bytes() == 4 << 20
    add(machine, ROCE)
    assert probes.staging_bytes() == 8 << 20
    add(machine, INFINIBAND)
    assert probes.staging_bytes() == 16 << 20
    monkeypatch.setenv("MPIDIST_STAGING_BYTES", "65536")
    assert probes.staging_bytes() == 65536


# What follows from it ----------------------------------------------------------------------------------------------


@pytest.fixture
def cupy(fake_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Each rank is a node with a GPU of its own."""
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "1")
    with fake_gpus.cuda.Device(world_topology().rank):
        yield fake_gpus


def algorithm(comm: Communicator, cupy: Any) -> str:
    """Return what a reduction takes, whose result is right."""
    assert (comm.all_reduce("SUM", cupy.full(1000, 2, "f4")).get() == 2 * comm.size).all()
    return comm.last_algorithm


def have(monkeypatch: pytest.MonkeyPatch, has_rdma: bool) -> None:
    monkeypatch.setattr(probes, "rdma_fabric", lambda: Fabric("mlx5_0", 400.0) if has_rdma else None)


def on_nodes(test: Any) -> Any:
    gpus = pytest.mark.parametrize("fake_gpus", [{"devices": 6}], indirect=True)
    return pytest.mark.nodes(pytest.mark.min_ranks(2)(gpus(test)))


@on_nodes
@pytest.mark.parametrize(("with_rdma", "expected"), [("all", "nccl"), ("some", "hierarchical")])
def test_the_network_decides_between_nodes(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, with_rdma: str, expected: str
) -> None:
    have(monkeypatch, with_rdma == "all" or world_topology().rank == 0)
    with Communicator() as comm:
        assert algorithm(comm, cupy) == expected


@on_nodes
def test_a_table_of_the_user_has_the_last_word(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, True)
    with Communicator(table=SHIPPED._replace(several_nodes_gpu=((None, "hierarchical"),))) as comm:
        assert algorithm(comm, cupy) == "hierarchical"


@on_nodes
def test_where_nccl_does_not_start_over_all_nodes_it_stays_in_each(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise fake_nccl.NcclError(2)

    have(monkeypatch, True)
    caplog.set_level(logging.WARNING, "mpidist")
    monkeypatch.setattr(fake_nccl, "NcclCommunicator", fail)
    with Communicator() as comm:
        assert algorithm(comm, cupy) == "hierarchical"
    assert ("Arrays on GPUs are reduced by 'hierarchical' instead" in caplog.text) == (world_topology().rank == 0)
