"""What doctor gathers: facts of the machine from files of the kernel, who exchanges messages with whom, the watch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpidist.cli.doctor_facts import machine, timed_messages
from mpidist.cli.doctor_facts.facts import GpuFacts, Interface
from mpidist.cli.doctor_facts.machine import hosts_of_job, nccl_net
from mpidist.cli.doctor_facts.timed_messages import (
    Heard,
    first_partners,
    merged,
    pairs_inside,
    partners_on_nodes,
    rounds_between,
)
from mpidist.collectives.gpu import probes
from tests.cli import doctor_jobs as made
from tests.support.ranks.jobs import ROOT
from tests.support.speed import scaled

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


# Who with whom --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 128, 129, 500])
def test_first_partners_are_mutual_and_make_a_ring(size: int) -> None:
    partners = [first_partners(one, size) for one in range(size)]
    for one in range(size):
        assert (one + 1) % size in partners[one]
        assert all(one in partners[other] for other in partners[one])
    assert len(partners[0]) == size - 1
    if size <= timed_messages.ALL_PAIRS_RANKS:
        assert all(len(others) == size - 1 for others in partners)


@pytest.mark.parametrize("per_machine", [[1, 1], [2, 2, 2], [4, 1, 3, 2], [3] * 9])
def test_every_pair_of_machines_meets_once(per_machine: list[int]) -> None:
    machines, next_rank = [], 0
    for count in per_machine:
        machines.append(list(range(next_rank, next_rank + count)))
        next_rank += count
    partners = [partners_on_nodes(one, machines) for one in range(next_rank)]
    machine_of = {one: number for number, ranks in enumerate(machines) for one in ranks}
    met = []
    for one in range(next_rank):
        assert all(one in partners[other] for other in partners[one])
        met += [(machine_of[one], machine_of[other]) for other in partners[one]]
    assert sorted(met) == [(a, b) for a in range(len(machines)) for b in range(len(machines)) if a != b]


def test_what_ranks_heard_is_put_together() -> None:
    reports = {
        0: Heard((1, 2, 3), {1: "a", 2: "b"}),
        1: Heard((0, 2, 3), {0: "a"}),
        2: Heard((0, 1, 3), {0: "a", 1: "a", 3: "c"}),
    }
    found = merged(4, 5.0, reports, "a")
    # Rank 2 heard rank 1 and was not heard by it; nobody knows of ranks 3 and 0, but rank 2 heard of rank 3's host.
    assert found.failed == ((0, 3), (1, 2), (1, 3))
    assert found.hosts == {0: "a", 1: "a", 2: "b", 3: "c"}
    assert (found.tested, found.silent, found.ring) == (6, (3,), [(0, 1), (0, 3), (1, 2), (2, 3)])


def test_the_ring_leaves_out_what_nobody_could_be_asked_about() -> None:
    assert made.reach(4, [], {}, silent=(2, 3)).ring == [(0, 1), (0, 3), (1, 2)]
    assert made.reach(2, [], {}).ring == [(0, 1)]


@pytest.mark.parametrize("count", range(1, 8))
def test_rounds_of_links(count: int) -> None:
    nodes = [[2 * node, 2 * node + 1] for node in range(count)]
    rounds = rounds_between(nodes)
    for pairs in rounds:
        members = [one for pair in pairs for one in pair]
        assert len(members) == len(set(members))
    hops = sorted(pair for pairs in rounds for pair in pairs)
    assert len(hops) == len(set(hops)) == {1: 0, 2: 1}.get(count, count)
    assert pairs_inside(nodes) == [(2 * node, 2 * node + 1) for node in range(count)]


# The watch ------------------------------------------------------------------------------------------------------------

WATCHED = """
import os, signal, time
from mpidist.cli.doctor_facts.watchdog import Ending, Watchdog
NOTHING = Ending("", "")
with Watchdog({document}) as watch:
    watch.stage({seconds}, Ending("takes too long", "look"), Ending("was ended", "look again"))
    {then}
print("went on")
"""


def watched(seconds: float, then: str, document: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WATCHED.format(seconds=seconds, then=then, document=document)]
    # As under a launcher, whose signals go to the whole group of a rank.
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=scaled(60), check=False, start_new_session=True
    )


@pytest.mark.jobs
def test_a_stage_that_takes_too_long_ends_the_process() -> None:
    done = watched(0.1, "time.sleep(50)")
    assert (done.returncode, done.stdout, done.stderr) == (-9, "", "mpidist doctor: takes too long. Type: look\n")


@pytest.mark.jobs
def test_a_process_that_is_ended_in_a_stage() -> None:
    done = watched(50, "os.kill(os.getpid(), signal.SIGKILL)")
    assert (done.returncode, done.stdout, done.stderr) == (-9, "", "mpidist doctor: was ended. Type: look again\n")


@pytest.mark.jobs
@pytest.mark.parametrize("then", ["watch.idle()", "watch.stage(50, NOTHING, NOTHING); watch.idle()", "pass"])
def test_nothing_is_said_of_what_goes_well(then: str) -> None:
    done = watched(50, then)
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


ONE_DOCUMENT = "lambda ending: ending.text"


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("seconds", "then", "status", "out"),
    [
        (0.1, "time.sleep(50)", -9, "takes too long\n"),
        (50, "os.kill(os.getpid(), signal.SIGKILL)", -9, "was ended\n"),
        (50, "os.kill(0, signal.SIGTERM)", -15, "was ended\n"),
        (50, "watch.idle(); os.kill(os.getpid(), signal.SIGKILL)", -9, "the process of rank 0 was ended before"),
        (50, "watch.reports(); print('the report', flush=True); os.kill(os.getpid(), 9)", -9, "the report\n"),
        (50, "watch.reports(); watch.stage(50, NOTHING, NOTHING); watch.idle()", 0, "went on\n"),
    ],
)
def test_a_process_that_owes_a_document(seconds: float, then: str, status: int, out: str) -> None:
    done = watched(seconds, then, ONE_DOCUMENT)
    assert done.returncode == status
    assert done.stdout.startswith(out)
    assert done.stdout.count("\n") == 1
