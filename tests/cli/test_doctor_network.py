"""Doctor's checks of networks, links and who reaches whom, on made-up facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mpidist.cli.doctor_checks.network import check_links, check_network, check_reach
from mpidist.cli.doctor_facts.facts import Interface, JobFacts, LinkSpeed
from tests.cli import doctor_jobs as made
from tests.cli.doctor_jobs import TWO_HOSTS, job, only

pytestmark = pytest.mark.one_rank

# network and links ----------------------------------------------------------------------------------------------------

INFINIBAND = (Interface("eth0", "10.0.0.1/24"), Interface("mlx5_0", is_infiniband=True))


@pytest.mark.parametrize(
    ("vendor", "command"), [("Open MPI", "export OMPI_MCA_pml=ucx"), ("Intel MPI", "FI_PROVIDER=mlx"), ("MPICH", "UCX")]
)
def test_ethernet_where_there_is_infiniband(vendor: str, command: str) -> None:
    made_so = job({}, {}, hosts=["node0", "node1"], interfaces=INFINIBAND, vendor=vendor)
    found = check_network(replace(made_so, in_use={"node1": ("eth0",)}))
    only(found, "warning", "take eth0 although InfiniBand (mlx5_0) is active on node1", command)
    assert check_network(replace(made_so, in_use={"node1": ("mlx5_0",)})) == []


def test_one_slow_link() -> None:
    def link(one: int, speed: float) -> LinkSpeed:
        return LinkSpeed((one, one + 1), (f"node{one}", f"node{one + 1}"), True, 1e-5, speed)

    hosts = [f"node{rank}" for rank in range(4)]
    slow = replace(job({}, {}, {}, {}, hosts=hosts), links=(link(0, 1e9), link(1, 1e8), link(2, 1.1e9)))
    only(check_links(slow), "warning", "between node1 and node2 carries 100 MB/s, others 1000 MB/s", "ip -s link   #")
    assert check_links(replace(slow, links=(link(0, 1e9), link(1, 8e8), link(2, 1.1e9)))) == []
    assert check_links(replace(slow, links=(link(0, 1e9), link(1, 1e8)))) == []


@pytest.mark.parametrize(
    ("in_use", "command"),
    [
        ({}, "ip -s link   # on node1 and on node2"),
        (
            {"node1": ("ens5",), "node2": ("ens5",)},
            "ethtool ens5; ip -s link show ens5   # on node1 and on node2",
        ),
        (
            {"node1": ("mlx5_0",), "node2": ("ib0",)},
            "ibstat mlx5_0   # on node1; on node2: ethtool ib0; ip -s link show ib0",
        ),
    ],
)
@pytest.mark.parametrize("system", [None, "Slurm", "PBS"])
def test_what_shows_a_slow_link(system: str | None, in_use: dict[str, tuple[str, ...]], command: str) -> None:
    hosts = [f"node{rank}" for rank in range(4)]
    speeds = {(0, 1): 1e9, (1, 2): 1e8, (2, 3): 1.1e9}
    measured = tuple(
        LinkSpeed(ranks, (hosts[ranks[0]], hosts[ranks[1]]), True, 1e-5, speed) for ranks, speed in speeds.items()
    )
    slow = job({}, {}, {}, {}, hosts=hosts, interfaces=INFINIBAND, batch_system=system)
    (found,) = check_links(replace(slow, links=measured, in_use=in_use))
    without = "; or run without one of them: sbatch --exclude=node2 job.sbatch" if system == "Slurm" else ""
    assert found.command == command + without


# reach ----------------------------------------------------------------------------------------------------------------


def unreached(*failed: tuple[int, int], silent: tuple[int, ...] = (), **changes: Any) -> JobFacts:
    """Two ranks on each of two hosts, of which some could not be asked."""
    made_so = job({}, {}, {}, {}, hosts=TWO_HOSTS, **changes)
    ranks = tuple(None if rank in silent else facts for rank, facts in enumerate(made_so.ranks))
    hosts = {rank: host for rank, host in enumerate(TWO_HOSTS) if rank not in silent}
    return replace(made_so, ranks=ranks, reach=made.reach(4, failed, hosts, silent))


def test_pairs_that_do_not_reach_one_another() -> None:
    found = check_reach(unreached((1, 2), (1, 3)))
    text = "Rank 1 on node0 and rank 2 on node1 and 1 more pair of these hosts exchanged no message within 10 s"
    only(found, "error", text, "ping -c 3 10.0.0.2   # on node0")


def test_pairs_of_other_hosts_are_findings_of_their_own() -> None:
    found = check_reach(unreached((0, 1), (1, 2)))
    assert [finding.text[:40] for finding in found] == [
        "Rank 0 on node0 and rank 1 on node0 exch",
        "Rank 1 on node0 and rank 2 on node1 exch",
    ]


def test_a_host_that_nobody_hears() -> None:
    failed = ((0, 2), (0, 3), (1, 2), (1, 3))
    found = check_reach(unreached(*failed, silent=(2, 3), job_hosts=("node0", "node1")))
    only(found, "error", "No rank heard from ranks 2-3 on node1 within 10 s", "ping -c 3 node1   # on node0")
    found = check_reach(unreached(*failed, silent=(2, 3)))
    only(found, "error", "No rank heard from ranks 2-3 within 10 s", "mpirun -n 4 sh -c 'echo")
    found = check_reach(unreached(*failed, silent=(2, 3), launcher="srun"))
    only(
        found,
        "error",
        "No rank heard from ranks 2-3 within 10 s",
        "srun --mpi=pmix -n 4 sh -c 'echo $SLURM_PROCID $(hostname)'",
    )
    found = check_reach(unreached(*failed, silent=(2, 3), launcher="PALS mpiexec"))
    only(found, "error", "No rank heard", "mpiexec --pmi=pmix -n 4 sh -c 'echo $PALS_RANKID $(hostname)'")


@pytest.mark.parametrize(
    ("vendor", "command"),
    [
        ("Open MPI", "export OMPI_MCA_btl_tcp_if_include=10.0.0.0/24"),
        ("Intel MPI", "export FI_TCP_IFACE=eth0"),
        ("MPICH", "export UCX_NET_DEVICES=eth0"),
    ],
)
def test_hosts_with_several_networks(vendor: str, command: str) -> None:
    docker = Interface("docker0", "172.17.0.1/16")
    changes = [{"interfaces": (docker, Interface("eth0", f"10.0.0.{number}/24"))} for number in (1, 2)]
    made_so = job(*changes, hosts=["node0", "node1"], vendor=vendor)
    found = check_reach(replace(made_so, reach=made.reach(2, [(0, 1)], {0: "node0", 1: "node1"})))
    only(found, "error", "Rank 0 on node0 and rank 1 on node1", command)
    assert "ping -c 3 10.0.0.2   # on node0" in found[0].command


def test_hosts_without_a_network_in_common() -> None:
    changes = [{"interfaces": (Interface("eth0", f"10.0.{number}.1/24"),)} for number in (1, 2)]
    made_so = job(*changes, hosts=["node0", "node1"])
    found = check_reach(replace(made_so, reach=made.reach(2, [(0, 1)], {0: "node0", 1: "node1"})))
    only(found, "error", "Rank 0 on node0", "they show no IP network in common")


def test_many_pairs_of_hosts_are_summed_up() -> None:
    hosts = [f"n{rank:02}" for rank in range(12)]
    made_so = job(*[{}] * 12, hosts=hosts)
    failed = [(rank, rank + 1) for rank in range(11)]
    found = check_reach(replace(made_so, reach=made.reach(12, failed, dict(enumerate(hosts)))))
    assert len(found) == 9
    assert found[-1].text == "3 more pairs of hosts exchanged no message."
