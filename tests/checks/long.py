"""The long parts, of which CI runs a share: chaos, soaks, virtual hosts with Slurm, CuPy's NCCL binding, MPICH."""

from __future__ import annotations

import subprocess
import sys

from tests.checks.parts import Part, one_rank
from tests.support.ranks.jobs import ROOT

_SECONDS = 1500.0
# Which share a commit gets is decided by its hash. None takes more than some three minutes.
SHARES = [
    ["chaos"],
    ["long", "binding"],
    ["MPICH"],
    ["hosts: all_reduce", "hosts: launch", "hosts: lab"],
    ["hosts: doctor", "hosts: faults"],
    ["hosts: slurm_scripts"],
]


def everything() -> list[Part]:
    """Return all long parts."""
    hosts = [_on_hosts(f"hosts: {name}", f"tests/cluster/test_{name}.py") for name in _HOSTS]
    return [
        one_rank("chaos", ["tests/chaos"], "--long"),
        one_rank("long", ["tests"], "--long", "-m", "long", "--ignore=tests/chaos"),
        Part("binding", ["make", "test-binding", f"PYTHON={sys.executable}"], is_pytest=False, seconds=_SECONDS),
        Part("MPICH", ["make", "test-mpich", f"PYTHON={sys.executable}"], is_pytest=False, seconds=_SECONDS),
        *hosts,
    ]


def always() -> list[Part]:
    """Return what CI runs of them each time: one script for sbatch, and one job on two virtual hosts."""
    return [_on_hosts("hosts", *_ALWAYS)]


def share() -> list[Part]:
    """Return the share of the commit that is checked out."""
    names = share_of(subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip())
    return [part for part in everything() if part.name in names]


def share_of(commit: str) -> list[str]:
    """Return the names of the long parts that a commit gets, by its hash alone.

    >>> share_of("0" * 40)
    ['chaos']
    """
    return SHARES[int(commit, 16) % len(SHARES)]


_HOSTS = ("all_reduce", "doctor", "faults", "lab", "launch", "slurm_scripts")
_ALWAYS = (
    "tests/cluster/test_slurm_scripts.py::test_training_on_hosts[cpu_srun_pmix-Open MPI-2]",
    "tests/cluster/test_all_reduce.py::test_results_in_every_placement[mpirun-block]",
)


def _on_hosts(name: str, *tests: str) -> Part:
    """Return tests on virtual hosts, which claim all cores of this machine for each."""
    part = one_rank(name, tests, "-m", "cluster", "--long")
    return Part(part.name, part.command, takes_all_cores=True, seconds=_SECONDS)
