"""``mpidist.launch_processes``: a function on ranks of a job of its own, from a notebook or a script."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.cli import notebook
from mpidist.parameter_server.pickling import pack_error
from mpidist.topology.launchers import BATCH_SYSTEMS
from tests.support.ranks.jobs import child_environment, run_script
from tests.support.speed import scaled

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in child_environment().items():
        monkeypatch.setenv(name, value)
    for system in BATCH_SYSTEMS:
        monkeypatch.delenv(system.job, raising=False)


def total(scale: float, offset: int = 0) -> tuple[int, float]:
    with mpidist.Communicator() as comm:
        print(f"this is rank {comm.rank}", flush=True)
        return comm.rank + offset, float(comm.all_reduce("SUM", np.array(scale)))


def fails_on(rank: int) -> None:
    comm = mpidist.Communicator()
    if comm.rank == rank:
        raise KeyError("no such row")
    comm.barrier()


def fails_alone() -> None:
    if mpidist.rank() == 1:
        raise ValueError("before anything")
    time.sleep(600)


def is_killed() -> None:
    comm = mpidist.Communicator()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def is_late() -> int:
    if mpidist.rank() == 1:
        time.sleep(600)
    return 1


class Mute(Exception):
    def __str__(self) -> str:
        raise LookupError


def places() -> tuple[list[str], str | None]:
    return sys.path, os.environ.get("PYTHONPATH")


def prints_snow() -> None:
    for _ in range(2000):
        print("\u2603" * 100)
    print("done")
    print("an error, too", file=sys.stderr)


def unsendable() -> Any:
    return lambda: (yield)


def test_results_come_by_rank_and_output_as_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert mpidist.launch_processes(total, 2, (1.5,), {"offset": 10}) == [(10, 3.0), (11, 3.0)]
    assert sorted(capsys.readouterr().out.split("\n")) == ["", "this is rank 0", "this is rank 1"]


def test_modules_are_found_as_here_and_other_pythons_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert mpidist.launch_processes(places, 1) == [(sys.path, os.environ["PYTHONPATH"])]


def test_output_that_the_encoding_here_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    assert mpidist.launch_processes(prints_snow, 2) == [None, None]
    lines = written.getvalue().splitlines()
    assert len(lines) == 4002
    assert set(lines) <= {b"?" * 100, b"?" * 300, b"done"}  # three where the pipe's encoding is ASCII, too


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError("the disk is full")


def test_output_that_cannot_be_written_is_an_error_once_the_job_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(sys, "stderr", shown)
    with pytest.raises(OSError, match="the disk is full"):
        mpidist.launch_processes(prints_snow, 2)
    assert shown.getvalue().count("an error, too\n") == 2
    with pytest.raises(KeyError, match="no such row"):
        mpidist.launch_processes(fails_on, 2, (1,))


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"},
        {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "n1 4 n2 4"},
        {"FLUX_URI": "local:///run/flux", "FLUX_JOB_NNODES": "2"},
    ],
)
def test_a_batch_job_of_several_hosts_is_refused(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="batch job has 2 hosts, .*; type: python -m mpidist launch -n 3 train.py"):
        mpidist.launch_processes(max, 3, ([1, 2],))


def test_the_error_of_a_rank_comes_back_with_its_traceback() -> None:
    with pytest.raises(KeyError, match="no such row") as caught:
        mpidist.launch_processes(fails_on, 2, (1,))
    assert str(caught.value.__cause__).startswith("rank 1 of 2:\nTraceback ")
    assert 'raise KeyError("no such row")' in str(caught.value.__cause__)


def test_an_error_without_a_text_is_sent() -> None:
    packed = pack_error(Mute(), lambda _: None)
    assert packed.text == "Mute: its message raised LookupError"
    assert isinstance(packed.unpack(lambda _: None), Mute)


@pytest.mark.long
def test_others_are_not_waited_for_once_a_rank_has_failed() -> None:
    with pytest.raises(ValueError, match="before anything"):
        mpidist.launch_processes(fails_alone, 2)


def test_a_rank_that_is_killed_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"ranks? (1|0-1) of 2 ended without a result; mpirun ended with status "):
        mpidist.launch_processes(is_killed, 2)


@pytest.mark.long
def test_the_deadline_ends_the_job() -> None:
    with pytest.raises(TimeoutError, match="not done after 4 s, and was ended; without a result: ranks? "):
        mpidist.launch_processes(is_late, 2, deadline=4)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: mpidist.launch_processes(is_late, 0), ValueError, "n is 0; expected a whole number"),
        (lambda: mpidist.launch_processes(is_late, True), ValueError, "n is True"),
        (lambda: mpidist.launch_processes(is_late, 2, deadline=0), ValueError, "deadline is 0"),
        (lambda: mpidist.launch_processes(3, 2), TypeError, "expected a function, as in mpidist"),  # type: ignore[arg-type]
        (
            lambda: mpidist.launch_processes(is_late, 2, ((x for x in "abc"),)),
            TypeError,
            "cannot be sent to another rank",
        ),
    ],
    ids=["n", "bool", "deadline", "function", "argument"],
)
def test_wrong_arguments(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_without_cloudpickle_a_function_of_the_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "HAS_CLOUDPICKLE", False)
    own = type(is_late)(is_late.__code__, {"__name__": "__main__"}, "own")
    with pytest.raises(TypeError, match=r"or cloudpickle; type: pip install -e '.*\[coordinator\]'"):
        mpidist.launch_processes(own, 2)


CELL = """
import sys, numpy, mpidist
own = 5
class Rows:
    def __init__(self, rank):
        self.rank = rank
def fn(more):
    with mpidist.Communicator() as comm:
        return Rows(comm.rank), comm.all_reduce("SUM", numpy.ones(2)) * own + more
for _ in range(2):
    found = mpidist.launch_processes(fn, 2, (1,), deadline=60)
    print([(rows.rank, total.tolist()) for rows, total in found])
print("mpi4py.MPI" in sys.modules)
mpidist.MultiWorkerMirroredStrategy()
print(mpidist.launch_processes(lambda: mpidist.size(), 2, deadline=60))
"""
SHOWN = ["[(0, [11.0, 11.0]), (1, [11.0, 11.0])]"] * 2 + ["False", "[2, 2]"]


def test_functions_of_a_script_are_sent_and_mpi_is_not_started_here(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle", reason="type: pip install '.[coordinator]'")
    (tmp_path / "script.py").write_text(CELL)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=scaled(90),
    )
    assert done.stdout.splitlines() == SHOWN, done.stderr


def test_a_rank_cannot_start_ranks() -> None:
    program = "import mpidist\nmpidist.size()\nmpidist.launch_processes(max, 2, ([1, 2],))"
    job = run_script(program, 2)
    assert job.returncode != 0
    assert "this process is a rank that " in job.stderr


# IPython --------------------------------------------------------------------------------------------------------------


def ipython() -> str:
    found = shutil.which("ipython", path=os.path.dirname(sys.executable))
    return found or pytest.skip("needs IPython; type: pip install ipython")


RANK = """
import threading, numpy, mpidist
comm = mpidist.Communicator()
print(comm.all_reduce("SUM", numpy.ones(2)), flush=True)
def work():
    raise ValueError("in a thread")
if {fails} and comm.rank == 1:
    threading.Thread(target=work).start()
comm.barrier() if {fails} == 0 or comm.rank == 0 else threading.Event().wait(600)
"""


@pytest.mark.parametrize("fails", [0, 1])
def test_ranks_that_ipython_starts(fails: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RANK.format(fails=fails))
    command = [sys.executable, "-m", "mpidist", "launch", "-n", "2", "--", ipython(), str(script)]
    environment = child_environment({"IPYTHONDIR": str(tmp_path)})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=scaled(60))
    assert done.stdout.count("[2. 2.]") == 2, done.stderr
    assert (done.returncode != 0) == bool(fails), done.stderr
    assert ("rank 1 of 2 on host " in done.stderr) == bool(fails)


def test_the_prompt_of_ipython_goes_on_after_an_error(tmp_path: Path) -> None:
    typed = f"import mpidist\ncomm = mpidist.Communicator()\n1/0\n{CELL}\nprint(comm.size, 'still here')\nexit\n"
    command = [ipython(), "--simple-prompt", "--colors=NoColor"]
    environment = child_environment({"IPYTHONDIR": str(tmp_path)})
    done = subprocess.run(command, input=typed, env=environment, capture_output=True, text=True, timeout=scaled(90))
    assert "ZeroDivisionError" in done.stdout
    assert "1 still here" in done.stdout
    assert done.returncode == 0
