"""``python -m mpidist launch`` with the real mpirun of this environment, whichever it is; and what is typed wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mpidist.__main__ import main
from mpidist.cli.doctor.machine import THREAD_SETTINGS
from mpidist.cli.launch import additions, split_program
from mpidist.topology.launchers import BATCH_SYSTEMS, LAUNCHER_VARIABLES
from mpidist.topology.mpi_library import INTEL_MPI, MPICH, OPEN_MPI, MpiLibrary, find_library
from tests.support.ranks.jobs import child_environment
from tests.support.speed import scaled

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

DEADLINE_SECONDS = scaled(60)
# What the tests' own environment asks of Open MPI, and launch is to ask by itself.
HELP_OF_THE_TESTS = (
    "OMPI_ALLOW_RUN_AS_ROOT",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
    "PRTE_MCA_rmaps_default_mapping_policy",
    "PRTE_MCA_hwloc_default_binding_policy",
    "OMPI_MCA_rmaps_base_oversubscribe",
    "OMPI_MCA_hwloc_base_binding_policy",
)


def unaided() -> dict[str, str]:
    return {name: value for name, value in child_environment().items() if name not in HELP_OF_THE_TESTS}


def launch(*arguments: str, without: str = "", **change: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mpidist", "launch", *arguments],
        env={name: value for name, value in {**unaided(), **change}.items() if name != without},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train it.py"
    path.write_text(
        textwrap.dedent(
            """
            import os, sys
            from mpi4py import MPI
            world = MPI.COMM_WORLD
            cores = len(os.sched_getaffinity(0))
            told = world.gather((world.rank, cores))
            if world.rank == 0:
                print(told, sys.argv[1:], flush=True)
                sys.exit(int(sys.argv[1]))
            """
        )
    )
    return path


def test_more_ranks_than_cores_and_none_bound(program: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    ranks = cores + 1
    done = launch("-n", str(ranks), str(program), "0", "--help", "-n", "9")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{[(rank, cores) for rank in range(ranks)]} ['0', '--help', '-n', '9']"


def test_the_exit_code_is_that_of_the_program(program: Path) -> None:
    assert launch("-n", "2", str(program), "7").returncode == 7


def test_the_command_that_it_prints_does_the_same(program: Path) -> None:
    done = launch("-n", "2", str(program), "0")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("mpidist launch: ")]
    again = subprocess.run(
        ["sh", "-c", line.partition(": ")[2]],
        env=unaided(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout


def test_each_rank_has_one_thread_of_blas_unless_told_otherwise() -> None:
    show = ("-n", "2", "--", "sh", "-c", "echo threads $OMP_NUM_THREADS.")
    done = launch(*show, without="OMP_NUM_THREADS")
    assert done.stdout.count("threads 1.") == 2, done.stderr
    assert " OMP_NUM_THREADS=1 " in done.stderr
    done = launch(*show, OMP_NUM_THREADS="2")
    assert done.stdout.count("threads 2.") == 2, done.stderr
    assert "OMP_NUM_THREADS=" not in done.stderr


def test_a_hostfile_limits_the_ranks(tmp_path: Path) -> None:
    if find_library().vendor != OPEN_MPI:
        pytest.skip("only Open MPI counts the slots of a hostfile")
    (tmp_path / "hosts").write_text("localhost slots=3\n")
    show = (f"--hostfile={tmp_path}/hosts", "--", "sh", "-c", "echo rank of $OMPI_COMM_WORLD_SIZE, $MPIDIST_TIMEOUT.")
    done = launch(*show, MPIDIST_TIMEOUT="123", without="OMP_NUM_THREADS")
    assert done.stdout.count("rank of 3, 123.") == 3, done.stderr
    assert " -x MPIDIST_TIMEOUT -x OMP_NUM_THREADS " in done.stderr
    done = launch("-n", "4", *show)
    assert done.returncode != 0, "more ranks than slots"
    assert "not enough slots" in done.stderr


def test_unknown_options_reach_mpirun() -> None:
    done = launch("-n", "2", "--no-such-option", "train.py")
    assert done.returncode != 0
    assert "no-such-option" in done.stderr.partition("\n")[2], done.stderr


def test_a_module_and_a_command() -> None:
    done = launch("-n", "2", "-m", "mpi4py.run", "-c", "from mpi4py import MPI; print(MPI.COMM_WORLD.size)")
    assert "".join(done.stdout.split()) == "22", done.stderr  # the lines of two ranks may mingle
    done = launch("-n", "2", "--", "sh", "-c", "echo here")
    assert done.stdout.count("here") == 2, done.stderr


LISTENING = """
import os, mpidist
with mpidist.Communicator() as comm:
    comm.all_reduce("SUM", [1.0] * 1000)
    own = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)}
    rows = [row.split() for kind in ("tcp", "tcp6") for row in open("/proc/net/" + kind).readlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    told = comm.all_gather_object(listening)
    if comm.rank == 0:
        print(told)
"""


def test_ranks_on_one_machine_that_listen_nowhere(tmp_path: Path) -> None:
    if find_library().vendor != OPEN_MPI:
        pytest.skip("there is no such setting but Open MPI's")
    program = tmp_path / "listening.py"
    program.write_text(LISTENING)
    done = launch("-n", "2", str(program), OMPI_MCA_btl="^tcp,ofi")
    assert (done.returncode, done.stdout.strip()) == (0, "[[], []]"), done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_ranks(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "wait.py"
    script.write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.pid').touch()\n"
        f"time.sleep({2 * DEADLINE_SECONDS})\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "mpidist", "launch", "-n", "2", str(script)],
        env=unaided(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(ranks := [int(path.stem) for path in tmp_path.glob("*.pid")]) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(DEADLINE_SECONDS) != 0
        while any(Path("/proc", str(rank)).exists() for rank in ranks):
            assert time.monotonic() < deadline, "a rank is left behind"
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Hide launchers and batch systems around this session."""
    for name in (*LAUNCHER_VARIABLES, *(system.job for system in BATCH_SYSTEMS), *HELP_OF_THE_TESTS, "I_MPI_PIN"):
        monkeypatch.delenv(name, raising=False)
    for name in THREAD_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    return monkeypatch


@pytest.mark.parametrize(
    ("arguments", "options", "command"),
    [
        ("-n 4 train.py --lr 1 -n 3", "-n 4", f"{sys.executable} train.py --lr 1 -n 3"),
        ("-n 4 --bind-to core ./a/train.py", "-n 4 --bind-to core", f"{sys.executable} ./a/train.py"),
        ("-n 4 python3.11 -u train.py", "-n 4", "python3.11 -u train.py"),
        ("-n 4 /opt/bin/python train.py", "-n 4", "/opt/bin/python train.py"),
        ("-n 4 -m pytest tests", "-n 4", f"{sys.executable} -m pytest tests"),
        ("-n 4 -- ./a.out -x", "-n 4", "./a.out -x"),
        (
            "-n 2 -x A=python -x python --wdir /a/python b.py",
            "-n 2 -x A=python -x python --wdir /a/python",
            f"{sys.executable} b.py",
        ),
        ("-n 2 --host python --mca a b.py -m c", "-n 2 --host python --mca a b.py", f"{sys.executable} -m c"),
        (
            "-n 2 -genv A python -genv B=b.py --prefix=/python c.py",
            "-n 2 -genv A python -genv B=b.py --prefix=/python",
            f"{sys.executable} c.py",
        ),
        ("-n 2 --unknown A=b.py c.py", "-n 2 --unknown A=b.py", f"{sys.executable} c.py"),
        ("-n 2 --unknown value --flag c.py", "-n 2 --unknown value --flag", f"{sys.executable} c.py"),
        ("--hostfile hosts.py c.py", "--hostfile hosts.py", f"{sys.executable} c.py"),
        ("--hostfile=hosts.py c.py", "--hostfile=hosts.py", f"{sys.executable} c.py"),
        ("train.py -- more", "", f"{sys.executable} train.py -- more"),
    ],
)
def test_where_the_program_begins(arguments: str, options: str, command: str) -> None:
    assert split_program(arguments.split()) == (options.split(), command.split())


@pytest.mark.parametrize("arguments", ["-n 4", "-n 4 a.out", "-n 4 --", "-n 4 -m"])
def test_without_a_program(arguments: str) -> None:
    with pytest.raises(ValueError, match="no program in .*Pass a file that ends in .py, -m MODULE, or --") as caught:
        split_program(arguments.split())
    assert arguments in str(caught.value)


MPIRUN = Path("/opt/mpi/bin/mpirun")
FIVE = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "PRTE_MCA_hwloc_default_binding_policy": "none"}
FOUR = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none"}


@pytest.mark.parametrize(
    ("vendor", "version", "user", "variables", "flags"),
    [
        (OPEN_MPI, (5, 0, 11), 0, FIVE, ["--allow-run-as-root"]),
        (OPEN_MPI, (5, 0, 11), 1000, FIVE, []),
        (OPEN_MPI, (4, 1, 4), 0, FOUR, ["--allow-run-as-root"]),
        (MPICH, (5, 0, 2), 0, {}, []),
        (INTEL_MPI, (2021, 18, 1), 0, {"I_MPI_PIN": "off", "PATH": "/opt/mpi/bin:/usr/bin"}, []),
    ],
)
def test_what_each_library_needs(nowhere, vendor: str, version, user: int, variables, flags) -> None:
    nowhere.setattr(os, "geteuid", lambda: user)
    nowhere.setenv("PATH", "/usr/bin")
    assert additions(MpiLibrary(vendor, version, None), MPIRUN) == (variables, flags)


def test_what_is_set_stays_and_jobs_decide_for_themselves(nowhere) -> None:
    nowhere.setattr(os, "geteuid", lambda: 1000)
    nowhere.setenv("PRTE_MCA_hwloc_default_binding_policy", "core")
    library = MpiLibrary(OPEN_MPI, (5, 0, 11), None)
    assert list(additions(library, MPIRUN)[0]) == ["PRTE_MCA_rmaps_default_mapping_policy"]
    nowhere.delenv("OMP_NUM_THREADS")
    assert list(additions(library, MPIRUN)[0]) == ["OMP_NUM_THREADS", "PRTE_MCA_rmaps_default_mapping_policy"]
    nowhere.setenv("MKL_NUM_THREADS", "2")
    assert list(additions(library, MPIRUN)[0]) == ["PRTE_MCA_rmaps_default_mapping_policy"]
    nowhere.delenv("MKL_NUM_THREADS")
    nowhere.setenv("PBS_JOBID", "7.head")
    assert additions(library, MPIRUN) == ({}, [])


def test_named_hosts_get_the_settings(nowhere) -> None:
    nowhere.setattr(os, "geteuid", lambda: 1000)
    nowhere.setenv("MPIDIST_REPORT", "5")
    binding = {"PRTE_MCA_hwloc_default_binding_policy": "none"}
    passed = ["-x", "MPIDIST_REPORT", "-x", "OMP_NUM_THREADS"]
    open_mpi, mpich = MpiLibrary(OPEN_MPI, (5, 0, 11), None), MpiLibrary(MPICH, (5, 0, 2), None)
    assert additions(open_mpi, MPIRUN, has_hosts=True) == (binding, passed)
    assert additions(mpich, MPIRUN, has_hosts=True) == ({}, []), "MPICH passes all variables"


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        (["train.py"], {}, "has no number of ranks"),
        (["-n", "4"], {}, "there is no program in '-n 4'"),
        (["-n", "0", "train.py"], {}, "'-n 0' is no number of ranks. Pass a whole number of at least 1"),
        (["-n", "x", "train.py"], {}, "'-n x' is no number of ranks"),
        (["-n1", "train.py"], {}, "'-n1' has no number of ranks"),
        (["train.py", "-n", "2"], {}, "Options after the program, such as -n here, are passed to the program"),
        (["-n", "2", "python", "-"], {}, "Write the program to a file"),
        (["-n", "2", "/nowhere/python", "train.py"], {}, "'/nowhere/python' is not found"),
        (["-n", "2", "train.py"], {"PMI_RANK": "x", "PMI_SIZE": "2"}, "type: unset PMI_RANK"),
        (
            ["-n", "4", "train.py"],
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            "this process is a rank that Open MPI mpirun started",
        ),
        (
            ["-n", "4", "train.py"],
            {
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "1",
                "SLURM_STEP_ID": "0",
                "SLURM_PTY_PORT": "39465",
                "SLURM_JOB_ID": "7",
            },
            "a shell that srun --pty started. It holds the resources that mpirun would wait for. Use a shell of "
            "salloc. Type: exit; then: salloc -n 4",
        ),
        (["--hostfile", "/nowhere", "train.py"], {}, "the hostfile '/nowhere' is missing. Write a line for each host"),
        (["-n", "4", "train.py"], {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}, "mpi4py cannot load an MPI library"),
    ],
)
def test_what_is_typed_wrong(nowhere, capsys, arguments: list[str], environ: dict[str, str], said: str) -> None:
    for name, value in environ.items():
        nowhere.setenv(name, value)
    assert main(["launch", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_library_without_mpirun(nowhere, capsys, monkeypatch) -> None:
    monkeypatch.setattr(
        "mpidist.cli.launch.find_library", lambda: MpiLibrary("Cray MPICH", (8, 1), Path("/opt/cray/lib/libmpi.so"))
    )
    monkeypatch.setattr("mpidist.cli.launch.find_mpirun", lambda library: None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert main(["launch", "-n", "4", "train.py"]) == 2
    assert "Type: srun --mpi=cray_shasta -n 4 python train.py" in capsys.readouterr().err


def test_the_mpirun_is_that_of_the_python_that_runs(nowhere, capsys, tmp_path: Path) -> None:
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\necho no module named mpi4py here >&2\nexit 1\n")
    other.chmod(0o755)
    assert main(["launch", "-n", "2", str(other), "train.py"]) == 2
    said = capsys.readouterr().err
    assert f"under {other}: mpi4py cannot load an MPI library. It tried:\n    no module named mpi4py here" in said


def test_help(capsys) -> None:
    assert main(["launch", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m mpidist launch -n RANKS")
    assert main(["launch"]) == 2
