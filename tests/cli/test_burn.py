"""``doctor --burn``: loads on real ranks, wrong checksums, and slow nodes and ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mpidist.cli.doctor.burn import burn_lines, check_burn
from mpidist.cli.doctor.facts import BurnFacts, JobFacts
from tests.cli import doctor_jobs as made
from tests.cli.test_doctor import doctor, document_of

pytestmark = [pytest.mark.jobs, pytest.mark.all_cores, pytest.mark.one_rank]

LOADS = ["product", "memory", "all-reduce", "write, read"]
# A wrong bit in each matrix product of rank 1.
WRONG = """
from mpi4py import MPI
from mpidist.cli.doctor import burn
right = burn._product
if MPI.COMM_WORLD.rank == 1:
    def wrong():
        load = right()
        return load._replace(run=lambda: load.run() + 1e-9)
    burn._product = wrong
"""


def test_figures_of_real_ranks(tmp_path: Path) -> None:
    done = doctor(2, "--json", "--burn", "0.4", "--folder", str(tmp_path), ranks_per_node=1)
    document = document_of(done)
    assert [list(facts["rates"]) for facts in document["burn"]] == [LOADS] * 2
    assert all(rate > 0 for facts in document["burn"] for rate in facts["rates"].values())
    assert [facts["errors"] for facts in document["burn"]] == [[], []]
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_checksum_is_an_error() -> None:
    done = doctor(2, "--burn", "0.4", before=WRONG)
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    assert "ERROR burn: Rank 1 on " in text
    assert " computed a different checksum in product. type: --exclude=" in text


def test_a_missing_folder_is_a_finding() -> None:
    done = doctor(2, "--burn", "0.1", "--folder", "/nowhere")
    assert done.returncode != 0
    assert "cannot write and read a file in /nowhere: No such file or directory." in " ".join(done.stdout.split())


def test_without_burn_nothing_is_loaded() -> None:
    assert json.loads(doctor(2, "--json").stdout)["burn"] == []
    assert burn_lines(made.job({}, {})) == []


def burned(*products: float, per_host: int = 1, **last: object) -> JobFacts:
    hosts = [f"node{rank // per_host}" for rank in range(len(products))]
    figures = [BurnFacts({"product": rate, "memory": 1e9}) for rate in products]
    figures[-1] = replace(figures[-1], **last)  # type: ignore[arg-type]
    return replace(made.job(*[{}] * len(products), hosts=hosts), burn=tuple(figures))


@pytest.mark.parametrize(
    ("job", "level", "text", "hosts"),
    [
        (burned(5e9, 5e9, 4e9), "warning", "More than 10 % below the median in product: node2 by 20%.", "node2"),
        (
            burned(5e9, 4.4e9, 5e9, 5e9, 5e9, 5e9, per_host=2),
            "warning",
            "More than 10 % below the median in product: rank 1 on node0 by 12%.",
            "node0",
        ),
        (
            burned(5e9, 5e9, 5e9, 5e9, 5e9, 2e9, 5e9, 2e9, 2e9),
            *("warning", "node5 by 60%, node7 by 60% and node8 by 60%.", "node[5,7-8]"),
        ),
        (
            burned(5e9, 5e9, errors=["computed a different checksum in memory"]),
            "error",
            "Rank 1 on node1 computed a different checksum in memory.",
            "node1",
        ),
    ],
    ids=["node", "rank", "nodes", "checksum"],
)
def test_bad_nodes_and_ranks_are_named(job: JobFacts, level: str, text: str, hosts: str) -> None:
    made.only(check_burn(job), level, text, f"--exclude={hosts}   # for sbatch, salloc or srun of Slurm")
    assert check_burn(burned(5e9, 4.6e9, 5e9)) == []


def test_table_of_nodes() -> None:
    assert [line.split() for line in burn_lines(burned(5e9, 5e9, 2e9))] == [
        ["each", "rank", "node", "product", "memory"],
        ["median", "5", "GFLOP/s", "1", "GB/s"],
        ["node2", "2", "GFLOP/s", "1", "GB/s"],
        ["node0", "5", "GFLOP/s", "1", "GB/s"],
        ["node1", "5", "GFLOP/s", "1", "GB/s"],
    ]
    assert burn_lines(burned(*[5e9] * 20))[-1].strip() == "and 8 nodes more, see --json"
