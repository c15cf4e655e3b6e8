"""``python -m mpidist doctor`` on virtual hosts: a healthy job, a wrong launcher, dead links, and little /dev/shm."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cluster.jobs import SRUN_SETTINGS
from tests.cluster.lab import Lab
from tests.support.ranks.jobs import child_environment, mpirun_command

pytestmark = pytest.mark.cluster

SECONDS = "3"
NOBODY = "02:00:00:00:00:99"


def doctor(
    lab: Lab, hosts: int, ranks_per_host: int, *arguments: str, by: str = "mpirun", fence: str = "ring"
) -> subprocess.CompletedProcess[str]:
    """Run doctor on ranks of the first hosts, by mpirun or by srun with a ``--mpi``."""
    env = child_environment({"OMPI_MCA_mpi_yield_when_idle": "1", **SRUN_SETTINGS, "SLURM_PMIX_FENCE": fence})
    names = ",".join(f"node{host}" for host in range(hosts))
    place = [f"--nodelist={names}", f"--nodes={hosts}", f"--ntasks-per-node={ranks_per_host}"]
    if by == "mpirun":
        start = ["salloc", "--quiet", *place, *mpirun_command(), "--map-by", "slot:nooversubscribe"]
    else:
        start = ["srun", f"--mpi={by}", *place]
    command = [*start, sys.executable, "-m", "mpidist", "doctor", "--deadline", SECONDS, *arguments]
    return lab.run("login", command, env=env, timeout=90.0)


@contextmanager
def no_way(lab: Lab, *pairs: tuple[int, int]) -> Iterator[None]:
    """Lose what the hosts of each pair send each other, while both still reach all other hosts."""
    ways = [way for one, other in pairs for way in ((one, other), (other, one))]
    try:
        for here, there in ways:
            address = lab.settings.address(f"node{there}")
            neighbour = ["ip", "neigh", "replace", address, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent"]
            assert lab.run(f"node{here}", neighbour).returncode == 0
        yield
    finally:
        for here, there in ways:
            lab.run(f"node{here}", ["ip", "neigh", "del", lab.settings.address(f"node{there}"), "dev", "eth0"])
        lab.wait_until_idle()


def found(document: dict[str, Any], subject: str) -> list[tuple[str, str]]:
    return [(one["text"], one["command"]) for one in document["findings"] if one["subject"] == subject]


def hosts_of(document: dict[str, Any]) -> list[str]:
    return [facts["host"] for facts in document["ranks"]]


@pytest.mark.parametrize("by", ["mpirun", "pmix"])
def test_two_hosts_that_are_well(lab: Lab, by: str) -> None:
    done = doctor(lab, 2, 2, "--json", by=by)
    document = json.loads(done.stdout)
    assert hosts_of(document) == ["node0", "node0", "node1", "node1"], done.stderr
    assert document["reach"]["failed"] == []
    assert document["collectives"]["node_of_rank"] == [0, 0, 1, 1]
    assert document["in_use"] == {"node0": ["eth0"], "node1": ["eth0"]}
    assert sorted((link["ranks"], link["between_nodes"]) for link in document["links"]) == [
        ([0, 1], False),
        ([0, 2], True),
        ([2, 3], False),
    ]
    # The hosts' cores are those of this machine, which may have one only.
    assert {finding["subject"] for finding in document["findings"]} <= {"cores"}
    assert done.returncode == (1 if document["findings"] else 0)


def test_barriers_that_hold_one_host_only(lab: Lab) -> None:
    # Two hosts might crash by them, which is what doctor warns of. On one host they do no harm.
    done = doctor(lab, 1, 2, "--json", by="pmix", fence="mixed")
    assert found(json.loads(done.stdout), "start") == []
    assert [facts["loose_barriers"] for facts in json.loads(done.stdout)["ranks"]] == [True, True]


def test_srun_without_pmix_makes_worlds_of_one_rank(lab: Lab) -> None:
    done = doctor(lab, 2, 1, by="none")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ERROR world: srun started 2 ranks (SLURM_STEP_NUM_TASKS=2), but the MPI world of")
    assert lines[-1] == "    type: srun --mpi=pmix -n 2 python train.py"
    assert len(lines) <= 6
    assert done.stderr.count("mpidist doctor: rank 1 on node1: srun started 2 ranks") == 1


def test_no_way_between_two_of_three_hosts(lab: Lab) -> None:
    with no_way(lab, (1, 2)):
        done = doctor(lab, 3, 2, "--json")
    document = json.loads(done.stdout)
    assert done.returncode != 0
    assert document["reach"]["failed"] == [[2, 4], [2, 5], [3, 4], [3, 5]]
    ((text, command),) = found(document, "reach")
    assert (
        text == "Rank 2 on node1 and rank 4 on node2 and 3 more pairs of these hosts exchanged no message within 3 s."
    )
    assert command.startswith(f"ping -c 3 {lab.settings.address('node2')}   # on node1")


def test_no_way_between_two_hosts(lab: Lab) -> None:
    with no_way(lab, (0, 1)):
        done = doctor(lab, 2, 2, "--json")
    document = json.loads(done.stdout)
    assert done.returncode != 0
    assert document["ranks"][2:] == [None, None]
    ((text, command),) = found(document, "reach")
    assert text == "No rank heard from ranks 2-3 on node1 within 3 s. Rank 0 is on node0."
    assert command.startswith("ping -c 3 node1   # on node0")


def test_srun_where_mpi_does_not_start(lab: Lab) -> None:
    with no_way(lab, (0, 1)):
        done = doctor(lab, 2, 1, "--deadline", "0.3", by="pmix")
    assert done.returncode != 0
    assert done.stdout == ""
    assert "mpidist doctor: MPI does not start in rank 0 (srun) on node0: MPI_Init does not return" in done.stderr


def test_a_host_that_refuses_connections(lab: Lab) -> None:
    route: Sequence[str] = ("prohibit", lab.settings.address("node1"))
    assert lab.run("node0", ["ip", "route", "add", *route]).returncode == 0
    try:
        done = doctor(lab, 2, 1)
    finally:
        lab.run("node0", ["ip", "route", "del", *route])
    assert done.returncode != 0
    # Either MPI ends the rank that cannot connect, or the rank that is not connected to says so.
    assert "was ended while it exchanged first messages" in done.stderr or "exchanged no message" in done.stdout


def test_little_shared_memory(lab: Lab) -> None:
    try:
        for host in ("node0", "node1"):
            assert lab.run(host, ["mount", "-o", "remount,size=1m", "/dev/shm"]).returncode == 0
        done = doctor(lab, 2, 2, "--json")
    finally:
        for host in ("node0", "node1"):
            lab.run(host, ["mount", "-o", "remount,size=50%", "/dev/shm"])
    document = json.loads(done.stdout)
    assert done.returncode != 0
    ((text, command),) = found(document, "/dev/shm")
    assert "free on node0 and node1, less than 256 MiB" in text
    assert command.startswith("mount -o remount,size=8g /dev/shm")


def test_gpus_that_slurm_hands_out_and_that_are_not_there(lab: Lab) -> None:
    command = [sys.executable, "-m", "mpidist", "doctor", "--json"]
    done = lab.run("login", ["srun", "--nodelist=node0", "--gpus-per-task=1", "-n1", *command], env=child_environment())
    ((text, command_to_type),) = found(json.loads(done.stdout), "GPU")
    assert text == "Rank 0 has CUDA_VISIBLE_DEVICES=0, but node0 has no NVIDIA driver."
    assert command_to_type == "nvidia-smi   # on node0"


# Stops a process most of the time, as cpulimit does.
LIMIT = """
import os, signal, sys, time
while True:
    for number, seconds in ((signal.SIGSTOP, 0.08), (signal.SIGCONT, 0.02)):
        os.kill(int(sys.argv[1]), number)
        time.sleep(seconds)
"""


def test_burn_names_a_slow_node(lab: Lab) -> None:
    limit = lab.scratch / "limit.py"
    limit.write_text(LIMIT)
    slow = f'[ "$(hostname)" = node1 ] && {sys.executable} {limit} $$ 2>/dev/null &'
    script = lab.scratch / "burn.sh"
    script.write_text(f"{slow}\nexec {sys.executable} -m mpidist doctor --json --burn 8 --folder {lab.scratch}\n")
    start = ["salloc", "--quiet", "--nodelist=node0,node1", "--nodes=2", "--ntasks-per-node=1", *mpirun_command()]
    env = child_environment({"OMPI_MCA_mpi_yield_when_idle": "1"})
    done = lab.run("login", [*start, "--map-by", "slot:nooversubscribe", "sh", str(script)], env=env, timeout=90.0)
    burned = found(json.loads(done.stdout), "burn")
    assert done.returncode != 0
    assert any("in product: " in text and " node1 by " in text for text, _ in burned), burned
    assert all(command.startswith("--exclude=node") for _, command in burned)
