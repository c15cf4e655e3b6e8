"""Each of doctor's checks, on made-up facts: what it finds, what it says to type, and that it is silent otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mpidist.cli.doctor_checks import CHECKS, findings
from mpidist.cli.doctor_checks.gpus import check_gpus, devices, labels
from mpidist.cli.doctor_checks.hosts import check_cores, check_shared_memory
from mpidist.cli.doctor_checks.setup import (
    check_barriers,
    check_native_core,
    check_settings,
    check_software,
    check_table,
    check_world,
    is_torn,
    torn,
)
from mpidist.cli.doctor_facts.facts import GpuFacts, JobFacts, NcclNet, SharedMemoryFacts
from tests.cli import doctor_jobs as made
from tests.cli.doctor_jobs import TWO_HOSTS, job, only

pytestmark = pytest.mark.one_rank


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("healthy", [job({}), job({}, {}), job({}, {}, {}, {}, hosts=TWO_HOSTS)])
def test_a_healthy_job_has_no_findings(check: Callable[[JobFacts], Any], healthy: JobFacts) -> None:
    assert check(healthy) == []


def test_errors_come_first() -> None:
    found = findings(job(made.cores(0), made.cores(1), vendor="Cray MPICH", wrong_settings={"MPIDIST_REPORT": "bad"}))
    assert [finding.level for finding in found] == ["error", "warning"]


# world ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launched", "size", "rank", "expected"),
    [(4, 1, 0, True), (4, 2, 0, True), (4, 4, 3, False), (2, 4, 1, False), (None, 1, 1, True), (None, 2, 1, False)],
)
def test_a_torn_world(launched: int | None, size: int, rank: int, expected: bool) -> None:
    facts = made.rank_facts(rank, size)
    assert facts.launcher is not None
    assert is_torn(replace(facts.launcher, size=launched), facts.mpi) is expected


def test_no_launcher_is_no_torn_world() -> None:
    assert not is_torn(None, made.rank_facts(0, 1).mpi)


def test_the_text_of_a_torn_world() -> None:
    facts = made.rank_facts(0, 4, launcher="srun")
    assert facts.launcher is not None
    found = torn(facts.launcher, replace(facts.mpi, size=1), "srun --mpi=pmix -n 4 python train.py")
    only([found], "error", "srun started 4 ranks, and MPI made 4 worlds of one rank", "srun --mpi=pmix -n 4")


@pytest.mark.parametrize(
    ("vendor", "command"),
    [
        ("Cray MPICH", "export MPICH_MAX_THREAD_SAFETY=multiple"),
        ("MPICH", "module avail mpi"),
    ],
)
def test_too_little_thread_support(vendor: str, command: str) -> None:
    found = check_world(job({}, vendor=vendor, thread_level="MPI_THREAD_SERIALIZED"))
    only(found, "warning", "gives MPI_THREAD_SERIALIZED", command)


def test_barriers_that_hold_one_node_only() -> None:
    loose = {"launcher": "srun", "loose_barriers": True}
    found = check_barriers(job({}, {}, hosts=["node0", "node1"], **loose))
    only(found, "warning", "segmentation fault", "export SLURM_PMIX_FENCE=ring")
    assert check_barriers(job({}, {}, **loose)) == []


# software -------------------------------------------------------------------------------------------------------------


def test_another_numpy_on_another_host() -> None:
    other = {"software": {"Python": "3.11.7", "NumPy": "1.26.4", "mpi4py": "4.1.2", "mpidist": "0.1"}}
    found = check_software(job({}, other, other, hosts=["node0", "node1", "node2"]))
    only(
        found,
        "error",
        "NumPy is 2.4.6 on node0 and 1.26.4 on node1 and node2",
        "pip install 'numpy==2.4.6'   # on node1",
    )


def test_another_mpi_on_another_host() -> None:
    found = check_software(job({}, {"vendor": "MPICH"}, hosts=["node0", "node1"]))
    only(found, "error", "Open MPI 5.0 on node0 and MPICH 5.0 on node1", "export MPI4PY_LIBMPI=/opt/lib/libmpi.so")


# native core ----------------------------------------------------------------------------------------------------------


def test_a_host_without_the_native_core() -> None:
    found = check_native_core(job({}, {"without_core": "it was not built"}, hosts=["node0", "node1"]))
    text = "rank 1 on node1 without the native core: it was not built. "
    only(found, "warning", text, "mpidist/native/build_library.py   # on node1; docs/install.md")


def test_a_native_core_that_cannot_reach_other_nodes() -> None:
    fact = {"without_core_between_nodes": "it cannot call MPI: undefined symbol: MPI_Test"}
    found = check_native_core(job({}, fact, hosts=["node0", "node1"]))
    text = "rank 1 on node1 without the native core: it cannot call MPI: undefined symbol: MPI_Test. "
    only(found, "warning", text, "--no-binary=mpi4py mpi4py   # on node1; docs/install.md")
    assert check_native_core(job({}, fact)) == []


def test_a_native_core_that_is_turned_off() -> None:
    off = {"without_core": "MPIDIST_NATIVE=0", "settings": {"MPIDIST_NATIVE": "0"}}
    only(check_native_core(job(off, off)), "warning", "ranks 0-1 on node0 without", "unset MPIDIST_NATIVE")


# cores ----------------------------------------------------------------------------------------------------------------


def test_more_ranks_than_cores() -> None:
    crowded = job(*[made.cores(0, 1, machine=2)] * 4)
    only(check_cores(crowded), "warning", "4 ranks share 2 cores on node0", "mpidist launch -n 2 train.py")


def test_more_ranks_than_the_container_gives_time_for() -> None:
    crowded = job(*[made.cores(*range(8), quota=1.5)] * 4, launcher="srun")
    only(check_cores(crowded), "warning", "4 ranks share 2 cores on node0", "srun --mpi=pmix -n 2 --cpu-bind=none")


def test_ranks_are_counted_against_the_cores_of_their_own_host() -> None:
    crowded = job(*[made.cores(0, 1, machine=2)] * 4, hosts=["node0", "node1", "node1", "node1"])
    only(check_cores(crowded), "warning", "3 ranks share 2 cores on node1", "mpirun -n 3 --bind-to none -x ")
    assert check_cores(job(*[made.cores(0, 1, machine=2)] * 4, hosts=TWO_HOSTS)) == []


def test_ranks_that_are_bound_to_one_core_each() -> None:
    bound = job(made.cores(0), made.cores(1))
    command = "OMP_NUM_THREADS=4 python -m mpidist launch -n 2 train.py"
    only(check_cores(bound), "warning", "ranks 0-1 may run on one core only, of 8", command)
    in_batch_job = job(made.cores(0), made.cores(1), batch_system="PBS")
    command = "mpirun -n 2 --bind-to none -x OMP_NUM_THREADS=4 python train.py"
    only(check_cores(in_batch_job), "warning", "ranks 0-1 may run on one core only, of 8", command)


@pytest.mark.parametrize(
    ("launcher", "vendor", "command"),
    [
        ("srun", "Open MPI", "OMP_NUM_THREADS=4 srun --mpi=pmix -n 2 --cpu-bind=none python train.py"),
        ("srun", "MPICH", "OMP_NUM_THREADS=4 srun --mpi=pmi2 -n 2 --cpu-bind=none python train.py"),
        ("MPICH mpiexec", "MPICH", "OMP_NUM_THREADS=4 mpiexec -n 2 -bind-to none python train.py"),
        ("Intel MPI mpiexec", "Intel MPI", "OMP_NUM_THREADS=4 mpirun -n 2 -genv I_MPI_PIN off python train.py"),
        ("flux run", "Open MPI", "OMP_NUM_THREADS=4 flux run -o pmi=pmix -n 2 -o cpu-affinity=off python train.py"),
        ("PALS mpiexec", "Cray MPICH", "OMP_NUM_THREADS=4 mpiexec --pmi=cray -n 2 --cpu-bind none python train.py"),
        ("srun", "Cray MPICH", "OMP_NUM_THREADS=4 srun --mpi=cray_shasta -n 2 --cpu-bind=none python train.py"),
        (
            "LSF jsrun",
            "Open MPI",
            "jsrun --nrs 1 --rs_per_host 1 --tasks_per_rs 2 --cpu_per_rs ALL_CPUS --bind none "
            "--env OMP_NUM_THREADS=4 python train.py",
        ),
        ("a PMIx launcher", "Open MPI", "OMP_NUM_THREADS=4 mpirun -n 2 python train.py"),
    ],
)
def test_the_command_is_that_of_the_launcher(launcher: str, vendor: str, command: str) -> None:
    bound = job(made.cores(0), made.cores(1), launcher=launcher, vendor=vendor, batch_system="Slurm")
    assert check_cores(bound)[0].command == command


def test_two_ranks_that_are_bound_to_the_same_core() -> None:
    found = check_cores(job(made.cores(3), made.cores(3)))
    only(found, "warning", "ranks 0-1 on node0 are bound to core 3 of 8, which they share", "mpidist launch -n 2 ")


def test_one_process_that_is_bound_to_one_core() -> None:
    found = check_cores(job(made.cores(3), launcher=None))
    only(found, "warning", "rank 0 may run on one core only", "taskset --cpu-list 0-7 python train.py")


def test_one_core_is_enough_where_there_is_no_other() -> None:
    assert check_cores(job(made.cores(0, machine=1), launcher=None)) == []


def test_threads_that_nothing_limits() -> None:
    free = job(*[made.cores(*range(8), threads="")] * 2)
    only(check_cores(free), "warning", "all together start 16", "OMP_NUM_THREADS=4 python -m mpidist launch -n 2")
    assert check_cores(job(made.cores(*range(8), threads=""), launcher=None)) == []


# /dev/shm -------------------------------------------------------------------------------------------------------------


def test_little_shared_memory() -> None:
    short = {"shared_memory": SharedMemoryFacts(1 << 20, 1 << 20)}
    found = check_shared_memory(job({}, short, hosts=["node0", "node1"]))
    only(found, "warning", "/dev/shm has 1 MiB free on node1", "docker run --shm-size=8g")
    only(check_shared_memory(job({"shared_memory": None})), "warning", "has 0 B free", "mount -o remount,size=8g")


# GPUs -----------------------------------------------------------------------------------------------------------------


def test_a_gpu_that_cannot_be_used() -> None:
    problem = "arrays on a GPU need CuPy, which is not installed; type: pip install -e '/src[cuda13]', or another"
    found = check_gpus(job({"gpus": GpuFacts(True, problem=problem)}))
    only(found, "warning", problem, "python -m pip install -e '/src[cuda13]'")


def test_gpus_without_nccl() -> None:
    found = check_gpus(job(made.gpus("a", nccl="", nccl_problem="no NCCL; type: pip install nvidia-nccl-cu13, or")))
    only(found, "warning", "Rank 0 on node0: no NCCL", "python -m pip install nvidia-nccl-cu13")


def test_a_launcher_that_hands_out_gpus_that_are_not_there() -> None:
    found = check_gpus(job({"gpus": GpuFacts(variable="1")}))
    only(found, "warning", "CUDA_VISIBLE_DEVICES=1, and node0 shows no NVIDIA driver", "nvidia-smi   # on node0")
    assert check_gpus(job({"gpus": GpuFacts(variable="")})) == []


def test_ranks_with_and_without_gpus() -> None:
    mixed = job(made.gpus("a", "b"), {}, hosts=["node0", "node1"])
    only(
        check_gpus(mixed), "error", "rank 0 sees GPUs and rank 1 (on node1) none", "unset CUDA_VISIBLE_DEVICES; mpirun"
    )
    mixed = job(made.gpus("a", "b"), {}, launcher="srun")
    only(check_gpus(mixed), "error", "rank 0 sees GPUs", "srun --mpi=pmix --gpus-per-node=2 --gpu-bind=none -n 2")
    mixed = job(made.gpus("a", "b"), {}, launcher="flux run")
    only(check_gpus(mixed), "error", "rank 0 sees GPUs", "flux run -o pmi=pmix -o gpu-affinity=off -n 2")


def test_ranks_that_share_a_gpu() -> None:
    found = check_gpus(job(*[made.gpus("a", "b")] * 3))
    only(found, "warning", "ranks 0,2 on node0 share GPU a", "mpirun -n 2 python train.py")
    assert check_gpus(job(*[made.gpus("a", "b")] * 2)) == []
    # The same bus id on another host is another GPU.
    assert check_gpus(job(*[made.gpus("a")] * 2, hosts=["node0", "node1"])) == []


def test_ranks_of_several_gpus() -> None:
    found = check_gpus(job(*[made.gpus("a", "b", "c", "d")] * 2, hosts=["node0", "node1"], launcher="srun"))
    only(found, "warning", "Rank 0 on node0 has 4 GPUs: between nodes the first", "srun --mpi=pmix -n 8")
    assert check_gpus(job(made.gpus("a", "b"))) == []


def test_slices_of_a_gpu() -> None:
    sliced = job(*[made.gpus("a", names=("H100 80GB HBM3 MIG 1g.10gb",))] * 2)
    only(check_gpus(sliced), "warning", "ranks 0-1 on node0 have slices (MIG) of GPU a: NCCL", "mpirun -n 1")
    assert labels(sliced) == {0: ["MIG 1g.10gb of GPU a"], 1: ["MIG 1g.10gb of GPU a"]}


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ("srun", "srun --mpi=pmix --distribution=block:block --mem-bind=local -n 2"),
        ("Open MPI mpirun", "mpirun -n 2 --bind-to none"),
    ],
)
def test_cores_that_are_not_next_to_the_gpu(launcher: str, command: str) -> None:
    first, second = (0, 1, 2, 3), (4, 5, 6, 7)
    both = made.gpus("a", "b", cores=(first, second))
    text = "Rank 0 on node0 runs on cores 4-7, and its GPU a is next to cores 0-3"
    dealt_in_turn = job({**both, **made.cores(*second)}, {**both, **made.cores(*first)}, launcher=launcher)
    only(check_gpus(dealt_in_turn), "warning", text, command)
    assert check_gpus(job({**both, **made.cores(*first)}, {**both, **made.cores(*second)})) == []
    assert check_gpus(job(both, both)) == []


def test_a_slow_network_of_nccl() -> None:
    net = NcclNet("TCP sockets", "cxi0 is there, for which NCCL needs a plugin", "module load aws-ofi-nccl")
    slow = made.gpus("a", net=net)
    text = "NCCL takes TCP sockets between nodes, without a word: on node0 cxi0 is there"
    only(check_gpus(job(slow, slow, hosts=["node0", "node1"])), "warning", text, "module load aws-ofi-nccl")
    assert check_gpus(job(slow)) == []


def test_which_rank_has_which_gpu() -> None:
    assert devices(job(*[made.gpus("a", "b", "c")] * 2)) == {0: ("a", "b"), 1: ("c",)}


# settings and table ---------------------------------------------------------------------------------------------------


def test_jobs_that_are_not_the_ranks() -> None:
    def of(jobs: str, *ranks: dict, **everywhere: object) -> list:
        return check_settings(job(*ranks, settings={"MPIDIST_JOBS": jobs}, **everywhere))

    (found,) = of("worker:7", {}, {})
    assert "MPIDIST_JOBS has 7 worker = 7 tasks, and there are 2 ranks" in found.text
    assert (found.level, found.command) == ("error", "unset MPIDIST_JOBS")
    assert of("ps:1,worker:1", {}, {}) == []
    assert of("worker:7", {}, launcher=None) == []  # one process that looks at the machine
    assert "task type 'boss'" in of("boss:7", {}, launcher=None)[0].text


def test_settings_that_are_wrong_or_mean_nothing() -> None:
    text = "MPIDIST_TIMEOUT='soon': expected seconds, more than 0"
    found = check_settings(job({}, {}, wrong_settings={"MPIDIST_TIMEOUT": text}))
    only(found, "error", text, "unset MPIDIST_TIMEOUT")
    found = check_settings(job({}, unknown_settings=("MPIDIST_TIMEOUTS",)))
    command = 'export MPIDIST_TIMEOUT="$MPIDIST_TIMEOUTS"; unset MPIDIST_TIMEOUTS'
    only(found, "warning", "MPIDIST_TIMEOUTS means nothing to mpidist; MPIDIST_TIMEOUT does", command)
    only(
        check_settings(job({}, unknown_settings=("MPIDIST_Q",))),
        "warning",
        "MPIDIST_Q means nothing",
        "unset MPIDIST_Q",
    )


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ("Open MPI mpirun", "mpirun -x MPIDIST_TIMEOUT python train.py"),
        ("srun", "export MPIDIST_TIMEOUT; srun --mpi=pmix --export=ALL python train.py"),
        ("MPICH mpiexec", "export MPIDIST_TIMEOUT; mpiexec -genvall python train.py"),
        ("Intel MPI mpiexec", "export MPIDIST_TIMEOUT; mpirun -genvall python train.py"),
        ("flux run", "export MPIDIST_TIMEOUT; flux run -o pmi=pmix python train.py"),
        ("PALS mpiexec", "export MPIDIST_TIMEOUT; mpiexec --pmi=pmix --envall python train.py"),
        ("LSF jsrun", "jsrun --env MPIDIST_TIMEOUT python train.py"),
    ],
)
def test_settings_that_differ_between_ranks(launcher: str, command: str) -> None:
    found = check_settings(job({"settings": {"MPIDIST_TIMEOUT": "9"}}, {}, {}, launcher=launcher))
    only(found, "error", "MPIDIST_TIMEOUT on rank 0 and on ranks 1-2 differ", command)


def test_the_tuning_file_is_a_matter_of_rank_0() -> None:
    assert check_settings(job({"settings": {"MPIDIST_TUNING_FILE": "t.json"}}, {})) == []


@pytest.mark.parametrize(
    ("make", "level", "command"),
    [
        (lambda: made.collectives("t has no table for that"), "warning", "mpidist tune --out"),
        (lambda: made.collectives("t is not JSON", "t cannot be used"), "error", "unset MPIDIST_TUNING_FILE"),
    ],
)
def test_a_tuning_file_that_does_not_fit(make: Callable[[], Any], level: str, command: str) -> None:
    only(check_table(replace(job({}, {}), collectives=make())), level, "MPIDIST_TUNING_FILE: t ", command)
    assert check_table(replace(job({}), collectives=make())) == []
