"""The table of launch environments: each launcher by its variables, what to type, and no row left out."""

from __future__ import annotations

import pytest

from mpidist.core.errors import LaunchError
from mpidist.topology.environments import (
    BATCH_SYSTEMS,
    LAUNCHER_VARIABLES,
    LAUNCHERS,
    LauncherInfo,
    command_for,
    one_world,
    read_batch_system,
    read_launcher,
)
from mpidist.topology.mpi_library import CRAY_MPICH, INTEL_MPI, MPICH, OPEN_MPI, MpiLibrary

# The environment of one process, made up.
pytestmark = pytest.mark.one_rank

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
STEP = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({**HYDRA, "I_MPI_HYDRA_UUID": "89"}, LauncherInfo("Intel MPI mpiexec", 2, 4, 0, 2, "PMI_SIZE")),
        (HYDRA, LauncherInfo("MPICH mpiexec", 2, 4, 0, 2, "PMI_SIZE")),
        (JSRUN, LauncherInfo("LSF jsrun", 2, 4, 0, 2, "JSM_NAMESPACE_SIZE")),
        (FLUX, LauncherInfo("flux run", 2, 4, 0, None, "FLUX_JOB_SIZE")),
        ({**FLUX, "PMI_RANK": "2", "PMI_SIZE": "4"}, LauncherInfo("flux run", 2, 4, 0, None, "FLUX_JOB_SIZE")),
        ({**FLUX, "PMIX_RANK": "2"}, LauncherInfo("flux run", 2, 4, 0, None, "FLUX_JOB_SIZE")),
        ({**FLUX, **PALS}, LauncherInfo("flux run", 2, 4, 0, None, "FLUX_JOB_SIZE")),
        ({**FLUX, **STEP}, LauncherInfo("flux run", 2, 4, 0, None, "FLUX_JOB_SIZE")),
        ({**PALS, "PMI_RANK": "2", "PMI_SIZE": "4"}, LauncherInfo("PALS mpiexec", 2, 4, 0, 2, "PMI_SIZE")),
        ({**PALS, "PMIX_RANK": "2"}, LauncherInfo("PALS mpiexec", 2, None, 0, 2, "PALS_RANKID")),
        ({"PMIX_RANK": "2"}, LauncherInfo("a PMIx launcher", 2, None, None, None, "PMIX_RANK")),
        ({"PBS_JOBID": "7.head", "PBS_NODEFILE": "/x", "PBS_TASKNUM": "1"}, None),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 2"}, None),
        ({"FLUX_URI": "local:///run/flux"}, None),
    ],
)
def test_each_launcher(environ: dict[str, str], expected: LauncherInfo | None) -> None:
    assert read_launcher(environ) == expected


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({**HYDRA, "PMI_RANK": "4"}, "PMI_RANK=4 and PMI_SIZE=4 contradict each other"),
        ({**HYDRA, "MPI_LOCALRANKID": "2"}, "MPI_LOCALRANKID=2 and MPI_LOCALNRANKS=2 contradict"),
        ({**HYDRA, "PMI_RANK": " 1"}, "PMI_RANK=' 1': expected .*digits alone.*unset PMI_RANK"),
        ({**JSRUN, "JSM_NAMESPACE_LOCAL_RANK": "0_1"}, "JSM_NAMESPACE_LOCAL_RANK='0_1'"),
        ({**PALS, "PALS_RANKID": "-1"}, "PALS_RANKID='-1'.*unset PALS_RANKID"),
        (
            {**STEP, "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x"},
            r"SLURM_STEP_TASKS_PER_NODE: .*'2\(x'.*unset SLURM_STEP_TASKS_PER_NODE",
        ),
    ],
)
def test_variables_that_cannot_be(environ: dict[str, str], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        read_launcher(environ)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, "Slurm"),
        ({"PBS_JOBID": "7.head"}, "PBS"),
        ({"LSB_JOBID": "7"}, "LSF"),
        ({"FLUX_URI": "local:///run/flux", "SLURM_JOB_ID": "7"}, "Flux"),
    ],
)
def test_batch_systems(environ: dict[str, str], name: str | None) -> None:
    found = read_batch_system(environ)
    assert (None if found is None else found.name) == name


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
        ("srun", OPEN_MPI, {"SLURM_PTY_PORT": "39465", "SLURM_STEP_ID": "0"}, "srun --mpi=pmix --overlap"),
        ("srun", OPEN_MPI, {"SLURM_PTY_PORT": "39465", "SLURM_STEP_ID": "4294967290"}, "srun --mpi=pmix"),
    ],
)
def test_what_to_type(launcher: str, vendor: str, environ: dict[str, str], command: str | None) -> None:
    assert command_for(launcher, vendor, environ) == command


def test_advice_where_the_right_option_was_given_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_MPI_TYPE", "pmix")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("FLUX_URI", raising=False)
    info = LauncherInfo("srun", 0, 4, 0, 2, "SLURM_STEP_NUM_TASKS")
    said = one_world(info, MpiLibrary(OPEN_MPI, (5, 0, 11), None))
    assert "It was srun --mpi=pmix already" in said
    assert "inside the Slurm job with the launcher of the library" in said
    assert "that belongs to Open MPI 5.0.11" in said


def test_advice_names_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_MPI_TYPE", raising=False)
    said = one_world(LauncherInfo("srun", 0, 4, 0, 2, "SLURM_STEP_NUM_TASKS"), MpiLibrary(MPICH, (5, 0, 2), None))
    assert said.startswith("Type: srun --mpi=pmi2 -n 4 python ...")
    assert "or use the mpirun that belongs to MPICH 5.0.2" in said


def test_advice_in_a_shell_of_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_MPI_TYPE", raising=False)
    monkeypatch.setenv("SLURM_PTY_PORT", "39465")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    info = LauncherInfo("srun", 0, 4, 0, 3, "SLURM_STEP_NUM_TASKS")
    said = one_world(info, MpiLibrary(OPEN_MPI, (5, 0, 11), None))
    assert said.startswith("Type: srun --mpi=pmix --overlap -n 4 python ...")
    assert "; or after 'exit', in salloc, use the mpirun that belongs to Open MPI 5.0.11" in said
    monkeypatch.setenv("SLURM_MPI_TYPE", "pmix")
    said = one_world(info, MpiLibrary(OPEN_MPI, (5, 0, 11), None))
    assert "Start the job in salloc, after 'exit' from this shell, with the launcher of the library" in said


def test_every_variable_is_in_the_list() -> None:
    assert {name for row in LAUNCHERS.values() for name in (row.rank, row.size) if name} <= LAUNCHER_VARIABLES
    assert {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_PROCID", "PALS_RANKID", "PMIX_RANK"} <= LAUNCHER_VARIABLES
    assert {system.name for system in BATCH_SYSTEMS} == {"Slurm", "PBS", "LSF", "Flux"}
