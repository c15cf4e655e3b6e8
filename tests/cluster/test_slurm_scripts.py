"""The scripts of slurm/ in a real Slurm with the real examples/train.py: worlds, results, files, signals, requeues."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.lab import Lab
from tests.cluster.scripts import SCRIPTS, Job, submit, user_environment, workplace
from tests.docs.pages import blocks, programs
from tests.docs.transcripts import without_figures

pytestmark = pytest.mark.cluster

ON_GPUS = "tests/support/fake_cupy/__main__.py"
# 98 % of the test images after 120 steps.
TRAIN = (
    'bash -c \'echo "a rank on $(uname -n)"; exec "$0" "$@"\' '
    "python3 examples/train.py --batch-size 100 --epochs 8 --out out"
)
Submit = Callable[..., Job]


@pytest.fixture
def folder(lab: Lab, request: pytest.FixtureRequest) -> Path:
    """A folder like a checkout, which every host sees."""
    return workplace(lab.scratch / re.sub(r"\W+", "-", request.node.name))


@pytest.fixture
def start(lab: Lab, folder: Path) -> Iterator[Submit]:
    """Submit a script in that folder; what is still in the queue at the end of the test is cancelled."""
    jobs: list[Job] = []

    def submit_there(script: str, *options: str, **given: object) -> Job:
        jobs.append(submit(lab, folder, script, *options, **given))  # type: ignore[arg-type]
        return jobs[-1]

    yield submit_there
    for job in jobs:
        job.signal("--quiet")
    lab.wait_until_idle()


@pytest.fixture(scope="session")
def mpich(lab: Lab) -> Path:
    """A virtual environment with the MPICH of PyPI; what else the programs need is that of this Python."""
    venv = lab.scratch / "mpich"
    base = [sys.executable, "-m", "venv", "--without-pip", str(venv)]
    subprocess.run(base, check=True, capture_output=True, timeout=60)
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python")]
    install = [*pip, "install", "--quiet", "--disable-pip-version-check", "mpi4py", "mpich"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        pytest.skip(f"pip cannot install mpich: {done.stderr.strip().splitlines()[-1]}")
    scheme = {"base": str(venv), "platbase": str(venv)}
    own = Path(sysconfig.get_path("purelib", vars=scheme))
    (own / "the_rest.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return venv


def closing_line(job: Job) -> str:
    lines = re.findall(r"^done after .*$", job.output, re.M)
    assert len(lines) == 1, job.output
    return str(lines[0])


def check_completed(job: Job, name: str) -> None:
    assert job.end() == "COMPLETED", job.output
    assert job.markers == [f"{name}-{job.number}.completed"], job.output
    # Another job of the folder may have begun since.
    assert job.files("ranks") + job.files("progress") == []


@pytest.mark.parametrize(
    ("script", "mpi", "hosts"),
    [
        *((script, "Open MPI", hosts) for script in ("cpu_srun_pmix", "cpu_mpirun") for hosts in (2, 4)),
        *(("cpu_srun_pmi2", "MPICH", hosts) for hosts in (2, 4)),
        ("cpu_mpirun", "MPICH", 2),
    ],
)
def test_training_on_hosts(
    start: Submit, script: str, mpi: str, hosts: int, request: pytest.FixtureRequest, folder: Path
) -> None:
    env = {}
    if mpi == "MPICH":
        # With UCX, the default of this MPICH, the addresses exchanged at the start can be longer than a line of
        # Slurm's PMI-2.
        env = {"VENV": str(request.getfixturevalue("mpich")), "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
    each = 4 // hosts
    job = start(script, f"--nodes={hosts}", f"--ntasks-per-node={each}", command=TRAIN, env=env)
    check_completed(job, script.replace("_", "-"))
    assert "multi_worker: 4 replica(s) in sync, 4 rank(s)" in job.output
    ranks = Counter(re.findall(r"a rank on (\S+)", job.output))
    assert ranks == {f"node{host}": each for host in range(hosts)}
    accuracy = float(re.findall(r"test accuracy ([\d.]+)%", closing_line(job))[0])
    assert accuracy >= 97
    assert (folder / "out" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "out" / "ckpt-8" / "manifest.json").read_text())


def test_the_script_and_the_program_of_the_readme(lab: Lab, folder: Path) -> None:
    (script,) = (block.text for block in blocks("README.md") if block.text.startswith("#!/bin/bash"))
    # The hosts have no modules, and the virtual environment of this Python is not in the home folder.
    script, modules = re.subn(r"^module load .*", "", script, flags=re.M)
    script, venvs = re.subn(r'source ".*"', "source .venv/bin/activate", script)
    assert (modules, venvs) == (1, 1)
    (folder / "job.sbatch").write_text(script)
    (folder / "train.py").write_text(programs("README.md")[0])
    options = ["--wait", f"--chdir={folder}", f"--output={folder}/out.txt"]
    done = lab.run("login", ["sbatch", *options, str(folder / "job.sbatch")], env=user_environment())
    printed = (folder / "out.txt").read_text()
    assert done.returncode == 0, done.stderr + printed
    shown = next(block.text for block in blocks("README.md") if block.text.startswith("launcher"))
    printed_by_doctor = {without_figures(line) for line in printed.splitlines()}
    assert [line for line in shown.splitlines() if without_figures(line) not in printed_by_doctor] == []
    assert "4 replicas: loss 0.00002, w [ 1. -2.  3.]" in printed


@pytest.mark.parametrize("script", ["parameter_server", "coordinator", "factorization"])
def test_workers_that_do_not_wait_for_one_another(start: Submit, script: str) -> None:
    job = start(script, "--nodes=2", "--ntasks-per-node=3")
    check_completed(job, script.replace("_", "-"))
    (line,) = [line for line in job.output.splitlines() if line.startswith("done after")]
    if script == "factorization":
        error, best = map(float, re.findall(r"(?:error|possible) ([\d.]+\d)", line))
        assert error < 1.1 * best
    else:
        assert float(re.findall(r"test accuracy ([\d.]+)%", line)[0]) >= 96


def test_a_program_of_torch(start: Submit, folder: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")
    job = start("torch", "--nodes=2", "--ntasks-per-node=2")
    check_completed(job, "torch")
    assert float(re.findall(r"([\d.]+) % of the test images", job.output)[-1]) > 90
    assert (folder / "out" / job.number / "epoch-008" / ".metadata").exists()


def test_an_evaluator_beside_the_training(start: Submit, folder: Path) -> None:
    job = start(
        "evaluator", "--nodes=2", "--ntasks-per-node=2",
        command='python3 examples/train_and_evaluate.py --epochs 4 --batch-size 96 --out "out/$SLURM_JOB_ID"',
    )  # fmt: skip
    check_completed(job, "evaluator")
    assert "3 replica(s) train" in job.output
    lines = (folder / "out" / job.number / "eval" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])["metrics"]
    # It may leave checkpoints out that newer ones have overtaken, and never the last.
    assert last["epoch"] == 4
    assert last["accuracy"] >= 0.9
    assert f"epoch  4  test loss {last['loss']:.4f}" in job.output


def test_an_mpi_that_does_not_fit_the_launcher(start: Submit) -> None:
    job = start("cpu_srun_pmi2", "--ntasks-per-node=2", command="echo it was started")
    assert job.end() == "FAILED"
    assert "LaunchError: srun started 4 ranks" in job.output
    assert "--mpi=pmix" in job.output
    assert "the 4 tasks do not form one MPI world with mpidist" in job.output
    assert "it was started" not in job.output
    assert job.markers == []


def test_a_world_that_is_smaller_than_the_job(start: Submit, folder: Path) -> None:
    # As an mpirun that was built without Slurm: it starts one world, on its own host.
    (folder / "bin").mkdir()
    (folder / "bin" / "mpirun").write_text(f'#!/bin/sh\nshift 2\nexec {sys.prefix}/bin/mpirun -n 2 "$@"\n')
    (folder / "bin" / "mpirun").chmod(0o755)
    (folder / ".venv").unlink()
    path = f"{folder}/bin:{sys.prefix}/bin:{user_environment()['PATH']}"
    job = start("cpu_mpirun", "--ntasks-per-node=2", command="echo it was started", env={"PATH": path})
    assert job.end() == "FAILED"
    assert "this MPI world has 2 ranks; expected 4" in job.output
    assert "it was started" not in job.output


def test_checkpoints_in_a_folder_that_other_nodes_do_not_see(start: Submit) -> None:
    # /tmp is another folder on every host.
    job = start("cpu_srun_pmix", "--ntasks-per-node=1", command="python3 examples/train.py --out /tmp/private-out")
    assert job.end() == "FAILED"
    assert re.search(r"--out /tmp/private-out is another folder on node\d", job.output), job.output
    assert "epoch  1" not in job.output


def test_a_folder_that_other_nodes_do_not_see(lab: Lab) -> None:
    # /tmp is another one on every host, and the folder is there on each.
    here = Path("/tmp/private")
    for host in ("login", "node0", "node1"):
        made = lab.run(host, ["mkdir", "-p", str(here)])
        assert made.returncode == 0, made.stderr
    script = (SCRIPTS / "cpu_mpirun.sbatch").read_text()
    copy = lab.scratch / "private.sbatch"
    copy.write_text(re.sub(r"^COMMAND=.*$", "COMMAND=(echo it was started)", script, flags=re.M))
    output = lab.scratch / "private.out"
    options = ["--nodelist=node[0-1]", "--ntasks-per-node=1", f"--output={output}", f"--chdir={here}"]
    env = user_environment({"VENV": sys.prefix})
    done = lab.run("login", ["sbatch", "--parsable", *options, str(copy)], env=env)
    assert done.returncode == 0, done.stderr
    job = Job(lab, done.stdout.strip(), lab.scratch)
    assert job.end() == "FAILED"
    said = output.read_text()
    assert "node node1 cannot write where the job was submitted, which all must see: [Errno 2] No such file" in said
    assert "or do not see this folder; which, stands above" in said
    assert "it was started" not in said


def test_a_rank_that_fails(start: Submit) -> None:
    job = start("cpu_srun_pmix", "--ntasks-per-node=2", command="bash -c '[ $SLURM_PROCID != 1 ] || exit 3'")
    assert job.end() == "FAILED"
    assert re.search(r"not completed: the launcher ended with status [1-9]\d*, and [0-3] of 4 ranks", job.output)
    assert job.markers == []


def test_lost_ranks_are_seen_where_the_launcher_does_not_see_them(start: Submit, folder: Path) -> None:
    job = start("cpu_mpirun", "--ntasks-per-node=1", command="sh -c 'touch $(hostname).started; sleep 100'")
    job.until(lambda: len(list(folder.glob("*.started"))) == 2, "both ranks run")
    # To the steps, which are mpirun's daemons on the other hosts.
    job.signal("--signal=USR1")
    assert job.end() == "FAILED"
    assert "and 0 of 2 ranks came to their end" in job.output
    assert job.markers == []


def test_an_array(start: Submit) -> None:
    job = start(
        "array", "--array=0-2%2", "--ntasks-per-node=2", "--time=5",
        command='python3 examples/train.py --epochs 1 --batch-size $((16 << SLURM_ARRAY_TASK_ID)) '
        '--out "out/$SLURM_ARRAY_TASK_ID"',
    )  # fmt: skip
    assert job.end() == "COMPLETED", job.output
    assert job.markers == [f"array-{job.number}_{task}.completed" for task in range(3)]
    assert sorted(re.findall(r"done after (\d+) steps", job.output), key=int) == ["23", "45", "90"]
    assert job.output.count("2 replica(s) in sync, 2 rank(s)") == 3


@pytest.mark.parametrize(
    ("script", "each", "taken"),
    [("gpu_rank_per_gpu", 2, [["gpu:0"], ["gpu:1"]]), ("gpu_rank_per_node", 1, [["gpu:0", "gpu:1"]])],
)
def test_gpus(start: Submit, folder: Path, script: str, each: int, taken: list[list[str]]) -> None:
    layout = ("--gpus-per-node=2", f"--ntasks-per-node={each}", "--cpus-per-task=1")
    training = "examples/train.py --device gpu --steps 5 --out out"
    job = start(script, *layout, command=f"python3 {ON_GPUS} tests/cluster/programs/gpus.py . {training}")
    check_completed(job, script.replace("_", "-"))
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2 * each)]
    assert [rank["host"] for rank in found] == [f"node{host}" for host in range(2) for _ in range(each)]
    # Every rank sees both, and has its own.
    assert [rank["visible"] for rank in found] == ["0,1"] * len(found)
    assert [rank["taken"] for rank in found] == taken * 2
    assert [rank["replicas"] for rank in found] == [4] * len(found)
    assert f"4 replica(s) in sync, {2 * each} rank(s)" in job.output


def preemptible(submit_there: Submit) -> Job:
    return submit_there(
        "preemptible", "--ntasks-per-node=2",
        command='python3 examples/train.py --resume --deterministic --epochs 16 --out "out/$SLURM_JOB_ID" '
        '--dump-weights "$SLURM_JOB_NAME.npz"',
    )  # fmt: skip


def weights(job: Job) -> dict[str, bytes]:
    """Return the bits of all weights of a preemptible job."""
    with np.load(job.folder / "preemptible.npz") as found:
        return {name: found[name].tobytes() for name in found.files if name != "losses"}


def ready_to_be_interrupted(job: Job, checkpoints: int) -> int:
    """Wait until a job has more checkpoints than that; returns how many."""
    out = job.folder / "out" / job.number
    job.until(lambda: len(list(out.glob("ckpt-*"))) > checkpoints, f"more checkpoints than {checkpoints}")
    return len(list(out.glob("ckpt-*")))


@pytest.mark.timeout(300)
def test_a_preemptible_job_goes_on_after_a_signal_a_requeue_and_a_job_of_higher_priority(
    start: Submit, lab: Lab
) -> None:
    # One that nothing interrupts, on the other two hosts.
    there = workplace(lab.scratch / "whole")
    whole = preemptible(lambda *arguments, **given: submit(lab, there, *arguments, **given))
    job = preemptible(start)

    saved = ready_to_be_interrupted(job, 1)
    job.signal("--batch", "--signal=USR1")
    job.until(lambda: job.output.count("interrupted, and queued again") == 1, "the script has heard the signal")
    job.until(lambda: job.output.count("going on from") == 1, "the second run")

    saved = ready_to_be_interrupted(job, saved)
    done = lab.run("login", ["scontrol", "requeue", job.number])
    assert done.returncode == 0, done.stderr
    check_completed(whole, "preemptible")
    job.until(lambda: job.output.count("going on from") == 2, "the third run")

    ready_to_be_interrupted(job, saved)
    urgent = start("cpu_mpirun", "--partition=high", "--nodes=4", "--exclusive", "--ntasks-per-node=1", command="true")
    check_completed(urgent, "cpu-mpirun")
    check_completed(job, "preemptible")
    assert job.output.count("interrupted, and queued again") == 2
    steps = [int(step) for step in re.findall(r"going on from .*, after step (\d+)", job.output)]
    assert len(steps) == 3
    assert 90 <= steps[0] < steps[1] < steps[2] < 720
    assert job.field("Restarts") == {"3"}
    assert weights(job) == weights(whole)
    assert {name: len(bits) for name, bits in weights(job).items()} == {
        "w1": 64 * 128 * 8, "b1": 128 * 8, "w2": 128 * 10 * 8, "b2": 10 * 8,
    }  # fmt: skip


def test_the_benchmark_suite(start: Submit, folder: Path) -> None:
    job = start(
        "benchmarks", "--ntasks-per-node=1",
        command="python3 -m benchmarks run --no-progress --operations all_reduce --sizes 4,64K --seconds 0.05 "
        "--no-gloo --out out",
    )  # fmt: skip
    check_completed(job, "benchmarks")
    results = json.loads((folder / "out" / "2-ranks.json").read_text())
    assert results["machine"]["nodes"] == 2


def test_an_image(start: Submit, folder: Path) -> None:
    """With a stand-in for Apptainer: what the script asks of it, and that ranks behind it form one world."""
    stand_in = folder / "bin" / "apptainer"
    stand_in.parent.mkdir()
    asked = f"exec --bind {folder} --pwd {folder} test.sif"
    stand_in.write_text(f'#!/bin/sh\n[ "$1 $2 $3 $4 $5 $6" = "{asked}" ] || exit 9\nshift 6\nexec "$@"\n')
    stand_in.chmod(0o755)
    (folder / "test.sif").touch()
    env = {"IMAGE": "test.sif", "PATH": f"{stand_in.parent}:{user_environment()['PATH']}"}
    job = start("apptainer", "--ntasks-per-node=1", command="python3 examples/train.py --epochs 1 --out out", env=env)
    check_completed(job, "apptainer")
    assert "2 replica(s) in sync, 2 rank(s)" in job.output
