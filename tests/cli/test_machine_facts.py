"""The facts of doctor: of the machine from files of the kernel, and of pairs of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mpidist.cli.doctor import machine
from mpidist.cli.doctor.facts import GpuFacts, Interface
from mpidist.cli.doctor.gather import rounds_between
from mpidist.cli.doctor.machine import hosts_of_job, nccl_net
from mpidist.cli.doctor.pairs import ALL_PAIRS_RANKS, PairReport, first_partners, leader_partners, merged
from mpidist.collectives.gpu import probes
from tests.cli import doctor_jobs as made

pytestmark = pytest.mark.one_rank


def write(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")


# The machine ----------------------------------------------------------------------------------------------------------


def test_interfaces_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = "infiniband/mlx5_0/ports/1"
    write(
        tmp_path,
        {
            "net/lo/operstate": "unknown",
            "net/eth7/operstate": "up",
            "net/eth7/speed": "25000",
            "net/eth8/operstate": "down",
            "net/tun9/operstate": "unknown",
            "net/tun9/speed": "-1",
            f"{ports}/state": "4: ACTIVE",
            f"{ports}/rate": "200 Gb/sec (4X HDR)",
            "infiniband/mlx5_1/ports/1/state": "1: DOWN",
        },
    )
    monkeypatch.setattr(machine, "_NETWORK", tmp_path / "net")
    monkeypatch.setattr(machine, "_INFINIBAND", tmp_path / "infiniband")
    assert machine.interfaces() == (
        Interface("eth7", "", 25000),
        Interface("tun9", "", None),
        Interface("mlx5_0", "", 200000, is_infiniband=True),
    )


def test_the_address_of_a_real_interface() -> None:
    assert machine._network_of("lo") == "127.0.0.1/8"
    assert machine._network_of("there is none") == ""


def test_traffic_counts_both_ways_and_words_of_infiniband(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = "infiniband/mlx5_0/ports/1"
    write(
        tmp_path,
        {
            "net/eth7/statistics/rx_bytes": "10",
            "net/eth7/statistics/tx_bytes": "5",
            "net/lo/statistics/rx_bytes": "1000",
            f"{port}/state": "4: ACTIVE",
            f"{port}/counters/port_rcv_data": "100",
            f"{port}/counters/port_xmit_data": "1",
        },
    )
    monkeypatch.setattr(machine, "_NETWORK", tmp_path / "net")
    monkeypatch.setattr(machine, "_INFINIBAND", tmp_path / "infiniband")
    assert machine.traffic() == {"eth7": 15, "mlx5_0": 404}


def test_cores_and_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in machine.THREAD_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    found = machine.cores()
    assert set(found.allowed) == os.sched_getaffinity(0)
    assert found.thread_settings == {"OPENBLAS_NUM_THREADS": "3"}


def test_shared_memory_is_that_of_the_file_system() -> None:
    found = machine.shared_memory()
    assert found is not None
    assert 0 <= found.free <= found.total == os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize


def test_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus_may_be_present", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert machine.gpus() == GpuFacts(variable="1")


@pytest.mark.parametrize("fake_gpus", [{"devices": 2}, {"devices": 2, "nccl": False}], indirect=True)
def test_a_machine_with_gpus(fake_gpus: Any) -> None:
    found = machine.gpus()
    assert (found.has_driver, len(found.visible), len(found.names), found.problem) == (True, 2, 2, "")
    assert bool(found.nccl) is not bool(found.nccl_problem)


def test_the_cores_next_to_a_gpu(fake_gpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PCI", tmp_path)
    folder = tmp_path / fake_gpus.cuda.Device(1).pci_bus_id.lower()
    folder.mkdir()
    (folder / "local_cpulist").write_text("0-1,4\n")
    assert machine.gpus().cores == ((), (0, 1, 4))


PLUGIN, VERBS = "libnccl-net.so", "libibverbs.so.1"


@pytest.mark.parametrize(
    ("devices", "libraries", "environ", "name", "lacks", "command"),
    [
        ({}, (), {}, "TCP sockets", "", ""),
        ({"mlx5_0": "InfiniBand"}, (VERBS,), {}, "mlx5_0", "", ""),
        ({"mlx5_0": "Ethernet"}, (VERBS, PLUGIN), {}, "mlx5_0", "", ""),
        ({"cxi0": ""}, (PLUGIN,), {}, f"cxi0 by {PLUGIN}", "", ""),
        ({"mlx5_0": "Ethernet"}, (VERBS, PLUGIN), {"NCCL_NET_PLUGIN": "none"}, "mlx5_0", "", ""),
        ({"mlx5_0": "Ethernet"}, (VERBS, PLUGIN), {"NCCL_NET": "IB"}, "mlx5_0", "", ""),
        ({}, ("libnccl-net-ofi.so",), {"NCCL_NET_PLUGIN": "x,ofi"}, "plugin libnccl-net-ofi.so", "", ""),
        ({}, (), {"NCCL_NET": "AWS Libfabric"}, "", "", ""),
        ({"mlx5_0": "InfiniBand"}, (), {}, "TCP sockets", f"mlx5_0 is there, and {VERBS} does not", "libibverbs1"),
        (
            *({"mlx5_0": "InfiniBand"}, (VERBS,), {"NCCL_IB_DISABLE": "1"}),
            *("TCP sockets", "mlx5_0 is there, and NCCL_IB_DISABLE=1", "unset NCCL_IB_DISABLE"),
        ),
        (
            *({"mlx5_0": "InfiniBand"}, (VERBS, PLUGIN), {"NCCL_NET": "Socket"}),
            *("TCP sockets", "mlx5_0 is there, and NCCL_NET=Socket", "unset NCCL_NET"),
        ),
        ({"cxi0": ""}, (VERBS,), {}, "TCP sockets", "cxi0 is there, for which NCCL needs a plugin", "aws-ofi-nccl"),
        ({"efa_0": "Unspecified"}, (VERBS,), {}, "TCP sockets", "efa_0 is there, for which NCCL", "aws-ofi-nccl"),
    ],
)
def test_the_network_of_nccl(
    devices: dict[str, str],
    libraries: tuple[str, ...],
    environ: dict[str, str],
    name: str,
    lacks: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IB_DISABLE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(probes, "_SYS", tmp_path)
    monkeypatch.setattr(probes, "_VERBS_DEVICES", tmp_path)
    monkeypatch.setattr(probes, "_FILES", ())
    monkeypatch.setattr(probes, "_loads", libraries.__contains__)
    (tmp_path / "uverbs0").touch()
    for device, layer in devices.items():
        folder = tmp_path / "class" / ("infiniband" if layer else "cxi") / device / "ports" / "1"
        folder.mkdir(parents=True)
        (folder / "state").write_text("4: ACTIVE\n")
        (folder / "link_layer").write_text(f"{layer}\n")
    net = nccl_net()
    assert net.name == name
    assert net.lacks.startswith(lacks)
    assert command in net.command
    assert bool(net.lacks) is bool(lacks)
    (tmp_path / "uverbs0").unlink()
    if net.name == "mlx5_0" and probes.net_plugin() is None:
        assert "may not open" in nccl_net().lacks


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ()),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[08-09],m1"}, ("n08", "n09", "m1")),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[08-"}, ()),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "n1 4 n2 8"}, ("n1", "n2")),
        ({"PBS_JOBID": "7", "PBS_NODEFILE": "there is none"}, ()),
    ],
)
def test_hosts_of_the_job(environ: dict[str, str], expected: tuple[str, ...]) -> None:
    assert hosts_of_job(environ) == expected


def test_hosts_of_a_pbs_job(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("n1\nn1\nn2\n")
    assert hosts_of_job({"PBS_JOBID": "7", "PBS_NODEFILE": str(tmp_path / "nodes")}) == ("n1", "n2")


# Pairs of ranks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 128, 129, 500])
def test_first_partners_are_mutual_and_make_a_ring(size: int) -> None:
    partners = [first_partners(one, size) for one in range(size)]
    for one in range(size):
        assert (one + 1) % size in partners[one]
        assert all(one in partners[other] for other in partners[one])
    assert len(partners[0]) == size - 1
    if size <= ALL_PAIRS_RANKS:
        assert all(len(others) == size - 1 for others in partners)


@pytest.mark.parametrize("machines", ["ab", "aabbcc", "aaaabcccdd", "abab"])
def test_every_pair_of_machines_meets_once(machines: str) -> None:
    partners = [leader_partners(one, list(machines)) for one in range(len(machines))]
    met = [(machines[one], machines[other]) for one, others in enumerate(partners) for other in others]
    assert sorted(met) == sorted((a, b) for a in set(machines) for b in set(machines) if a != b)


def test_reports_are_merged() -> None:
    reports = {
        0: PairReport(made.rank_facts(0, 4, "a0"), [1, 2, 3], {1: "a", 2: "b"}),
        1: PairReport(made.rank_facts(1, 4, "a0"), [0, 2, 3], {0: "a0"}),
        2: PairReport(made.rank_facts(2, 4, "b0"), [0, 1, 3], {0: "a0", 1: "a", 3: "c"}),
    }
    found = merged(4, 5.0, reports)
    # Rank 2 heard rank 1 and was not heard by it. Rank 3 sent no report, but rank 2 heard its host.
    assert found.failed == ((0, 3), (1, 2), (1, 3))
    assert found.hosts == {0: "a0", 1: "a", 2: "b", 3: "c"}
    assert (found.tested, found.silent, found.ring) == (6, (3,), [(0, 1), (0, 3), (1, 2), (2, 3)])


def test_the_ring_leaves_out_pairs_of_silent_ranks() -> None:
    assert made.reach(4, [], {}, silent=(2, 3)).ring == [(0, 1), (0, 3), (1, 2)]
    assert made.reach(2, [], {}).ring == [(0, 1)]


@pytest.mark.parametrize("count", range(1, 8))
def test_rounds_of_links(count: int) -> None:
    rounds = rounds_between([[2 * node, 2 * node + 1] for node in range(count)])
    for pairs in rounds:
        members = [one for pair in pairs for one in pair]
        assert len(members) == len(set(members))
    hops = [pair for pairs in rounds for pair in pairs]
    assert len(hops) == len(set(hops)) == {1: 0, 2: 1}.get(count, count)
