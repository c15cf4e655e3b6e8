"""Each of doctor's checks, on made-up facts: its finding, the command to type, and no finding for healthy jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from mpidist.cli.doctor.checks import (
    CHECKS,
    check_cores,
    check_gpus,
    check_links,
    check_mpi,
    check_native_core,
    check_network,
    check_reach,
    check_settings,
    check_shared_memory,
    check_software,
    check_table,
    devices,
    findings,
    labels,
)
from mpidist.cli.doctor.facts import (
    ERROR,
    WARNING,
    Finding,
    GpuFacts,
    Interface,
    JobFacts,
    LinkSpeed,
    NcclNet,
    SharedMemoryFacts,
)
from tests.cli import doctor_jobs as made
from tests.cli.doctor_jobs import TWO_HOSTS, job, only

pytestmark = pytest.mark.one_rank

Check = Callable[[JobFacts], Iterable[Finding]]
PAIR = ["node0", "node1"]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("healthy", [job({}), job({}, {}), job({}, {}, {}, {}, hosts=TWO_HOSTS)])
def test_healthy_jobs_have_no_findings(check: Check, healthy: JobFacts) -> None:
    assert list(check(healthy)) == []


def test_errors_come_first() -> None:
    found = findings(job(made.cores(0), made.cores(1), vendor="Cray MPICH", wrong_settings={"MPIDIST_REPORT": "bad"}))
    assert [finding.level for finding in found] == ["error", "warning"]


# All checks -----------------------------------------------------------------------------------------------

SERIALIZED = {"thread_level": "MPI_THREAD_SERIALIZED"}
LOOSE = {"launcher": "srun", "loose_barriers": True}
OTHER_NUMPY = {"software": {"Python": "3.11.7", "NumPy": "1.26.4", "mpi4py": "4.1.2", "mpidist": "0.1"}}
OTHER_PYTHON = {"software": {"Python": "3.12.1", "NumPy": "2.4.6", "mpi4py": "4.1.2", "mpidist": "0.1"}}
NO_CORE = {"without_core": "it was not built"}
NO_CORE_BETWEEN = {"without_core_between_nodes": "it cannot call MPI: undefined symbol: MPI_Test"}
CORE_OFF = {"without_core": "MPIDIST_NATIVE=0", "settings": {"MPIDIST_NATIVE": "0"}}
FEW_CORES = [made.cores(0, 1, machine=2)] * 4
BOUND = [made.cores(0), made.cores(1)]
UNLIMITED = made.cores(*range(8), threads="")
LITTLE_SHM = {"shared_memory": SharedMemoryFacts(1 << 20, 1 << 20)}
NO_CUPY = "arrays on a GPU need CuPy, which is not installed; type: pip install -e '/src[cuda13]', or another"
NO_NCCL = made.gpus("a", nccl="", nccl_problem="no NCCL; type: pip install nvidia-nccl-cu13, or")
TWO_GPUS = made.gpus("a", "b")
MIG = made.gpus("a", names=("H100 80GB HBM3 MIG 1g.10gb",))
FIRST, SECOND = (0, 1, 2, 3), (4, 5, 6, 7)
BY_SOCKET = made.gpus("a", "b", cores=(FIRST, SECOND))
CROSSED = ({**BY_SOCKET, **made.cores(*SECOND)}, {**BY_SOCKET, **made.cores(*FIRST)})
SLOW_NET = made.gpus("a", net=NcclNet("TCP sockets", "cxi0 is there, for which NCCL needs a plugin", "load aws"))
WRONG = "MPIDIST_TIMEOUT='soon': expected seconds, more than 0"
INFINIBAND = (Interface("eth0", "10.0.0.1/24"), Interface("mlx5_0", is_infiniband=True))
FOUR = [f"node{rank}" for rank in range(4)]


def on_ethernet(vendor: str) -> JobFacts:
    return replace(job({}, {}, hosts=PAIR, interfaces=INFINIBAND, vendor=vendor), in_use={"node1": ("eth0",)})


def linked(*speeds: float, **changes: Any) -> JobFacts:
    links = tuple(
        LinkSpeed((one, one + 1), (f"node{one}", f"node{one + 1}"), True, 1e-5, speed)
        for one, speed in enumerate(speeds)
    )
    in_use = changes.pop("in_use", {})
    return replace(job({}, {}, {}, {}, hosts=FOUR, **changes), links=links, in_use=in_use)


def jobs(text: str, *ranks: dict[str, Any], **everywhere: Any) -> JobFacts:
    return job(*ranks, settings={"MPIDIST_JOBS": text}, **everywhere)


def tuned(error: str, origin: str = "the shipped table", ranks: int = 2) -> JobFacts:
    return replace(job(*[{}] * ranks), collectives=made.collectives(error, origin))


FOUND: dict[str, tuple[Check, JobFacts, str, str, str]] = {
    "thread support of Cray MPICH": (
        *(check_mpi, job({}, vendor="Cray MPICH", **SERIALIZED), WARNING),
        *("gives MPI_THREAD_SERIALIZED", "export MPICH_MAX_THREAD_SAFETY=multiple"),
    ),
    "thread support of MPICH": (
        *(check_mpi, job({}, vendor="MPICH", **SERIALIZED), WARNING),
        *("gives MPI_THREAD_SERIALIZED", "module avail mpi"),
    ),
    "barriers that hold one node only": (
        *(check_mpi, job({}, {}, hosts=PAIR, **LOOSE), WARNING),
        *("segmentation fault", "export SLURM_PMIX_FENCE=ring"),
    ),
    "another NumPy": (
        *(check_software, job({}, OTHER_NUMPY, OTHER_NUMPY, hosts=["node0", "node1", "node2"]), ERROR),
        *("NumPy is 2.4.6 on node0 and 1.26.4 on node1 and node2", "pip install 'numpy==2.4.6'   # on node1"),
    ),
    "another Python": (
        *(check_software, job({}, OTHER_PYTHON, hosts=PAIR), ERROR),
        *("Python is 3.11.7 on node0 and 3.12.1 on node1", "compare: ssh node1 which python"),
    ),
    "another MPI": (
        *(check_software, job({}, {"vendor": "MPICH"}, hosts=PAIR), ERROR),
        *("Open MPI 5.0 on node0 and MPICH 5.0 on node1", "export MPI4PY_LIBMPI=/opt/lib/libmpi.so"),
    ),
    "no native core": (
        *(check_native_core, job({}, NO_CORE, hosts=PAIR), WARNING),
        "Rank 1 on node1 cannot use the native core: it was not built. ",
        "mpidist/native/build_library.py   # on node1; docs/install.md",
    ),
    "no native core between nodes": (
        *(check_native_core, job({}, NO_CORE_BETWEEN, hosts=PAIR), WARNING),
        "Rank 1 on node1 cannot use the native core: it cannot call MPI: undefined symbol: MPI_Test. ",
        "--no-binary=mpi4py mpi4py   # on node1; docs/install.md",
    ),
    "native core turned off": (
        *(check_native_core, job(CORE_OFF, CORE_OFF), WARNING),
        *("Ranks 0-1 on node0 cannot use", "unset MPIDIST_NATIVE"),
    ),
    "more ranks than cores": (
        *(check_cores, job(*FEW_CORES), WARNING),
        *("4 ranks share 2 cores on node0", "mpidist launch -n 2 train.py"),
    ),
    "more ranks than the container's limit": (
        *(check_cores, job(*[made.cores(*range(8), quota=1.5)] * 4, launcher="srun"), WARNING),
        *("4 ranks share 2 cores on node0", "srun --mpi=pmix -n 2 --cpu-bind=none"),
    ),
    "more ranks than cores on one host": (
        *(check_cores, job(*FEW_CORES, hosts=["node0", "node1", "node1", "node1"]), WARNING),
        *("3 ranks share 2 cores on node1", "mpirun -n 3 --bind-to none -x "),
    ),
    "bound to one core each": (
        *(check_cores, job(*BOUND), WARNING),
        *("Ranks 0-1 may run on one core only, of 8", "OMP_NUM_THREADS=4 python -m mpidist launch -n 2 train.py"),
    ),
    "bound to one core each in a batch job": (
        *(check_cores, job(*BOUND, batch_system="PBS"), WARNING),
        *("one core only, of 8", "mpirun -n 2 --bind-to none -x OMP_NUM_THREADS=4 python train.py"),
    ),
    "bound to the same core": (
        *(check_cores, job(made.cores(3), made.cores(3)), WARNING),
        *("Ranks 0-1 on node0 are bound to core 3 of 8, which they share", "mpidist launch -n 2 "),
    ),
    "one process bound to one core": (
        *(check_cores, job(made.cores(3), launcher=None), WARNING),
        *("Rank 0 may run on one core only", "taskset --cpu-list 0-7 python train.py"),
    ),
    "threads without a limit": (
        *(check_cores, job(UNLIMITED, UNLIMITED), WARNING),
        *("all together start 16", "OMP_NUM_THREADS=4 python -m mpidist launch -n 2"),
    ),
    "little shared memory": (
        *(check_shared_memory, job({}, LITTLE_SHM, hosts=PAIR), WARNING),
        *("/dev/shm has 1 MiB free on node1, less than 256 MiB", "docker run --shm-size=8g"),
    ),
    "no shared memory": (
        *(check_shared_memory, job({"shared_memory": None}), WARNING),
        *("has 0 B free", "mount -o remount,size=8g"),
    ),
    "no CuPy": (
        *(check_gpus, job({"gpus": GpuFacts(True, problem=NO_CUPY)}), WARNING),
        *(NO_CUPY, "python -m pip install -e '/src[cuda13]'"),
    ),
    "no NCCL": (
        *(check_gpus, job(NO_NCCL), WARNING),
        *("Rank 0 on node0: no NCCL", "python -m pip install nvidia-nccl-cu13"),
    ),
    "missing GPUs that a launcher hands out": (
        *(check_gpus, job({"gpus": GpuFacts(variable="1")}), WARNING),
        *("CUDA_VISIBLE_DEVICES=1, but node0 has no NVIDIA driver", "nvidia-smi   # on node0"),
    ),
    "ranks with and without GPUs": (
        *(check_gpus, job(TWO_GPUS, {}, hosts=PAIR), ERROR),
        *("Rank 0 sees GPUs, but rank 1 (on node1) none", "unset CUDA_VISIBLE_DEVICES; mpirun"),
    ),
    "ranks with and without GPUs under srun": (
        *(check_gpus, job(TWO_GPUS, {}, launcher="srun"), ERROR),
        *("Rank 0 sees GPUs", "srun --mpi=pmix --gpus-per-node=2 --gpu-bind=none -n 2"),
    ),
    "ranks with and without GPUs under flux": (
        *(check_gpus, job(TWO_GPUS, {}, launcher="flux run"), ERROR),
        *("Rank 0 sees GPUs", "flux run -o pmi=pmix -o gpu-affinity=off -n 2"),
    ),
    "ranks that share a GPU": (
        *(check_gpus, job(*[TWO_GPUS] * 3), WARNING),
        *("Ranks 0,2 on node0 share GPU a. NCCL refuses that", "mpirun -n 2 python train.py"),
    ),
    "ranks of several GPUs": (
        *(check_gpus, job(*[made.gpus("a", "b", "c", "d")] * 2, hosts=PAIR, launcher="srun"), WARNING),
        *("Rank 0 on node0 has 4 GPUs. Between nodes the first", "srun --mpi=pmix -n 8"),
    ),
    "slices of a GPU": (
        *(check_gpus, job(MIG, MIG), WARNING),
        *("Ranks 0-1 on node0 have slices (MIG) of GPU a. NCCL", "mpirun -n 1"),
    ),
    "cores far from the GPU": (
        *(check_gpus, job(*CROSSED), WARNING),
        "Rank 0 on node0 runs on cores 4-7, but its GPU a is next to cores 0-3",
        "mpirun -n 2 --bind-to none",
    ),
    "cores far from the GPU under srun": (
        *(check_gpus, job(*CROSSED, launcher="srun"), WARNING),
        *("is next to cores 0-3", "srun --mpi=pmix --distribution=block:block --mem-bind=local -n 2"),
    ),
    "slow network of NCCL": (
        *(check_gpus, job(SLOW_NET, SLOW_NET, hosts=PAIR), WARNING),
        *("NCCL uses TCP sockets between nodes, without an error: on node0 cxi0 is there", "load aws"),
    ),
    "too few ranks for MPIDIST_JOBS": (
        *(check_settings, jobs("worker:7", {}, {}), ERROR),
        *("MPIDIST_JOBS has 7 worker = 7 tasks, and there are 2 ranks", "unset MPIDIST_JOBS"),
    ),
    "unknown task in MPIDIST_JOBS": (
        *(check_settings, jobs("boss:7", {}, launcher=None), ERROR),
        *("task type 'boss'", "unset MPIDIST_JOBS"),
    ),
    "wrong setting": (
        *(check_settings, job({}, {}, wrong_settings={"MPIDIST_TIMEOUT": WRONG}), ERROR),
        *(WRONG, "unset MPIDIST_TIMEOUT"),
    ),
    "misspelt setting": (
        *(check_settings, job({}, unknown_settings=("MPIDIST_TIMEOUTS",)), WARNING),
        "MPIDIST_TIMEOUTS is no setting of mpidist. Did you mean MPIDIST_TIMEOUT?",
        'export MPIDIST_TIMEOUT="$MPIDIST_TIMEOUTS"; unset MPIDIST_TIMEOUTS',
    ),
    "unknown setting": (
        *(check_settings, job({}, unknown_settings=("MPIDIST_Q",)), WARNING),
        *("MPIDIST_Q is no setting", "unset MPIDIST_Q"),
    ),
    "tuning file for other ranks": (
        *(check_table, tuned("t has no table for that"), WARNING),
        *("MPIDIST_TUNING_FILE: t has no table", "mpidist tune --out"),
    ),
    "tuning file that cannot be read": (
        *(check_table, tuned("t is not JSON", "t cannot be used"), ERROR),
        *("MPIDIST_TUNING_FILE: t is not JSON", "unset MPIDIST_TUNING_FILE"),
    ),
    "Ethernet instead of InfiniBand": (
        *(check_network, on_ethernet("Open MPI"), WARNING),
        *("use eth0 although InfiniBand (mlx5_0) is active on node1", "export OMPI_MCA_pml=ucx"),
    ),
    "Ethernet with Intel MPI": (
        *(check_network, on_ethernet("Intel MPI"), WARNING),
        *("use eth0 although", "FI_PROVIDER=mlx"),
    ),
    "Ethernet with MPICH": (
        *(check_network, on_ethernet("MPICH"), WARNING),
        *("use eth0 although", "export UCX_NET_DEVICES=mlx5_0:1"),
    ),
    "one slow link": (
        *(check_links, linked(1e9, 1e8, 1.1e9), WARNING),
        "between node1 and node2 carries 100 MB/s, others 1000 MB/s",
        "ip -s link   # on node1 and on node2",
    ),
    "one slow link of known interfaces": (
        *(check_links, linked(1e9, 1e8, 1.1e9, in_use={"node1": ("ens5",), "node2": ("ens5",)}), WARNING),
        *("100 MB/s", "ethtool ens5; ip -s link show ens5   # on node1 and on node2"),
    ),
    "one slow link of different interfaces": (
        check_links,
        linked(1e9, 1e8, 1.1e9, in_use={"node1": ("mlx5_0",), "node2": ("ib0",)}, interfaces=INFINIBAND),
        *(WARNING, "100 MB/s", "ibstat mlx5_0   # on node1; on node2: ethtool ib0; ip -s link show ib0"),
    ),
    "one slow link in a Slurm job": (
        *(check_links, linked(1e9, 1e8, 1.1e9, batch_system="Slurm"), WARNING),
        *("100 MB/s", "on node2; or run without one of them: sbatch --exclude=node2 job.sbatch"),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_findings(name: str) -> None:
    check, facts, level, text, command = FOUND[name]
    only(list(check(facts)), level, text, command)


SILENT: dict[str, tuple[Check, JobFacts]] = {
    "loose barriers on one node": (check_mpi, job({}, {}, **LOOSE)),
    "no core between nodes, on one node": (check_native_core, job({}, NO_CORE_BETWEEN)),
    "two ranks on each host": (check_cores, job(*FEW_CORES, hosts=TWO_HOSTS)),
    "one core without another": (check_cores, job(made.cores(0, machine=1), launcher=None)),
    "threads of one process": (check_cores, job(UNLIMITED, launcher=None)),
    "hidden GPUs": (check_gpus, job({"gpus": GpuFacts(variable="")})),
    "a GPU each": (check_gpus, job(TWO_GPUS, TWO_GPUS)),
    "equal bus ids on two hosts": (check_gpus, job(made.gpus("a"), made.gpus("a"), hosts=PAIR)),
    "several GPUs on one host": (check_gpus, job(TWO_GPUS)),
    "cores next to the GPU": (check_gpus, job(*reversed(CROSSED))),
    "unbound ranks with GPUs": (check_gpus, job(BY_SOCKET, BY_SOCKET)),
    "slow network of NCCL on one host": (check_gpus, job(SLOW_NET)),
    "jobs of all ranks": (check_settings, jobs("ps:1,worker:1", {}, {})),
    "jobs without a launcher": (check_settings, jobs("worker:7", {}, launcher=None)),
    "tuning file on rank 0 alone": (check_settings, job({"settings": {"MPIDIST_TUNING_FILE": "t.json"}}, {})),
    "tuning file of one rank": (check_table, tuned("t is not JSON", ranks=1)),
    "InfiniBand in use": (check_network, replace(on_ethernet("MPICH"), in_use={"node1": ("mlx5_0",)})),
    "equal links": (check_links, linked(1e9, 8e8, 1.1e9)),
    "two links": (check_links, linked(1e9, 1e8)),
}


@pytest.mark.parametrize("name", SILENT)
def test_no_findings(name: str) -> None:
    check, facts = SILENT[name]
    assert list(check(facts)) == []


def test_labels_and_devices_of_gpus() -> None:
    assert labels(job(MIG, MIG)) == {0: ["MIG 1g.10gb of GPU a"], 1: ["MIG 1g.10gb of GPU a"]}
    assert devices(job(*[made.gpus("a", "b", "c")] * 2)) == {0: ("a", "b"), 1: ("c",)}


# The launcher's command -----------------------------------------------------------------------------------------


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
            *("LSF jsrun", "Open MPI"),
            "jsrun --nrs 1 --rs_per_host 1 --tasks_per_rs 2 --cpu_per_rs ALL_CPUS --bind none "
            "--env OMP_NUM_THREADS=4 python train.py",
        ),
        ("a PMIx launcher", "Open MPI", "OMP_NUM_THREADS=4 mpirun -n 2 python train.py"),
    ],
)
def test_unbound_ranks_by_launcher(launcher: str, vendor: str, command: str) -> None:
    assert check_cores(job(*BOUND, launcher=launcher, vendor=vendor, batch_system="Slurm"))[0].command == command


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
def test_different_settings_by_launcher(launcher: str, command: str) -> None:
    found = check_settings(job({"settings": {"MPIDIST_TIMEOUT": "9"}}, {}, {}, launcher=launcher))
    only(list(found), ERROR, "MPIDIST_TIMEOUT on rank 0 and on ranks 1-2 differ", command)


# Reach ----------------------------------------------------------------------------------------------------------


def unreached(*failed: tuple[int, int], silent: tuple[int, ...] = (), **changes: Any) -> JobFacts:
    """Two ranks on each of two hosts, without the reports of silent ones."""
    made_so = job({}, {}, {}, {}, hosts=TWO_HOSTS, **changes)
    ranks = tuple(None if rank in silent else facts for rank, facts in enumerate(made_so.ranks))
    hosts = {rank: host for rank, host in enumerate(TWO_HOSTS) if rank not in silent}
    return replace(made_so, ranks=ranks, reach=made.reach(4, failed, hosts, silent))


ALL_FOUR = ((0, 2), (0, 3), (1, 2), (1, 3))


@pytest.mark.parametrize(
    ("facts", "text", "command"),
    [
        (
            unreached((1, 2), (1, 3)),
            "Rank 1 on node0 and rank 2 on node1 and 1 more pair of these hosts exchanged no message within 10 s",
            "ping -c 3 10.0.0.2   # on node0",
        ),
        (
            unreached(*ALL_FOUR, silent=(2, 3), job_hosts=("node0", "node1")),
            *("No rank heard from ranks 2-3 on node1 within 10 s", "ping -c 3 node1   # on node0"),
        ),
        (
            unreached(*ALL_FOUR, silent=(2, 3)),
            *("No rank heard from ranks 2-3 within 10 s", "mpirun -n 4 sh -c 'echo"),
        ),
        (
            unreached(*ALL_FOUR, silent=(2, 3), launcher="srun"),
            *("No rank heard from ranks 2-3", "srun --mpi=pmix -n 4 sh -c 'echo $SLURM_PROCID $(hostname)'"),
        ),
        (
            unreached(*ALL_FOUR, silent=(2, 3), launcher="PALS mpiexec"),
            *("No rank heard", "mpiexec --pmi=pmix -n 4 sh -c 'echo $PALS_RANKID $(hostname)'"),
        ),
    ],
    ids=["pairs", "known host", "unknown host", "srun", "PALS"],
)
def test_unreached_ranks(facts: JobFacts, text: str, command: str) -> None:
    only(check_reach(facts), ERROR, text, command)


def test_each_pair_of_hosts_is_a_finding() -> None:
    assert [finding.text[:40] for finding in check_reach(unreached((0, 1), (1, 2)))] == [
        "Rank 0 on node0 and rank 1 on node0 exch",
        "Rank 1 on node0 and rank 2 on node1 exch",
    ]
    hosts = [f"n{rank:02}" for rank in range(12)]
    failed = [(rank, rank + 1) for rank in range(11)]
    found = check_reach(replace(job(*[{}] * 12, hosts=hosts), reach=made.reach(12, failed, dict(enumerate(hosts)))))
    assert len(found) == 9
    assert found[-1].text == "3 more pairs of hosts exchanged no message."


DOCKER = Interface("docker0", "172.17.0.1/16")


@pytest.mark.parametrize(
    ("vendor", "interfaces", "command"),
    [
        ("Open MPI", ("10.0.0.1/24", "10.0.0.2/24"), "export OMPI_MCA_btl_tcp_if_include=10.0.0.0/24"),
        ("Intel MPI", ("10.0.0.1/24", "10.0.0.2/24"), "export FI_TCP_IFACE=eth0"),
        ("MPICH", ("10.0.0.1/24", "10.0.0.2/24"), "export UCX_NET_DEVICES=eth0"),
        ("MPICH", ("10.0.1.1/24", "10.0.2.1/24"), "They have no IP network in common"),
    ],
)
def test_network_between_two_hosts(vendor: str, interfaces: tuple[str, str], command: str) -> None:
    changes = [{"interfaces": (DOCKER, Interface("eth0", network))} for network in interfaces]
    made_so = job(*changes, hosts=PAIR, vendor=vendor)
    found = check_reach(replace(made_so, reach=made.reach(2, [(0, 1)], {0: "node0", 1: "node1"})))
    only(found, ERROR, "Rank 0 on node0 and rank 1 on node1", command)
    assert "ping -c 3 " in found[0].command
