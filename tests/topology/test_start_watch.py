"""Ranks that wait in MPI_Init for one that never comes say so, and end."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from mpidist.topology.environments import LauncherInfo
from mpidist.topology.start_watch import _begin, _Watch
from tests.elastic.test_run import needs_ulfm
from tests.support.ranks.jobs import child_environment, run_script
from tests.support.speed import deadlines, scaled

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

BEFORE = """
import os, signal, sys
import mpidist
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    {act}
{start}
print("started")
"""
INFO = LauncherInfo("Open MPI mpirun", 0, 2, 0, 2, "OMPI_COMM_WORLD_SIZE")
LIMITS = deadlines(2, 1)


@needs_ulfm
@pytest.mark.parametrize(
    ("act", "start"),
    [
        ("sys.exit()", "mpidist.MultiWorkerMirroredStrategy()"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "from mpi4py import MPI"),
    ],
    ids=["a rank that exits", "a rank that is killed"],
)
def test_a_rank_that_never_starts_mpi(act: str, start: str) -> None:
    # Without fault tolerance mpirun may notice by itself, and end the job.
    job = run_script(BEFORE.format(act=act, start=start), 3, env=LIMITS, flags=("--with-ft", "ulfm"))
    assert "started" not in job.stdout
    for rank in (0, 2):
        assert f"mpidist: rank {rank} of 3 on host " in job.stderr
    for said in ("", ", and ends"):
        assert len(re.findall(rf"has waited [\d.]+ s for MPI to start{said}: another", job.stderr)) == 2, job.stderr
    assert "Traceback" not in job.stderr


@needs_ulfm
def test_a_program_from_stdin_is_told_so() -> None:
    # Only rank 0 gets standard input. Without a program the other ranks end at once.
    program = BEFORE.format(act="sys.exit()", start="mpidist.MultiWorkerMirroredStrategy()")
    program = f"import sys\nsys.argv = ['-']\n{program}"
    job = run_script(program, 2, env=LIMITS, flags=("--with-ft", "ulfm"))
    assert "rank 0 of 2 on host " in job.stderr
    assert "the program came from standard input, which Open MPI mpirun passes to rank 0 alone" in job.stderr
    assert "name the file: mpirun -n 2 python train.py" in job.stderr


def test_nothing_is_said_where_all_come() -> None:
    warn_after = scaled(3)
    program = f"import mpidist, time\nmpidist.MultiWorkerMirroredStrategy().close()\ntime.sleep({warn_after})"
    job = run_script(program, 2, env=deadlines(20, warn_after))
    assert (job.returncode, job.stdout, job.stderr) == (0, "", "")


class _Fails(importlib.abc.Loader):
    def create_module(self, spec: ModuleSpec) -> None:
        raise ImportError("no libmpi")


@pytest.mark.parametrize("handling", [signal.SIG_DFL, signal.SIG_IGN], ids=["default", "ignored"])
def test_the_watch_ends_where_mpi_cannot_be_loaded(handling: signal.Handlers) -> None:
    before = signal.signal(signal.SIGCHLD, handling)
    open_files = len(os.listdir("/proc/self/fd"))
    try:
        watch = _Watch(INFO, (60.0, 60.0))
        watch._loader = _Fails()
        with pytest.raises(ImportError, match="no libmpi"):
            watch.create_module(ModuleSpec("mpi4py.MPI", None))
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_a_process_without_children_starts_mpi_unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError

    open_files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", refused)
    assert _begin(INFO, (60.0, 60.0)) is None
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_asking_for_the_module_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = _Watch(INFO, (60.0, 60.0))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "mpi4py.MPI")
    for _ in range(2):
        spec = importlib.util.find_spec("mpi4py.MPI")
        assert spec is not None
        assert spec.loader is finder
    assert finder in sys.meta_path


# In the place of MPICH, whose MPI_Init aborts under that mpirun.
MPICH_STAND_IN = """
#include <string.h>
int MPI_Get_library_version(char *text, int *n) { strcpy(text, "MPICH Version:      5.0.2"); *n = 25; return 0; }
"""


def test_mpich_under_the_mpirun_of_open_mpi(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler; type: apt-get install gcc")
    source, library = tmp_path / "mpi.c", tmp_path / "libmpi.so.12"
    source.write_text(MPICH_STAND_IN)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    imports = "from mpidist.topology.start_watch import LauncherInfo, _check_library"
    program = f"{imports}\n_check_library({INFO}, {str(library)!r})"
    # In a process without MPI: Open MPI brings the PMIx that MPICH lacks.
    done = subprocess.run(
        [sys.executable, "-c", program], env=child_environment(), capture_output=True, text=True, check=False
    )
    said = f"started 2 ranks, but mpi4py loaded MPICH 5.0.2 from {library}, which cannot join"
    assert f"LaunchError: Open MPI mpirun {said}" in done.stderr
