"""Made-up facts of jobs, and what tests of doctor's checks assert of findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.cli.doctor.facts import (
    CollectiveFacts,
    CoreFacts,
    Finding,
    GpuFacts,
    Interface,
    JobFacts,
    MpiFacts,
    RankFacts,
    Reach,
    SharedMemoryFacts,
)
from mpidist.topology.launchers import LauncherInfo

GIB = 1 << 30
TWO_HOSTS = ["node0", "node0", "node1", "node1"]
MULTIPLE = "MPI_THREAD_MULTIPLE"


def rank_facts(rank: int, size: int, host: str = "node0", **changes: Any) -> RankFacts:
    """A rank that has nothing wrong, under Open MPI's mpirun unless ``launcher`` says otherwise."""
    launcher = changes.pop("launcher", "Open MPI mpirun")
    vendor = changes.pop("vendor", "Open MPI")
    level = changes.pop("thread_level", MULTIPLE)
    facts: dict[str, Any] = {
        "host": host,
        "machine": host,
        "launcher": None if launcher is None else LauncherInfo(launcher, rank, size, None, None, "SIZE"),
        "mpi": MpiFacts(vendor, f"{vendor} 5.0", "/opt/lib/libmpi.so", level, size, rank),
        "software": {"Python": "3.11.7", "NumPy": "2.4.6", "mpi4py": "4.1.2", "mpidist": "0.1"},
        "cores": CoreFacts(tuple(range(8)), 8, None, {"OMP_NUM_THREADS": "4"}),
        "shared_memory": SharedMemoryFacts(8 * GIB, 8 * GIB),
        "gpus": GpuFacts(),
        "interfaces": (Interface("eth0", f"10.0.0.{1 + int(host[-1])}/24", 10000),),
    }
    return RankFacts(**{**facts, **changes})


def job(*changes: dict[str, Any], hosts: Sequence[str] | None = None, **everywhere: Any) -> JobFacts:
    """A job of as many ranks as ``changes``, each on a host of ``hosts``, node0 by default."""
    size = len(changes)
    places = hosts or ["node0"] * size
    ranks = tuple(
        rank_facts(rank, size, host, **{**everywhere, **change})
        for rank, (host, change) in enumerate(zip(places, changes, strict=True))
    )
    return JobFacts(ranks)


def cores(*allowed: int, machine: int = 8, quota: float | None = None, threads: str = "1") -> dict[str, Any]:
    settings = {"OMP_NUM_THREADS": threads} if threads else {}
    return {"cores": CoreFacts(allowed, machine, quota, settings)}


def gpus(*visible: str, **changes: Any) -> dict[str, Any]:
    of_each: dict[str, Any] = {"names": ("H200",) * len(visible), "cores": ((),) * len(visible), "nccl": "2.28.9"}
    return {"gpus": GpuFacts(True, visible, **{**of_each, **changes})}


def reach(size: int, failed: Sequence[tuple[int, int]], hosts: dict[int, str], silent: Sequence[int] = ()) -> Reach:
    return Reach(10.0, size * (size - 1) // 2, tuple(failed), hosts, size, tuple(silent))


def collectives(error: str = "", origin: str = "the shipped table") -> CollectiveFacts:
    return CollectiveFacts((0, 0), True, "one_node", "hierarchical at any size", origin, error)


def only(found: list[Finding], level: str, text: str, command: str) -> None:
    """Assert that there is one finding, of this level, with these parts in text and command."""
    assert [finding.level for finding in found] == [level], found
    assert text in found[0].text
    assert command in found[0].command
