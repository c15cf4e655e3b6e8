"""Launchers by their variables, the commands for each of them, and Slurm's lists."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.core.errors import LaunchError
from mpidist.topology.launchers import (
    LauncherInfo,
    command_for,
    expand_hostlist,
    expand_tasks_per_node,
    one_world,
    read_batch_system,
    read_launcher,
)
from mpidist.topology.mpi_library import CRAY_MPICH, INTEL_MPI, MPICH, OPEN_MPI, MpiLibrary

# Without a job: the environments are made up.
pytestmark = pytest.mark.one_rank

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "2",
}
# The variables of Slurm, Open MPI and MPICH were recorded. No job has run under the next four systems yet.
#
# PBS, qsub(1B), https://github.com/openpbs/openpbs/blob/master/doc/man1/qsub.1B
#   PBS_JOBID: "Job identifier given by PBS when the job is submitted. Created upon execution."
#   PBS_NODEFILE: "Name of file containing the list of nodes assigned to the job. Created upon execution."
# LSF, https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=variables-environment-set-job-execution
#   LSB_JOBID: "Job ID assigned by LSF."
#   "LSF automatically places the allocated hosts for a job into the $LSB_HOSTS and $LSB_MCPU_HOSTS environment
#   variables." (Using Platform LSF HPC, 7.3, Automatic generation of the job host file)
# jsrun of LSF's Job Step Manager, which IBM's manual does not list. Lightning documents it,
# https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch.plugins.environments.LSFEnvironment.html
#   JSM_NAMESPACE_RANK: "The global rank for the task. This environment variable is set by jsrun"
#   JSM_NAMESPACE_SIZE: "The world size for the task." JSM_NAMESPACE_LOCAL_RANK: "The node local rank for the task."
# Flux, flux-environment(7), https://github.com/flux-framework/flux-core/blob/master/doc/man7/flux-environment.rst
#   FLUX_TASK_RANK: "The zero-origin, global rank for this task." FLUX_JOB_SIZE: "The number of tasks in the current
#   job." FLUX_TASK_LOCAL_ID: "The zero-origin, local (to the node) rank for this task." FLUX_JOB_NNODES: "The total
#   number of nodes hosting tasks on behalf of the current job." FLUX_URI: "In the job environment, it points to the
#   local broker responsible for the job." PMI_RANK, PMI_SIZE: "The pmi shell plugin sets these variables".
# PALS: HPE's manual, mpiexec(1), is not public. Programs for ALCF's Aurora read PALS_RANKID, PALS_LOCAL_RANKID and
#   PALS_LOCAL_SIZE. Open MPI, https://docs.open-mpi.org/en/v6.0.x-pre-release/launching-apps/pals.html: PALS "is
#   available on HPE systems which uses PBS/Torque for the resource manager. It supports a PMIx server".
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
FLUX = {"FLUX_TASK_RANK": "2", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_NNODES": "2"}
PALS = {"PALS_RANKID": "2", "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "2", "PALS_NODEID": "1"}
JSRUN = {
    "JSM_NAMESPACE_RANK": "2",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "0",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "PMIX_RANK": "2",
}
PBS = {"PBS_JOBID": "7.head", "PBS_NODEFILE": "/var/spool/pbs/aux/7.head"}
LSF = {"LSB_JOBID": "7", "LSB_HOSTS": "a a b b", "LSB_MCPU_HOSTS": "a 2 b 2"}
PMI = {"PMI_RANK": "2", "PMI_SIZE": "4"}
STEP = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4"}
# The third of four ranks, two on each of two hosts, recorded in a Slurm job.
SRUN = {
    **BATCH_SCRIPT,
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
# The daemon of mpirun or mpiexec on another host of a Slurm job.
DAEMON = {**BATCH_SCRIPT, **STEP, "SLURM_NTASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
SECOND_DAEMON = {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}

MPIRUN_INFO = LauncherInfo("Open MPI mpirun", 2, 4, 0, 2, "OMPI_COMM_WORLD_SIZE")
HYDRA_INFO = LauncherInfo("MPICH mpiexec", 2, 4, 0, 2, "PMI_SIZE")
FLUX_INFO = LauncherInfo("flux run", 2, 4, 0, None, "FLUX_JOB_SIZE")
SRUN_INFO = LauncherInfo("srun", 2, 4, 0, 2, "SLURM_STEP_NUM_TASKS")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (MPIRUN, MPIRUN_INFO),
        ({**BATCH_SCRIPT, **MPIRUN}, MPIRUN_INFO),
        ({**DAEMON, **MPIRUN}, MPIRUN_INFO),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({**HYDRA, "I_MPI_HYDRA_UUID": "89"}, LauncherInfo("Intel MPI mpiexec", 2, 4, 0, 2, "PMI_SIZE")),
        (HYDRA, HYDRA_INFO),
        ({**SECOND_DAEMON, **HYDRA}, HYDRA_INFO),
        (PMI, LauncherInfo("MPICH mpiexec", 2, 4, None, None, "PMI_SIZE")),
        (JSRUN, LauncherInfo("LSF jsrun", 2, 4, 0, 2, "JSM_NAMESPACE_SIZE")),
        (FLUX, FLUX_INFO),
        ({**FLUX, **PMI}, FLUX_INFO),
        ({**FLUX, "PMIX_RANK": "2"}, FLUX_INFO),
        ({**FLUX, **PALS}, FLUX_INFO),
        ({**FLUX, **STEP}, FLUX_INFO),
        ({**PALS, **PMI}, LauncherInfo("PALS mpiexec", 2, 4, 0, 2, "PMI_SIZE")),
        ({**PALS, "PMIX_RANK": "2"}, LauncherInfo("PALS mpiexec", 2, None, 0, 2, "PALS_RANKID")),
        (SRUN, SRUN_INFO),
        ({**SRUN, "PMIX_RANK": "2"}, SRUN_INFO),
        ({**SRUN, **PMI}, SRUN_INFO),
        ({**DAEMON, "SLURM_NTASKS": "4"}, LauncherInfo("srun", 0, 1, 0, 1, "SLURM_STEP_NUM_TASKS")),
        (BATCH_SCRIPT, None),
        ({"PMIX_RANK": "2"}, LauncherInfo("a PMIx launcher", 2, None, None, None, "PMIX_RANK")),
        ({**PBS, "PBS_TASKNUM": "1"}, None),
        ({**PBS, **PALS, **PMI}, LauncherInfo("PALS mpiexec", 2, 4, 0, 2, "PMI_SIZE")),
        ({**PBS, **MPIRUN}, MPIRUN_INFO),
        (LSF, None),
        ({**LSF, **JSRUN}, LauncherInfo("LSF jsrun", 2, 4, 0, 2, "JSM_NAMESPACE_SIZE")),
        ({"FLUX_URI": "local:///run/flux"}, None),
    ],
)
def test_each_launcher(environ: dict[str, str], expected: LauncherInfo | None) -> None:
    assert read_launcher(environ) == expected


@pytest.mark.parametrize(("node", "tasks"), [(0, 3), (1, 3), (2, 2), (3, 1)])
def test_tasks_of_each_node_of_an_uneven_step(node: int, tasks: int) -> None:
    info = read_launcher({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3(x2),2,1", "SLURM_NODEID": str(node)})
    assert info is not None
    assert info.local_size == tasks


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({**HYDRA, "PMI_RANK": "4"}, "PMI_RANK=4 and PMI_SIZE=4 contradict each other"),
        ({**HYDRA, "MPI_LOCALRANKID": "2"}, "MPI_LOCALRANKID=2 and MPI_LOCALNRANKS=2 contradict"),
        ({**HYDRA, "PMI_RANK": " 1"}, "PMI_RANK=' 1': expected .*digits alone.*unset PMI_RANK"),
        ({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "many"}, "OMPI_COMM_WORLD_SIZE='many'.*unset OMPI_COMM_WORLD_SIZE"),
        ({**JSRUN, "JSM_NAMESPACE_LOCAL_RANK": "0_1"}, "JSM_NAMESPACE_LOCAL_RANK='0_1'"),
        ({**PALS, "PALS_RANKID": "-1"}, "PALS_RANKID='-1'.*unset PALS_RANKID"),
        (
            {**STEP, "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x"},
            r"SLURM_STEP_TASKS_PER_NODE: .*'2\(x'.*unset SLURM_STEP_TASKS_PER_NODE",
        ),
    ],
)
def test_malformed_variables_raise(environ: dict[str, str], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        read_launcher(environ)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, "Slurm"),
        (PBS, "PBS"),
        ({**PBS, **PALS}, "PBS"),
        (LSF, "LSF"),
        ({"FLUX_URI": "local:///run/flux", "SLURM_JOB_ID": "7"}, "Flux"),
    ],
)
def test_batch_systems(environ: dict[str, str], name: str | None) -> None:
    found = read_batch_system(environ)
    assert (None if found is None else found.name) == name
    # Flux's initial program has no variable with the hosts.
    assert found is None or name in ("Slurm", "Flux") or found.hosts in environ


SHELL = {"SLURM_PTY_PORT": "39465", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("launcher", "vendor", "environ", "command"),
    [
        ("srun", OPEN_MPI, {}, "srun --mpi=pmix"),
        ("srun", OPEN_MPI, {"SLURM_MPI_TYPE": "none"}, "srun --mpi=pmix"),
        ("srun", OPEN_MPI, {"SLURM_MPI_TYPE": "pmi2"}, "srun --mpi=pmix"),
        ("srun", OPEN_MPI, {"SLURM_MPI_TYPE": "pmix"}, None),
        ("srun", OPEN_MPI, {"SLURM_MPI_TYPE": "pmix_v4"}, None),
        ("srun", MPICH, {"SLURM_MPI_TYPE": "pmix"}, "srun --mpi=pmi2"),
        ("srun", INTEL_MPI, {}, "srun --mpi=pmi2"),
        ("srun", CRAY_MPICH, {}, "srun --mpi=cray_shasta"),
        ("flux run", OPEN_MPI, {}, "flux run -o pmi=pmix"),
        ("PALS mpiexec", OPEN_MPI, {}, "mpiexec --pmi=pmix"),
        ("MPICH mpiexec", OPEN_MPI, {}, None),
        ("Open MPI mpirun", MPICH, {}, None),
        ("LSF jsrun", MPICH, {}, None),
        ("srun", OPEN_MPI, SHELL, "srun --mpi=pmix --overlap"),
        ("srun", OPEN_MPI, {**SHELL, "SLURM_STEP_ID": "4294967290"}, "srun --mpi=pmix"),
    ],
)
def test_command_for_a_library(launcher: str, vendor: str, environ: dict[str, str], command: str | None) -> None:
    assert command_for(launcher, vendor, environ) == command


OVERLAP = "Type: srun --mpi=pmix --overlap -n 4 python ...", "; or after 'exit', in salloc, use the mpirun"


@pytest.mark.parametrize(
    ("environ", "library", "said"),
    [
        (
            {"SLURM_MPI_TYPE": "pmix", "SLURM_JOB_ID": "7"},
            MpiLibrary(OPEN_MPI, (5, 0, 11), None),
            ("It was srun --mpi=pmix already", "job inside the Slurm job with the launcher", "to Open MPI 5.0.11"),
        ),
        (
            {},
            MpiLibrary(MPICH, (5, 0, 2), None),
            ("Type: srun --mpi=pmi2 -n 4 python ...", "or use the mpirun that belongs to MPICH 5.0.2"),
        ),
        (SHELL, MpiLibrary(OPEN_MPI, (5, 0, 11), None), OVERLAP),
        (
            {**SHELL, "SLURM_MPI_TYPE": "pmix"},
            MpiLibrary(OPEN_MPI, (5, 0, 11), None),
            ("Start the job in salloc, after 'exit' from this shell, with the launcher of the library",),
        ),
    ],
)
def test_advice(
    environ: dict[str, str], library: MpiLibrary, said: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_MPI_TYPE", "FLUX_URI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    text = one_world(LauncherInfo("srun", 0, 4, 0, 2, "SLURM_STEP_NUM_TASKS"), library)
    assert all(part in text for part in said), text


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-2],m5,o[3-4,6,7-9]", ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[098-101,7]", ["n098", "n099", "n100", "n101", "n7"]),
        ("n[1-10]", [f"n{number}" for number in range(1, 11)]),
        ("r[0-1]c[2-3]", ["r0c2", "r0c3", "r1c2", "r1c3"]),
        ("gpu-a[1-2]-ib.site,login", ["gpu-a1-ib.site", "gpu-a2-ib.site", "login"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has ''"),
        ("n[1-2", "has 'n['"),
        ("n1-2]", "has 'n1-2]'"),
        ("n[1-[2-3]]", "has 'n['"),
        ("n[]", "has '' in the bracket '[]'"),
        ("n[1-]", "has '1-' in"),
        ("n[a-b]", "has 'a-b' in"),
        ("n[1,,2]", "has '' in the bracket '[1,,2]'"),
        ("n[3-1]", "has '3-1' in"),
        ("n1,,n2", "has ''"),
        ("n1,", "has ''"),
        (",n1", "has ''"),
        ("n1 n2", "has 'n1 n2'"),
        ("n[1-999999999999]", "more than 65536 of them, up to '1-999999999999'"),
        ("n[0-999][0-999]", "more than 65536 of them, up to 'n[0-999][0-999]'"),
        ("n[1\u0662]", "has '1\u0662' in"),
        ("(null)", "has '(null)'"),
        ("n[1-2],(null)", "has '(null)'"),
    ],
)
def test_malformed_host_lists_raise(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match="list of hosts") as caught:
        expand_hostlist(text)
    assert repr(text) in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        ",".join(f"n{number}" for number in range(70_000)),
        ",".join(f"rack{number}n[0-999]" for number in range(1200)),
        "n[" + ",".join(["0-65535"] * 1000) + "]",
        "n" + "[0-65535]" * 1000,
        "n[0-999999999999999999]",
    ],
    ids=["names", "parts", "items", "brackets", "range"],
)
def test_too_many_hosts_end_early(text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"the list of hosts .* has more than 65536 of them") as caught:
            expand_hostlist(text)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 1000


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 40), st.integers(1, 4)), min_size=1, max_size=4))
def test_ranges_keep_the_padding_of_their_start(ranges: list[tuple[int, int, int]]) -> None:
    text = ",".join(f"n[{low:0{width}d}-{low + more}]" for low, more, width in ranges)
    expected = [
        f"n{number:0{max(width, len(str(low)))}d}"
        for low, more, width in ranges
        for number in range(low, low + more + 1)
    ]
    assert expand_hostlist(text) == expected


@pytest.mark.parametrize(
    ("text", "tasks"), [("3(x2),2,1", [3, 3, 2, 1]), ("4", [4]), ("2(x2)", [2, 2]), ("1,2(x1)", [1, 2])]
)
def test_tasks_per_node(text: str, tasks: list[int]) -> None:
    assert expand_tasks_per_node(text) == tasks


@pytest.mark.parametrize("text", ["", "2(x)", "2(x0)", "x2", "2,,1", "2(x2", "-1", "2 (x2)", "2(x99999999)"])
def test_malformed_tasks_per_node_raise(text: str) -> None:
    with pytest.raises(ValueError, match="list of tasks per node") as caught:
        expand_tasks_per_node(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["1(x70000)", ",".join(["1(x60000)"] * 1000), "999999999(x9)"])
def test_too_many_tasks_end_early(text: str) -> None:
    with pytest.raises(ValueError, match="has more than 65536 nodes or 4194304 tasks") as caught:
        expand_tasks_per_node(text)
    assert len(str(caught.value)) < 1000
