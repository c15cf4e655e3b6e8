"""The long parts, of which CI runs a share.

Chaos, soaks, 64 ranks, virtual hosts, CuPy's binding, MPICH, types, aarch64, the documentation, a release, and those
with torch, Keras or JAX.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import TypeVar

from tests.chaos.faults import FAULTS
from tests.checks import library_parts
from tests.checks.parts import GROUPS, Part, one_rank
from tests.support.ranks.jobs import ROOT

T = TypeVar("T")

_SECONDS = 1800.0
# Which share a commit gets is decided by its hash. None takes more than some three minutes.
SHARES = [
    ["chaos 1"],
    ["chaos 2"],
    ["chaos 3"],
    ["long 1"],
    ["long 2"],
    ["binding"],
    ["MPICH"],
    ["types"],
    ["core in C, more"],
    ["hosts: all_reduce", "hosts: launch", "hosts: lab"],
    ["hosts: doctor", "hosts: faults"],
    ["hosts: slurm_scripts"],
    ["hosts: sixteen_hosts"],
    ["64 ranks, 16 nodes"],
    ["64 ranks, 32 nodes"],
    ["64 ranks, one lost"],
    ["docs"],
    ["release, on this machine"],
    ["release, on others"],
]


def everything() -> list[Part]:
    """Return all long parts."""
    hosts = [_on_hosts(f"hosts: {name}", f"tests/cluster/test_{name}.py") for name in _HOSTS]
    return [
        *(one_rank(f"chaos {third + 1}", _chaos(third), "--long", seconds=_SECONDS) for third in range(3)),
        one_rank("long 1", _LONG_1, "--long", "-m", "long", seconds=_SECONDS),
        one_rank("long 2", ["tests"], "--long", "-m", "long", *_others_than_long_1(), seconds=_SECONDS),
        _make("binding", "test-binding"),
        _make("MPICH", "test-mpich"),
        _make("types", "test-types"),
        _make("docs", "docs", "TEST_ARGS=--long"),
        _release("on this machine", "archives", "installed", "recipes"),
        _release("on others", "clean_root", "other_machines"),
        one_rank("core in C, more", GROUPS["core in C"], "--long", "-m", "long", seconds=_SECONDS),
        *(_of_64_ranks(name, only) for name, only in _SCALE.items()),
        *hosts,
    ]


def always() -> list[Part]:
    """Return what CI runs of them each time: one script for sbatch, and one job on two virtual hosts."""
    return [_on_hosts("hosts", *_ALWAYS)]


def share() -> list[Part]:
    """Return the share of the commit that is checked out, and that of the parts with torch, Keras or JAX."""
    names = share_of(commit())
    return [*(part for part in everything() if part.name in names), _library_share()]


def commit() -> str:
    """Return the hash of the commit that is checked out, which decides what is by turns."""
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if asked.returncode != 0:
        raise SystemExit(f"the commit decides which long tests are run, and git does not tell it: {asked.stderr}")
    return asked.stdout.strip()


def share_of(commit: str, shares: Sequence[T] = SHARES) -> T:
    """Return the share that a commit gets, by its hash alone: by default the names of long parts.

    >>> share_of("0" * 40)
    ['chaos 1']
    """
    return shares[int(commit, 16) % len(shares)]


def _library_share() -> Part:
    """Return the commit's share of what ``make test-torch``, ``test-keras`` and ``test-jax`` run."""
    share = share_of(commit(), library_parts.SHARES)
    packages = f"{share.library.upper()}={share.packages}"
    make = ["make", f"test-{share.library}", packages, f"CHECK_ARGS=--only {shlex.join(share.names)}"]
    command = [sys.executable, "-m", "tests.checks.wheels", share.packages, *make]
    return Part(share.library, command, takes_all_cores=True, is_pytest=False, seconds=_SECONDS)


# Half of the long variants, by the time that they take.
_LONG_1 = [*GROUPS["collectives and launching"], "tests/support"]


def _others_than_long_1() -> list[str]:
    in_others = ("tests/chaos", "tests/docs", "tests/packaging", "tests/scale")
    return [f"--ignore={path}" for path in (*_LONG_1, *GROUPS["core in C"], *in_others)]


_HOSTS = ("all_reduce", "doctor", "faults", "lab", "launch", "sixteen_hosts", "slurm_scripts")
# Each with what is in the names of its tests.
_SCALE = {"64 ranks, 16 nodes": "16-nodes", "64 ranks, 32 nodes": "32-nodes", "64 ranks, one lost": "goes_on_with_63"}
_ALWAYS = (
    "tests/cluster/test_slurm_scripts.py::test_training_on_hosts[cpu_srun_pmix-Open MPI-2]",
    "tests/cluster/test_all_reduce.py::test_results_in_every_placement[mpirun-block]",
)


def _on_hosts(name: str, *tests: str) -> Part:
    """Return tests on virtual hosts, each of which claims all cores of this machine."""
    return one_rank(name, tests, "-m", "cluster", "--long", seconds=_SECONDS, takes_all_cores=True)


def _of_64_ranks(name: str, only: str) -> Part:
    """Return some tests of jobs of 64 ranks, which need all cores to end in time."""
    return one_rank(name, ["tests/scale"], "--long", "-k", only, seconds=_SECONDS, takes_all_cores=True)


def _chaos(third: int) -> list[str]:
    """Return a third of the faults of tests/chaos in their short form."""
    names = [name for name, fault in FAULTS.items() if fault.short_times][third::3]
    return [f"tests/chaos/test_chaos.py::test_every_committed_step_is_there_in_the_end[{name}]" for name in names]


def _release(where: str, *names: str) -> Part:
    """Return tests of a release that is built for them."""
    tests = " ".join(f"tests/packaging/test_{name}.py" for name in names)
    return _make(f"release, {where}", "dist", f"DIST_TESTS={tests}")


def _make(name: str, *arguments: str) -> Part:
    """Return what has an environment of its own; one at a time, as each installs mpidist from the same folder."""
    return Part(name, ["make", *arguments], takes_all_cores=True, is_pytest=False, seconds=_SECONDS)
