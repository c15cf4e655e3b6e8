"""The start of MPI: its environment, worlds of one rank, and ranks that wait for one that never starts."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

from mpidist.core.errors import LaunchError
from mpidist.topology import cores_are_short, import_mpi, prepare_environment
from mpidist.topology.launchers import LauncherInfo, read_launcher
from mpidist.topology.mpi_library import library_of, no_library
from mpidist.topology.start import check_world, watch_start
from tests.elastic.test_run import needs_ulfm
from tests.support.ranks.jobs import child_environment, run_script
from tests.support.speed import deadlines, scaled
from tests.topology.test_launchers import BATCH_SCRIPT, HYDRA, MPIRUN, SRUN

# The environment of one process, made up or in a job of its own.
pytestmark = pytest.mark.one_rank

# Variables that mpidist sets for Open MPI.
SHOWN = ("OMPI_MCA_osc", "OMPI_MCA_btl", "OMPI_MCA_btl_tcp_flags", "OMPI_MCA_mpi_yield_when_idle")
ASYNC_FINALIZE = "OMPI_MCA_async_mpi_finalize"


def in_one_process(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", script]
    environment = child_environment(variables)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=scaled(60), check=False)


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Hide the launcher of this session."""
    for name in {*MPIRUN, *HYDRA, *SRUN, *SHOWN, ASYNC_FINALIZE}:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def set_variables(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


# Environment ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environ", [{**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": ""}, HYDRA, SRUN, {}])
def test_cores_are_short(no_launcher: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    set_variables(no_launcher, environ)
    info = read_launcher()
    local_size = None if info is None else info.local_size
    for cores in (1, 10_000):
        no_launcher.setattr(os, "sched_getaffinity", lambda process, cores=cores: set(range(cores)))
        assert cores_are_short() == (local_size is not None and local_size > cores)


def prepared(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> dict[str, str]:
    set_variables(monkeypatch, environ)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    prepare_environment()
    found = {name: os.environ[name] for name in (*SHOWN, ASYNC_FINALIZE) if name in os.environ}
    for name in found:
        monkeypatch.setenv(name, "")  # so that monkeypatch removes it
    return found


OSC = {"OMPI_MCA_osc": "^ucx"}
TCP = {**OSC, "OMPI_MCA_btl_tcp_flags": "send,inplace"}
YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, OSC),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, TCP),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "10000"}, {**TCP, **YIELD}),
        ({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, {**TCP, "OMPI_MCA_btl": "^ofi"}),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "SLURM_HET_SIZE": "2"}, TCP),
        ({"OMPI_MCA_mpi_ft_enable": "1"}, {**OSC, ASYNC_FINALIZE: "1"}),
        ({"OMPI_MCA_mpi_ft_enable": "0"}, OSC),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "10000", **dict.fromkeys(SHOWN, "0")}, dict.fromkeys(SHOWN, "0")),
    ],
    ids=["no launcher", "tcp", "oversubscribed", "one node", "heterogeneous", "fault tolerant", "off", "user's"],
)
def test_variables_for_open_mpi(
    no_launcher: pytest.MonkeyPatch, environ: dict[str, str], expected: dict[str, str]
) -> None:
    no_launcher.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    assert prepared(no_launcher, environ) == expected


needs_open_mpi = pytest.mark.skipif(
    not MPI.Get_library_version().startswith("Open MPI"), reason="only Open MPI reads these variables"
)


@needs_open_mpi
@pytest.mark.jobs
def test_variables_reach_mpi() -> None:
    program = """
    import os
    from mpidist.topology import import_mpi, prepare_environment
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # two ranks, one core
    prepare_environment()
    import_mpi().COMM_WORLD.Barrier()
    """
    done = run_script(program, 2, env={"OMPI_MCA_mpi_show_mca_params": "environment"})
    assert done.returncode == 0, done.stderr
    report = done.stdout + done.stderr
    assert "mpi_yield_when_idle=true" in report or "mpi_yield_when_idle=1" in report, report
    assert "osc=^ucx" in report, report


@needs_open_mpi
@pytest.mark.all_cores
def test_running_mpi_without_variables_warns(no_launcher: pytest.MonkeyPatch) -> None:
    prepare_environment()  # no warning for one process
    set_variables(no_launcher, MPIRUN)
    with pytest.warns(RuntimeWarning, match=r"before 'from mpi4py import MPI'.*export OMPI_MCA_osc='\^ucx'"):
        prepare_environment()
    assert "OMPI_MCA_osc" not in os.environ
    no_launcher.setenv("OMPI_MCA_osc", "^ucx")
    prepare_environment()


ON_MACOS = """
import os, runpy, sys, time
for module, name in ((os, "sched_getaffinity"), (os, "posix_fallocate"), (time, "CLOCK_BOOTTIME")):
    delattr(module, name)
"""
TRAINS = """
import mpidist, numpy
strategy = mpidist.MultiWorkerMirroredStrategy()
with strategy.scope():
    variable = mpidist.Variable(numpy.zeros(3))
    mpidist.Checkpoint(variable=variable).write(sys.argv[1])
print(*strategy.reduce("SUM", numpy.ones(2), axis=None))
"""


@pytest.mark.jobs
def test_two_ranks_train_as_on_macos(tmp_path: Path) -> None:
    env = {"MPIDIST_NATIVE": "0", "MPIDIST_FLIGHT_RECORD": str(tmp_path / "flight")}
    for _ in range(2):  # the second run replaces the checkpoint of the first
        done = run_script(ON_MACOS + TRAINS, 2, str(tmp_path / "checkpoint"), env=env)
        assert (done.returncode, done.stdout) == (0, "2.0 2.0\n" * 2), done.stderr


@pytest.mark.jobs
def test_doctor_runs_as_on_macos() -> None:
    program = f'{ON_MACOS}\nsys.argv = ["mpidist", "doctor"]\nrunpy.run_module("mpidist", run_name="__main__")\n'
    done = run_script(program, 2, env={"MPIDIST_NATIVE": "0"})
    assert "doctor: 2 ranks, 1 host" in done.stdout, done.stderr


def test_import_on_windows_names_wsl2() -> None:
    done = in_one_process("import sys; sys.platform = 'win32'; import mpidist")
    assert done.stderr.endswith("ImportError: mpidist needs Linux or macOS. On Windows, use WSL2.\n")


def test_advice_on_macos_names_brew_and_conda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "brew install open-mpi" in no_library("no libmpi")
    assert "conda install -c conda-forge openmpi" in no_library("no libmpi")


# MPI and its world ----------------------------------------------------------------------------------------------


def test_import_mpi_returns_the_running_mpi() -> None:
    assert import_mpi() is MPI


@pytest.mark.jobs
def test_missing_mpi_library_names_each_candidate(tmp_path: Path) -> None:
    (tmp_path / "libmpi.so.12").write_text("no library")
    script = "from mpidist.topology import import_mpi; import_mpi()"
    done = in_one_process(script, MPI4PY_LIBMPI=f"/nowhere/libmpi.so:{tmp_path}")
    assert done.returncode == 1
    assert "LaunchError: mpi4py cannot load an MPI library" in done.stderr
    assert "/nowhere/libmpi.so: cannot open shared object file" in done.stderr
    assert f"{tmp_path}/libmpi.so.12: " in done.stderr
    assert f"{tmp_path}/libmpi.so.40: cannot open shared object file" in done.stderr
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
def test_mpi_that_does_not_run_raises(lines: str, said: str) -> None:
    done = in_one_process(f"{lines}\nfrom mpidist.topology import import_mpi\nimport_mpi()")
    assert done.returncode == 1
    assert said in done.stderr


def test_check_world_accepts_a_full_world(no_launcher: pytest.MonkeyPatch) -> None:
    check_world(1)
    set_variables(no_launcher, BATCH_SCRIPT)
    check_world(1)
    set_variables(no_launcher, SRUN)
    check_world(4)
    check_world(8)  # a part of a heterogeneous job knows only its own size


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (SRUN, r"srun started 4 ranks \(SLURM_STEP_NUM_TASKS=4\).*has 1:.*srun --mpi=pm"),
        (MPIRUN, r"Open MPI mpirun started 4 ranks \(OMPI_COMM_WORLD_SIZE=4\).*has 1:.*mpirun"),
        (HYDRA, r"MPICH mpiexec started 4 ranks \(PMI_SIZE=4\).*has 1:.*env -u PMI_SIZE python"),
    ],
)
def test_worlds_of_one_rank_raise(no_launcher: pytest.MonkeyPatch, environ: dict[str, str], said: str) -> None:
    set_variables(no_launcher, environ)
    with pytest.raises(LaunchError, match=said) as caught:
        check_world(1)
    assert str(library_of(MPI.Get_library_version(), None)) in str(caught.value)


@pytest.mark.jobs
@pytest.mark.parametrize("rank", ["0", "1"])
def test_each_process_of_a_foreign_launcher_raises(rank: str) -> None:
    """The MPI is real. The variables are all that the launcher of another MPI passes on."""
    foreign = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2"}
    if MPI.Get_library_version().startswith("Open MPI"):
        foreign = {"PMI_RANK": rank, "PMI_SIZE": "2", "MPI_LOCALRANKID": rank}
    done = in_one_process("import mpidist; mpidist.size()", **foreign)
    assert done.returncode == 1
    assert "LaunchError" in done.stderr
    assert "started 2 ranks" in done.stderr


@pytest.mark.jobs
def test_world_under_mpirun() -> None:
    done = run_script(
        """
        import mpidist
        from mpidist.topology.launchers import read_launcher
        info = read_launcher()
        assert (info.rank, info.size) == (mpidist.rank(), mpidist.size()), info
        assert (info.local_rank, info.local_size) == (info.rank, info.size), info
        """,
        2,
    )
    assert done.returncode == 0, done.stderr


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
STRATEGIES = ("MultiWorkerMirroredStrategy", "MirroredStrategy", "experimental.CentralStorageStrategy", "Communicator")


@pytest.mark.jobs
@pytest.mark.parametrize("made", STRATEGIES)
def test_strategy_under_torchrun_raises(made: str) -> None:
    variables = {**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    done = in_one_process(f"import mpidist\nmpidist.{made}()", **variables)
    assert done.returncode == 1
    said = done.stderr.replace("\n", " ")
    assert "LaunchError: torchrun started this process with RANK=1 and WORLD_SIZE=2" in said
    assert "mpirun, srun or `python -m mpidist launch -n 2 train.py`" in said


SIZE = "import mpidist\nprint(mpidist.MultiWorkerMirroredStrategy().num_replicas_in_sync)"


@pytest.mark.jobs
@pytest.mark.parametrize("variables", [{"WORLD_SIZE": "3"}, {"RANK": "0", "WORLD_SIZE": "3"}], ids=len)
def test_world_size_above_1_raises(variables: dict[str, str]) -> None:
    done = in_one_process(SIZE, **variables)
    assert done.returncode == 1
    assert "LaunchError: This process was started with" in done.stderr
    assert f"type: unset {' '.join(variables)}" in done.stderr


@pytest.mark.jobs
@pytest.mark.parametrize("size", ["1", "", "many"])
def test_world_size_of_one_process_is_valid(size: str) -> None:
    done = in_one_process(SIZE, **{**TORCHRUN, "RANK": "0", "WORLD_SIZE": size})
    assert done.stdout == "1\n", done.stderr


@pytest.mark.jobs
def test_strategies_of_one_process_ignore_torchrun() -> None:
    lines = "import mpidist\nfrom mpi4py import MPI\nmpidist.OneDeviceStrategy('cpu:0')\n"
    lines += "mpidist.MirroredStrategy(['cpu:0', 'cpu:1'], communicator=MPI.COMM_SELF)"
    done = in_one_process(lines, **TORCHRUN)
    assert done.returncode == 0, done.stderr


@pytest.mark.jobs
def test_children_inherit_world_size_safely() -> None:
    """A child that uses mpidist alone, without the launcher's variables of its parent."""
    done = run_script(
        f"""
        import os, subprocess, sys
        import mpidist
        from mpidist.torch.variables import set_variables
        set_variables()
        assert os.environ["WORLD_SIZE"] == str(mpidist.size()) == "2"
        launcher = ("OMPI_", "PMI", "PRTE_", "HYD")
        inherited = {{name: value for name, value in os.environ.items() if not name.startswith(launcher)}}
        subprocess.run([sys.executable, "-c", {SIZE!r}], env=inherited, check=True)
        """,
        2,
    )
    assert done.stdout.split() == ["1", "1"], done.stderr


# Ranks that never start -----------------------------------------------------------------------------------------

BEFORE = """
import os, signal, sys
import mpidist
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    {act}
{start}
print("started")
"""
LIMITS = deadlines(2, 1)
FAULT_TOLERANT = ("--with-ft", "ulfm")  # otherwise mpirun may notice, and end the job


@needs_ulfm
@pytest.mark.jobs
@pytest.mark.parametrize(
    ("act", "start"),
    [
        ("sys.exit()", "mpidist.MultiWorkerMirroredStrategy()"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "from mpi4py import MPI"),
    ],
    ids=["a rank that exits", "a rank that is killed"],
)
def test_ranks_report_one_that_never_starts(act: str, start: str) -> None:
    job = run_script(BEFORE.format(act=act, start=start), 3, env=LIMITS, flags=FAULT_TOLERANT)
    assert "started" not in job.stdout
    for rank in (0, 2):
        assert f"mpidist: rank {rank} of 3 on host " in job.stderr
    for said in ("", ", and ends"):
        assert len(re.findall(rf"has waited [\d.]+ s for MPI to start{said}: another", job.stderr)) == 2, job.stderr
    assert "Traceback" not in job.stderr


@needs_ulfm
@pytest.mark.jobs
def test_program_from_stdin_is_explained() -> None:
    # Only rank 0 gets standard input. Without a program the other ranks end at once.
    program = BEFORE.format(act="sys.exit()", start="mpidist.MultiWorkerMirroredStrategy()")
    job = run_script(f"import sys\nsys.argv = ['-']\n{program}", 2, env=LIMITS, flags=FAULT_TOLERANT)
    assert "rank 0 of 2 on host " in job.stderr
    assert "the program came from standard input, which Open MPI mpirun passes to rank 0 alone" in job.stderr
    assert "name the file: mpirun -n 2 python train.py" in job.stderr


@pytest.mark.jobs
def test_no_report_if_all_ranks_start() -> None:
    warn_after = scaled(3)
    program = f"import mpidist, time\nmpidist.MultiWorkerMirroredStrategy().close()\ntime.sleep({warn_after})"
    job = run_script(program, 2, env=deadlines(20, warn_after))
    assert (job.returncode, job.stdout, job.stderr) == (0, "", "")


IN_ONE_PROCESS = """
import os, signal, sys
from mpidist.topology.launchers import LauncherInfo
from mpidist.topology.start import watch_start
signal.signal(signal.SIGCHLD, signal.{handling})
watch_start(LauncherInfo("Open MPI mpirun", 0, 2, 0, 2, "OMPI_COMM_WORLD_SIZE"))
before = len(os.listdir("/proc/self/fd"))
{change}
try:
    from mpi4py import MPI
except {error}:
    print("raised")
assert len(os.listdir("/proc/self/fd")) {compared} before
print("MPI" in globals())
"""


@pytest.mark.jobs
@pytest.mark.parametrize("handling", ["SIG_DFL", "SIG_IGN"])
def test_watchdog_ends_if_mpi_cannot_be_loaded(handling: str) -> None:
    program = IN_ONE_PROCESS.format(handling=handling, change="", error="RuntimeError", compared="==")
    done = in_one_process(program, MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert (done.returncode, done.stdout) == (0, "raised\nFalse\n"), done.stderr


@pytest.mark.jobs
def test_mpi_starts_unwatched_if_fork_fails() -> None:
    change = "def refused():\n    raise BlockingIOError\nos.fork = refused"
    done = in_one_process(IN_ONE_PROCESS.format(handling="SIG_DFL", change=change, error="OSError", compared=">="))
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_find_spec_keeps_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI")
    watch_start(LauncherInfo("Open MPI mpirun", 0, 2, 0, 2, "OMPI_COMM_WORLD_SIZE"))
    for _ in range(2):
        spec = importlib.util.find_spec("mpi4py.MPI")
        assert spec is not None
        assert "create_module" in vars(spec.loader)


# In place of MPICH, whose MPI_Init aborts under this mpirun.
MPICH_STAND_IN = """
#include <string.h>
int MPI_Get_library_version(char *text, int *n) { strcpy(text, "MPICH Version:      5.0.2"); *n = 25; return 0; }
"""


@pytest.mark.jobs
def test_mpich_under_the_mpirun_of_open_mpi(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler; type: apt-get install gcc")
    source, library = tmp_path / "mpi.c", tmp_path / "libmpi.so.12"
    source.write_text(MPICH_STAND_IN)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    # In a process without MPI: Open MPI loads the PMIx that MPICH lacks.
    program = f"""
from mpidist.topology.launchers import LauncherInfo
from mpidist.topology.start import check_library
check_library(LauncherInfo("Open MPI mpirun", 0, 2, 0, 2, "OMPI_COMM_WORLD_SIZE"), {str(library)!r})
"""
    done = in_one_process(program)
    said = f"started 2 ranks, but mpi4py loaded MPICH 5.0.2 from {library}, which cannot join"
    assert f"LaunchError: Open MPI mpirun {said}" in done.stderr


FIRST_ALONE = """
import time, mpidist
from mpi4py import MPI
if MPI.COMM_WORLD.Get_rank() == 0:
    strategy = mpidist.MultiWorkerMirroredStrategy()
else:
    time.sleep(60)                                      # line 7
"""


@pytest.mark.jobs
def test_rank_without_strategy_is_named_with_its_line() -> None:
    job = run_script(FIRST_ALONE, 2, env=deadlines(3, 1))
    assert job.returncode != 0
    assert re.search(r"rank 0 of 2 has waited \d+ s for the other ranks in making the first strategy", job.stderr)
    assert "rank 1 has not made a strategy or communicator; it is at " in job.stderr
    assert ":7 (<module>)" in job.stderr


@pytest.mark.jobs
def test_rank_whose_program_has_ended_is_named() -> None:
    job = run_script(FIRST_ALONE.replace("time.sleep(60)", "pass"), 2, env=deadlines(3))
    assert job.returncode != 0
    assert "rank 1 gave no answer: its program has ended, it has not imported mpidist" in job.stderr


@pytest.mark.jobs
def test_program_receives_its_own_messages() -> None:
    program = """
    import time, mpidist
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    if world.rank == 0:
        world.send("hello", 1)
        time.sleep(1.5)
    else:
        assert world.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG) == "hello"
    mpidist.Communicator().close()
    print("done")
    MPI.Finalize()
    """
    job = run_script(program, 2, env={"MPIDIST_WARN_AFTER": "0.5"})
    assert job.returncode == 0, job.stderr
    assert job.stdout.split() == ["done"] * 2
