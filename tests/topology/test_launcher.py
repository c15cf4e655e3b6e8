"""Reading the launcher's environment, preparing it for MPI, and noticing N worlds of one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

from mpidist.core.errors import LaunchError
from mpidist.topology.launcher import (
    LauncherInfo,
    _needed_environment,
    check_world,
    cores_are_short,
    import_mpi,
    prepare_environment,
    read_launcher,
)
from mpidist.topology.mpi_library import library_of, loaded_library, no_library
from tests.support.ranks.jobs import child_environment, run_script
from tests.support.speed import scaled

# The environment of one process, made up or in a job of its own.
pytestmark = pytest.mark.one_rank

# What the third of four ranks, two on each of two hosts, was seen to have in a Slurm job.
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4"}
DAEMON_OF_MPIRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "2",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
DAEMON_OF_HYDRA = {
    **DAEMON_OF_MPIRUN,
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}

SRUN_INFO = LauncherInfo("srun", 2, 4, 0, 2, "SLURM_STEP_NUM_TASKS")
OPEN_MPI_INFO = LauncherInfo("Open MPI mpirun", 2, 4, 0, 2, "OMPI_COMM_WORLD_SIZE")
HYDRA_INFO = LauncherInfo("MPICH mpiexec", 2, 4, 0, 2, "PMI_SIZE")


# What mpidist sets for Open MPI.
SHOWN = ("OMPI_MCA_osc", "OMPI_MCA_btl", "OMPI_MCA_btl_tcp_flags", "OMPI_MCA_mpi_yield_when_idle")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, None, id="no-launcher"),
        pytest.param(BATCH_SCRIPT, None, id="plain-python-in-a-batch-script"),
        pytest.param(OPEN_MPI, OPEN_MPI_INFO, id="mpirun"),
        pytest.param({**BATCH_SCRIPT, **OPEN_MPI}, OPEN_MPI_INFO, id="mpirun-first-host-of-a-slurm-job"),
        pytest.param({**DAEMON_OF_MPIRUN, **OPEN_MPI}, OPEN_MPI_INFO, id="mpirun-other-host-of-a-slurm-job"),
        pytest.param(HYDRA, HYDRA_INFO, id="hydra"),
        pytest.param({**DAEMON_OF_HYDRA, **HYDRA}, HYDRA_INFO, id="hydra-in-a-slurm-job"),
        pytest.param(SRUN, SRUN_INFO, id="srun-none"),
        pytest.param({**SRUN, "PMIX_RANK": "2"}, SRUN_INFO, id="srun-pmix"),
        pytest.param({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "4"}, SRUN_INFO, id="srun-pmi2"),
        pytest.param(
            {"PMI_RANK": "0", "PMI_SIZE": "2"},
            LauncherInfo("MPICH mpiexec", 0, 2, None, None, "PMI_SIZE"),
            id="pmi-without-local-rank",
        ),
        pytest.param(
            {**DAEMON_OF_MPIRUN, "SLURM_NTASKS": "4"},
            LauncherInfo("srun", 0, 1, 0, 1, "SLURM_STEP_NUM_TASKS"),
            id="interactive-step-of-an-allocation-of-4",
        ),
        pytest.param({"OMPI_COMM_WORLD_SIZE": "4"}, None, id="size-without-rank"),
    ],
)
def test_each_launcher(environ: dict[str, str], expected: LauncherInfo | None) -> None:
    assert read_launcher(environ) == expected


@pytest.mark.parametrize(("node", "tasks"), [(0, 3), (1, 3), (2, 2), (3, 1)])
def test_tasks_of_each_node_of_an_uneven_step(node: int, tasks: int) -> None:
    info = read_launcher({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3(x2),2,1", "SLURM_NODEID": str(node)})
    assert info is not None
    assert info.local_size == tasks


@pytest.mark.parametrize("environ", [{**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": ""}, HYDRA, SRUN])
def test_cores_are_short_where_the_launcher_says_so(no_launcher, monkeypatch, environ: dict[str, str]) -> None:
    _set_launcher(monkeypatch, environ)
    local_size = read_launcher().local_size
    for cores in (1, 10_000):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cores=cores: set(range(cores)))
        assert cores_are_short() == (local_size is not None and local_size > cores)


def test_cores_are_not_short_without_launcher(no_launcher) -> None:
    assert not cores_are_short()


ON_MACOS = """
import os, runpy, sys, time
for module, name in ((os, "sched_getaffinity"), (os, "posix_fallocate"), (time, "CLOCK_BOOTTIME")):
    delattr(module, name)
"""


@pytest.mark.jobs
def test_two_ranks_train_as_on_macos(tmp_path: Path) -> None:
    program = f"""{ON_MACOS}
import mpidist, numpy
strategy = mpidist.MultiWorkerMirroredStrategy()
with strategy.scope():
    variable = mpidist.Variable(numpy.zeros(3))
    mpidist.Checkpoint(variable=variable).write(sys.argv[1])
print(*strategy.reduce("SUM", numpy.ones(2), axis=None))
"""
    env = {"MPIDIST_NATIVE": "0", "MPIDIST_FLIGHT_RECORD": str(tmp_path / "flight")}
    for _ in range(2):  # the second run replaces the checkpoint of the first
        done = run_script(program, 2, str(tmp_path / "checkpoint"), env=env)
        assert (done.returncode, done.stdout) == (0, "2.0 2.0\n" * 2), done.stderr


@pytest.mark.jobs
def test_doctor_runs_as_on_macos() -> None:
    program = f'{ON_MACOS}\nsys.argv = ["mpidist", "doctor"]\nrunpy.run_module("mpidist", run_name="__main__")\n'
    done = run_script(program, 2, env={"MPIDIST_NATIVE": "0"})
    assert "doctor: 2 ranks, 1 host" in done.stdout, done.stderr


def test_on_windows_the_import_says_wsl2() -> None:
    command = [sys.executable, "-c", "import sys; sys.platform = 'win32'; import mpidist"]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.endswith("ImportError: mpidist needs Linux or macOS. On Windows, use WSL2.\n")


def test_advice_on_macos_names_brew_and_conda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "brew install open-mpi" in no_library("no libmpi")
    assert "conda install -c conda-forge openmpi" in no_library("no libmpi")


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(LaunchError, match=r"OMPI_COMM_WORLD_SIZE='many'.*unset OMPI_COMM_WORLD_SIZE"):
        read_launcher({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "many"})


def test_under_fault_tolerance_mpi_does_not_wait_for_all_at_its_end(no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setenv("OMPI_MCA_mpi_ft_enable", "1")
    assert _needed_environment()["OMPI_MCA_async_mpi_finalize"] == "1"
    no_launcher.setenv("OMPI_MCA_mpi_ft_enable", "0")
    assert "OMPI_MCA_async_mpi_finalize" not in _needed_environment()


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Hide the launcher of this session."""
    for name in {*OPEN_MPI, *HYDRA, *SRUN, *SHOWN}:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def _set_launcher(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


def test_check_world_accepts_a_full_world_and_a_process_without_launcher(no_launcher) -> None:
    check_world(1)
    _set_launcher(no_launcher, BATCH_SCRIPT)
    check_world(1)
    _set_launcher(no_launcher, SRUN)
    check_world(4)
    check_world(8)  # a part of a heterogeneous job is told its own size only


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (SRUN, r"srun started 4 ranks \(SLURM_STEP_NUM_TASKS=4\).*has 1:.*srun --mpi=pm"),
        (OPEN_MPI, r"Open MPI mpirun started 4 ranks \(OMPI_COMM_WORLD_SIZE=4\).*has 1:.*mpirun"),
        (HYDRA, r"MPICH mpiexec started 4 ranks \(PMI_SIZE=4\).*has 1:.*env -u PMI_SIZE python"),
    ],
)
def test_check_world_refuses_worlds_of_one(no_launcher, environ: dict[str, str], said: str) -> None:
    _set_launcher(no_launcher, environ)
    with pytest.raises(LaunchError, match=said) as caught:
        check_world(1)
    assert str(library_of(MPI.Get_library_version(), None)) in str(caught.value)


@pytest.mark.jobs
def test_check_world_in_two_real_processes_of_a_foreign_launcher() -> None:
    """Each is a world of one of the real MPI; the variables are all that another MPI's launcher passes on."""
    script = "from mpidist.topology.launcher import check_world, import_mpi\n"
    script += "check_world(import_mpi().COMM_WORLD.Get_size())"
    for rank in "01":
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            env=child_environment({"PMI_RANK": rank, "PMI_SIZE": "2", "MPI_LOCALRANKID": rank})
            if MPI.Get_library_version().startswith("Open MPI")
            else child_environment({"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2"}),
            capture_output=True,
            text=True,
            timeout=scaled(60),
            check=False,
        )
        assert done.returncode == 1
        assert "LaunchError" in done.stderr
        assert "started 2 ranks" in done.stderr


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
STRATEGIES = ("MultiWorkerMirroredStrategy", "MirroredStrategy", "experimental.CentralStorageStrategy", "Communicator")


def _in_one_process(lines: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import mpidist\n" + lines],
        env=child_environment(variables),
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )


@pytest.mark.jobs
@pytest.mark.parametrize("made", STRATEGIES)
def test_a_strategy_under_torchrun_raises(made: str) -> None:
    done = _in_one_process(f"mpidist.{made}()", **TORCHRUN, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    assert done.returncode == 1
    said = done.stderr.replace("\n", " ")
    assert "LaunchError: torchrun started this process with RANK=1 and WORLD_SIZE=2" in said
    assert "mpirun, srun or `python -m mpidist launch -n 2 train.py`" in said


@pytest.mark.jobs
@pytest.mark.parametrize("variables", [{"WORLD_SIZE": "3"}, {"RANK": "0", "WORLD_SIZE": "3"}], ids=len)
def test_world_size_of_others_raises(variables: dict[str, str]) -> None:
    done = _in_one_process("mpidist.MultiWorkerMirroredStrategy()", **variables)
    assert done.returncode == 1
    assert "LaunchError: This process was started with" in done.stderr
    assert f"type: unset {' '.join(variables)}" in done.stderr


@pytest.mark.jobs
@pytest.mark.parametrize("size", ["1", "", "many"])
def test_world_size_of_one_process_is_fine(size: str) -> None:
    lines = "print(mpidist.MultiWorkerMirroredStrategy().num_replicas_in_sync)"
    done = _in_one_process(lines, **{**TORCHRUN, "RANK": "0", "WORLD_SIZE": size})
    assert done.stdout == "1\n", done.stderr


@pytest.mark.jobs
def test_strategies_of_one_process_ignore_torchrun() -> None:
    lines = "from mpi4py import MPI\nmpidist.OneDeviceStrategy('cpu:0')\n"
    lines += "mpidist.MirroredStrategy(['cpu:0', 'cpu:1'], communicator=MPI.COMM_SELF)"
    done = _in_one_process(lines, **TORCHRUN)
    assert done.returncode == 0, done.stderr


@pytest.mark.jobs
def test_children_inherit_world_size_safely() -> None:
    """A child that uses mpidist alone, without the launcher's variables of its parent."""
    done = run_script(
        """
        import os, subprocess, sys
        import mpidist
        from mpidist.torch.variables import set_variables
        set_variables()
        assert os.environ["WORLD_SIZE"] == str(mpidist.size()) == "2"
        launcher = ("OMPI_", "PMI", "PRTE_", "HYD")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
        lines = "import mpidist; print(mpidist.MultiWorkerMirroredStrategy().num_replicas_in_sync)"
        subprocess.run([sys.executable, "-c", lines], env=inherited, check=True)
        """,
        2,
    )
    assert done.stdout.split() == ["1", "1"], done.stderr


@pytest.mark.jobs
def test_check_world_under_the_real_mpirun() -> None:
    done = run_script(
        """
        from mpidist.topology.launcher import check_world, import_mpi, read_launcher
        world = import_mpi().COMM_WORLD
        check_world(world.Get_size())
        info = read_launcher()
        assert (info.rank, info.size) == (world.Get_rank(), world.Get_size()), info
        assert (info.local_rank, info.local_size) == (info.rank, info.size), info
        """,
        2,
    )
    assert done.returncode == 0, done.stderr


def _show_environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    prepare_environment()
    found = {name: os.environ[name] for name in SHOWN if name in os.environ}
    for name in found:
        monkeypatch.setenv(name, "")  # so that monkeypatch takes it out again
    return found


def test_environment_without_launcher(no_launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _show_environment(monkeypatch) == {"OMPI_MCA_osc": "^ucx"}


def test_messages_over_tcp_are_plainly_sent(no_launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    _set_launcher(monkeypatch, {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert _show_environment(monkeypatch)["OMPI_MCA_btl_tcp_flags"] == "send,inplace"


@pytest.mark.parametrize(("local_size", "found"), [("4", "^ofi"), ("2", None)])
def test_a_component_for_fabrics_is_left_out_where_all_ranks_are_on_one_node(
    no_launcher, monkeypatch: pytest.MonkeyPatch, local_size: str, found: str | None
) -> None:
    _set_launcher(monkeypatch, {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": local_size})
    assert _show_environment(monkeypatch).get("OMPI_MCA_btl") == found


def test_a_part_of_a_heterogeneous_job_may_have_other_nodes(no_launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    _set_launcher(monkeypatch, {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "SLURM_HET_SIZE": "2"})
    assert "OMPI_MCA_btl" not in _show_environment(monkeypatch)


@pytest.mark.parametrize("local_size", [1, 10_000])
def test_yield_only_with_more_ranks_than_cores(no_launcher, monkeypatch, local_size: int) -> None:
    _set_launcher(monkeypatch, {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size)})
    found = _show_environment(monkeypatch)
    assert found.get("OMPI_MCA_mpi_yield_when_idle") == (None if local_size == 1 else "1")


def test_what_the_user_has_set_stays(no_launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    _set_launcher(monkeypatch, {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "10000"})
    expected = dict.fromkeys(SHOWN, "0")
    _set_launcher(monkeypatch, expected)
    assert _show_environment(monkeypatch) == expected


@pytest.mark.jobs
def test_the_value_reaches_mpi_under_the_real_mpirun() -> None:
    """Open MPI's own report of its parameters: the value, and that it came from the environment."""
    if not MPI.Get_library_version().startswith("Open MPI"):
        pytest.skip("the report of parameters in force (mpi_show_mca_params) is Open MPI's")
    done = run_script(
        """
        import os
        from mpidist.topology.launcher import import_mpi, prepare_environment
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # two ranks, one core
        prepare_environment()
        import_mpi().COMM_WORLD.Barrier()
        """,
        2,
        env={"OMPI_MCA_mpi_show_mca_params": "environment"},
    )
    assert done.returncode == 0, done.stderr
    report = done.stdout + done.stderr
    assert "mpi_yield_when_idle=true" in report or "mpi_yield_when_idle=1" in report, report
    assert "osc=^ucx" in report, report


@pytest.mark.all_cores
def test_mpi_that_is_up_already_is_warned_about(no_launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    if not MPI.Get_library_version().startswith("Open MPI"):
        pytest.skip("only Open MPI reads these variables")
    prepare_environment()  # alone: nothing to say
    _set_launcher(monkeypatch, OPEN_MPI)
    with pytest.warns(RuntimeWarning, match=r"before 'from mpi4py import MPI'.*export OMPI_MCA_osc='\^ucx'"):
        prepare_environment()
    assert "OMPI_MCA_osc" not in os.environ
    monkeypatch.setenv("OMPI_MCA_osc", "^ucx")
    prepare_environment()


def test_import_mpi_returns_the_running_mpi() -> None:
    assert import_mpi() is MPI


@pytest.mark.jobs
def test_no_mpi_library_names_each_candidate(tmp_path: Path) -> None:
    (tmp_path / "libmpi.so.12").write_text("no library")
    script = "from mpidist.topology.launcher import import_mpi; import_mpi()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=child_environment({"MPI4PY_LIBMPI": f"/nowhere/libmpi.so:{tmp_path}"}),
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert done.returncode == 1
    assert "LaunchError: mpi4py cannot load an MPI library" in done.stderr
    assert "/nowhere/libmpi.so: cannot open shared object file" in done.stderr
    assert f"{tmp_path}/libmpi.so.12: " in done.stderr
    assert f"{tmp_path}/libmpi.so.40: cannot open shared object file" in done.stderr
    # No chain of tracebacks: mpi4py's own tells users nothing more.
    assert done.stderr.count("Traceback") == 1
    assert "[openmpi]'" in done.stderr
    assert "module load openmpi" in done.stderr


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("import mpi4py; mpi4py.rc.initialize = False", "MPI.Init_thread()"),
        ("from mpi4py import MPI; MPI.Finalize()", "MPI has been shut down"),
    ],
)
def test_mpi_that_does_not_run(lines: str, said: str) -> None:
    script = f"{lines}\nfrom mpidist.topology.launcher import import_mpi\nimport_mpi()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert done.returncode == 1
    assert said in done.stderr


def test_the_library_that_is_loaded_is_found() -> None:
    library = loaded_library()
    assert library is not None
    assert library.exists()
