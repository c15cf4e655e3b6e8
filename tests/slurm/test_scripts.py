"""The scripts of slurm/ as texts and without Slurm: alike, described, and clear about what is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks.jobs import run_script
from tests.support.speed import scaled

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

FOLDER = Path(__file__).resolve().parents[2] / "slurm"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))
EXPECTED = {
    "apptainer", "array", "benchmarks", "coordinator", "cpu_mpirun", "cpu_srun_pmi2", "cpu_srun_pmix", "evaluator",
    "factorization", "gpu_rank_per_gpu", "gpu_rank_per_node", "parameter_server", "preemptible", "torch",
}  # fmt: skip
ALIKE = "# From here on the scripts of this folder are alike.\n"
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "job", "SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "1"}


def name_of(script: Path) -> str:
    return script.stem


def bash(script: Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(
        ["bash", str(script)], cwd=folder, env=env, capture_output=True, text=True, timeout=scaled(30), check=False
    )


def test_all_are_there() -> None:
    assert {script.stem for script in SCRIPTS} == EXPECTED


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_its_shape(script: Path) -> None:
    text = script.read_text()
    header = text.partition("#SBATCH")[0]
    for word in ("Use it when:", "Runs:", "Type:", "Leaves:"):
        assert f"# {word}" in header
    assert f"slurm/{script.name}" in header
    assert f"#SBATCH --job-name={script.stem.replace('_', '-')}\n" in text
    assert len(re.findall(r"^# The one line to edit:\nCOMMAND=\(.*\)$", text, re.M)) == 1
    assert len(re.findall(r"^COMMAND=", text, re.M)) == 1
    assert len(re.findall(r"^LAUNCH=\(", text, re.M)) == 1
    assert max(map(len, text.splitlines())) <= 120


def test_they_are_alike_after_the_launcher() -> None:
    ends = {script.stem: script.read_text().partition(ALIKE)[2] for script in SCRIPTS}
    one = ends["cpu_mpirun"]
    assert one
    # The one with an image looks for it once the modules are there.
    ends["apptainer"], looks = re.subn(r"\n# The image: .*?\nesac\n", "", ends["apptainer"], flags=re.S)
    assert looks == 1
    # The preemptible one waits for signals while its commands run, and looks how far it is.
    common = ends.pop("preemptible").partition("\n# How far it is")[0]
    assert common
    assert one.startswith(common)
    assert set(ends.values()) == {one}


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_bash_can_read_it(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_table_names_every_script() -> None:
    table = (FOLDER / "README.md").read_text()
    assert {link.removesuffix(".sbatch") for link in re.findall(r"\]\((\w+\.sbatch)\)", table)} == EXPECTED


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "this is a batch job; type: sbatch"),
        ({**JOB, "SLURM_NTASKS": ""}, "no number of tasks; type: sbatch --ntasks-per-node"),
        ({**JOB, "VENV": "/no/such"}, "VENV=/no/such is no virtual environment: there is no /no/such/bin/activate"),
        ({**JOB, "MODULES": "an_mpi", "BASH_FUNC_module%%": "() { return 1; }"}, "module load an_mpi failed"),
    ],
    ids=["no job", "no tasks", "no venv", "no module"],
)
def test_what_is_missing_is_said(script: Path, variables: dict[str, str], said: str, tmp_path: Path) -> None:
    done = bash(script, tmp_path, **variables)
    assert done.returncode == 1
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_modules_come_before_the_virtual_environment(tmp_path: Path) -> None:
    venv = tmp_path / ".venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "activate").write_text("echo venv\n")
    # A launcher that fails says so, and nothing is left but the output.
    (tmp_path / "mpirun").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "mpirun").chmod(0o755)
    variables = {**JOB, "MODULES": "a/1 b", "BASH_FUNC_module%%": '() { echo "module $*"; }'}
    done = bash(FOLDER / "cpu_mpirun.sbatch", tmp_path, **variables, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.stdout == "module load a/1 b\nvenv\n"
    assert done.returncode == 1
    assert "the 2 tasks do not form one MPI world with mpidist" in done.stderr
    assert "mpirun -n 2 --bind-to none" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [".venv", "mpirun"]


def test_a_missing_launcher_is_the_last_line(tmp_path: Path) -> None:
    for name in ("bash", "rm", "mkdir", "uname", "env"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    job = tmp_path / "job"
    job.mkdir()
    done = bash(FOLDER / "cpu_mpirun.sbatch", job, **{**JOB, "PATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr.startswith("job: no MPI: mpirun is not in PATH. Load the module of an MPI: MODULES=")
    assert "MPI world" not in done.stderr


def test_a_missing_mpi_library_is_the_last_line(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text('#!/bin/sh\nshift 3\nexec "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**JOB, "PATH": path, "PYTHONPATH": str(FOLDER.parent), "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    done = bash(FOLDER / "cpu_srun_pmix.sbatch", tmp_path, **environment)
    assert done.returncode == 1
    assert re.search(r"^job: no MPI library for \S+/python3\. Load the module of an MPI", done.stderr, re.MULTILINE)
    assert "MPI world" not in done.stderr


def edited(script: Path, folder: Path, command: str) -> Path:
    """A copy whose line to edit is another."""
    copy = folder / script.name
    text, lines = re.subn(r"^COMMAND=.*$", lambda _: command, script.read_text(), flags=re.M)
    assert lines == 1
    copy.write_text(text)
    return copy


def launchers(folder: Path, ranks: int = 2) -> str:
    """Stand-ins that run a command so often, and drop their options and the check; the PATH with them in front."""
    tools = folder / "bin"
    tools.mkdir()
    for name in ("mpirun", "srun"):
        (tools / name).write_text(
            '#!/bin/bash\nwhile [ "$1" != bash ] && [ "$1" != python3 ]; do shift; done\n[ "$2" != -c ] || '
            f'[ "$1" != python3 ] || exit 0\nfor _ in {" ".join(map(str, range(ranks)))}; do "$@" || exit; done\n'
        )
        (tools / name).chmod(0o755)
    (tools / "apptainer").write_text("#!/bin/sh\nexit 9\n")
    (tools / "apptainer").chmod(0o755)
    (folder / "mpidist.sif").touch()
    return f"{tools}:{os.environ['PATH']}"


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
@pytest.mark.parametrize(
    "command",
    [
        "COMMAND=echo it was started", "COMMAND=echo", "COMMAND=(echo it | cat)", "COMMAND=(echo it > log)",
        "COMMAND=()", "COMMAND=", "COMMAND=('')", "",
    ],
)  # fmt: skip
def test_a_command_that_is_none_runs_nothing_and_fails(script: Path, command: str, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    copy, path = edited(script, tmp_path, command), launchers(tmp_path)
    # A variable of the user of that name is not the command.
    done = bash(copy, tmp_path / "work", **JOB, PATH=path, COMMAND="echo of the environment")
    assert done.returncode == 1
    assert "nothing to run: expected COMMAND=(python3 train.py ...)" in done.stderr
    assert "completed" not in done.stdout
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
@pytest.mark.parametrize("command", ["COMMAND=(env A=it bash -c 'echo $A runs' '' 2)", "COMMAND=(echo it runs)"])
def test_a_command_runs_on_every_rank(script: Path, command: str, tmp_path: Path) -> None:
    copy, path = edited(script, tmp_path, command), launchers(tmp_path)
    done = bash(copy, tmp_path, **JOB, PATH=path, SLURM_EXPORT_ENV="NONE")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "it runs\nit runs\njob-7: completed\n"
    assert (tmp_path / "job-7.completed").exists()


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_ranks_without_a_command_do_not_come_to_their_end(script: Path, tmp_path: Path) -> None:
    rank = re.findall(r"^rank='(.*)'$", script.read_text(), re.M)
    assert len(rank) == 1
    done = subprocess.run(["bash", "-c", rank[0], str(tmp_path)], timeout=scaled(30), check=False)
    assert done.returncode != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_ranks_get_the_environment_of_the_script(script: Path, tmp_path: Path) -> None:
    shown = "COMMAND=(bash -c 'echo $SLURM_EXPORT_ENV $PYTHONUNBUFFERED $OMP_NUM_THREADS')"
    copy, path = edited(script, tmp_path, shown), launchers(tmp_path)
    done = bash(copy, tmp_path, **JOB, PATH=path, SLURM_EXPORT_ENV="NONE")
    assert done.stdout == "ALL 1 1\nALL 1 1\njob-7: completed\n"


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_the_check_before_the_command(script: Path, tmp_path: Path) -> None:
    (check,) = re.findall(r"^check='(.*?)'$", script.read_text(), re.M | re.S)
    if script != SCRIPTS[0]:
        assert f"check='{check}'" in SCRIPTS[0].read_text()
        return
    done = run_script(check, 2, "2", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.seen", "1.seen"]
    done = run_script(check, 2, "3", str(tmp_path))
    assert done.returncode != 0
    assert "this MPI world has 2 ranks; expected 3, the tasks of the job" in done.stderr
    done = run_script(check, 2, "2", str(tmp_path / "elsewhere"))
    assert done.returncode != 0
    said = f"node {os.uname().nodename} cannot write where the job was submitted, which all must see: "
    assert f"{said}[Errno 2] No such file or directory: '{tmp_path}/elsewhere/0.seen'" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_image_that_is_not_there(tmp_path: Path) -> None:
    path = launchers(tmp_path)
    (tmp_path / "mpidist.sif").unlink()
    script = FOLDER / "apptainer.sbatch"
    done = bash(script, tmp_path, **JOB, PATH=path)
    assert done.returncode == 1
    assert f"there is no image mpidist.sif in {tmp_path}; type: IMAGE=file.sif sbatch" in done.stderr
    # That of a registry is for apptainer to find.
    done = bash(edited(script, tmp_path, "COMMAND=(echo it runs)"), tmp_path, **JOB, PATH=path, IMAGE="oras://a/b")
    assert (done.returncode, done.stderr) == (0, "")


def test_no_apptainer(tmp_path: Path) -> None:
    if shutil.which("apptainer"):
        pytest.skip("there is an apptainer here")
    done = bash(FOLDER / "apptainer.sbatch", tmp_path, **JOB)
    assert done.returncode == 1
    assert "there is no apptainer on" in done.stderr
    assert "MODULES=apptainer sbatch" in done.stderr


def test_a_signal_while_the_modules_load_queues_the_job_again(tmp_path: Path) -> None:
    copy, path = edited(FOLDER / "preemptible.sbatch", tmp_path, "COMMAND=(echo it was started)"), launchers(tmp_path)
    (tmp_path / "bin" / "mpirun").write_text("#!/bin/sh\necho a launcher was started\n")
    (tmp_path / "bin" / "scontrol").write_text('#!/bin/sh\necho "scontrol $*"\n')
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    variables = {**JOB, "MODULES": "an_mpi", "BASH_FUNC_module%%": "() { kill -USR1 $$; }"}
    done = bash(copy, tmp_path, **variables, PATH=path)
    assert done.stdout == "job-7: interrupted, and queued again\nscontrol requeue 7\n"
    assert done.returncode == 0
    assert not (tmp_path / "job-7.completed").exists()


def interrupted_runs(
    folder: Path, saves: str, checkpoints: str | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """Run the preemptible script again and again, while it is queued again, at most six times.

    Every run is interrupted; a run whose digit in ``saves`` is 1 leaves a checkpoint before.
    """
    copy, path = edited(FOLDER / "preemptible.sbatch", folder, "COMMAND=(true)"), launchers(folder)
    if checkpoints is not None:
        text, lines = re.subn(r"^CHECKPOINTS=.*$", f"CHECKPOINTS='{checkpoints}'", copy.read_text(), flags=re.M)
        assert lines == 1
        copy.write_text(text)
    (folder / "bin" / "scontrol").write_text("#!/bin/sh\n")
    (folder / "bin" / "scontrol").chmod(0o755)
    done: list[subprocess.CompletedProcess[str]] = []
    for number, digit in enumerate(saves):
        save = f"mkdir -p out/7/ckpt-{number}; touch out/7/ckpt-{number}/manifest.json; " if digit == "1" else ""
        (folder / "bin" / "mpirun").write_text(
            f'#!/bin/bash\n[ "$5" != python3 ] || exit 0\n{save}trap "exit 1" USR1\nkill -USR1 $PPID\n'
            "while :; do sleep 0.05; done\n"
        )
        restarts = {"SLURM_RESTART_COUNT": str(number)} if number else {}
        done.append(bash(copy, folder, **JOB, **restarts, PATH=path))
        if done[-1].returncode != 0:
            break
    return done


@pytest.mark.parametrize(("saves", "runs"), [("000000", 3), ("1000000", 4), ("0010000", 6)])
def test_runs_that_come_no_further_end_the_job(saves: str, runs: int, tmp_path: Path) -> None:
    done = interrupted_runs(tmp_path, saves)
    assert [run.returncode for run in done] == [0] * (runs - 1) + [1]
    assert [run.stdout for run in done] == ["job-7: interrupted, and queued again\n"] * (runs - 1) + [""]
    assert "job: not queued again: 3 runs in a row were interrupted before there was a newer one" in done[-1].stderr
    assert "one of out/7/ckpt-*/manifest.json" in done[-1].stderr
    assert "sbatch --time=" in done[-1].stderr
    assert not (tmp_path / "job-7.progress").exists()


@pytest.mark.parametrize(("saves", "checkpoints"), [("101010", None), ("000000", "")])
def test_runs_that_come_further_are_queued_again(saves: str, checkpoints: str | None, tmp_path: Path) -> None:
    done = interrupted_runs(tmp_path, saves, checkpoints)
    assert [run.returncode for run in done] == [0] * len(saves)


def test_a_job_that_comes_to_its_end_leaves_no_progress(tmp_path: Path) -> None:
    copy, path = edited(FOLDER / "preemptible.sbatch", tmp_path, "COMMAND=(true)"), launchers(tmp_path)
    (tmp_path / "job-7.progress").write_text("of a job that had this number before\n" * 9)
    assert bash(copy, tmp_path, **JOB, PATH=path).returncode == 0
    assert not (tmp_path / "job-7.progress").exists()
