"""An uncaught exception on one rank ends the job, and only that."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from mpidist.topology import abort
from tests.support.ranks.jobs import child_environment, run_script
from tests.support.speed import scaled

# Each test starts a job of its own.
pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

INSTALL = "from mpidist.topology.abort import install_excepthook; install_excepthook()\n"
MPI = "from mpi4py import MPI; world = MPI.COMM_WORLD\n"
WAIT = "\nworld.Barrier()\n"
ONE_FAILS = "if world.Get_rank() == 1: raise ArithmeticError('one and one is three')"


def test_a_raise_on_one_rank_ends_the_job_while_the_other_waits() -> None:
    # Without an end of the line, nothing but the hook flushes it.
    done = run_script(INSTALL + MPI + "print(f'rank {world.Get_rank()} said this', end='')\n" + ONE_FAILS + WAIT, 2)
    assert done.returncode == 1
    assert "rank 1 of 2 on host " in done.stderr
    assert done.stderr.count("ArithmeticError: one and one is three") == 1
    assert "in <module>" in done.stderr
    assert "rank 0 of 2" not in done.stderr
    assert "rank 1 said this" in done.stdout


# As PyTorch does it, in torch.distributed.init_process_group.
BUFFERS = """
import io, sys
ours = sys.excepthook
def buffering(*args):
    stderr, sys.stderr = sys.stderr, io.StringIO()
    ours(*args)
    stderr.write(sys.stderr.getvalue())
    sys.stderr = stderr
sys.excepthook = buffering
"""


def test_ranks_with_the_same_error_print_it_once_also_where_a_buffer_is_in_sys_stderr() -> None:
    done = run_script(INSTALL + MPI + BUFFERS + "world.Barrier()\nraise ArithmeticError('on all')", 3)
    assert done.returncode == 1
    (first,) = re.findall(r"^rank (\d) of 3 on host \S+:\nTraceback", done.stderr, re.MULTILINE)
    assert done.stderr.count("ArithmeticError: on all") == 1
    others = {"0": "1-2", "1": "0,2", "2": "0-1"}[first]
    assert re.search(rf"^ranks {others} of 3 on host \S+: the same error$", done.stderr, re.MULTILINE)


def test_keyboard_interrupt_too() -> None:
    done = run_script(INSTALL + MPI + "if world.Get_rank() == 0: raise KeyboardInterrupt" + WAIT, 2)
    assert done.returncode != 0
    assert "rank 0 of 2 on host " in done.stderr
    assert "KeyboardInterrupt" in done.stderr


def test_the_hook_that_was_there_prints_and_may_fail_itself() -> None:
    before = """
import sys
def report(kind, error, trace):
    print("reported", kind.__name__, file=sys.stderr)
    raise OSError("the report failed")
sys.excepthook = report
"""
    done = run_script(before + INSTALL + INSTALL + MPI + ONE_FAILS + WAIT, 2)
    assert done.returncode == 1
    assert done.stderr.count("reported ArithmeticError") == 1
    assert "one and one is three" not in done.stderr


def test_closed_output_does_not_stop_the_abort() -> None:
    done = run_script(INSTALL + MPI + "import sys; sys.stdout.close(); sys.stderr = None\n" + ONE_FAILS + WAIT, 2)
    assert done.returncode == 1


def test_a_raise_before_this_rank_starts_mpi_exits_with_1() -> None:
    """All ranks fail alike, as with a misspelt import: no rank may wait for another."""
    done = run_script(INSTALL + "raise ImportError('no such module')", 2)
    assert done.returncode == 1
    assert "no such module" in done.stderr
    assert "on host" not in done.stderr


def test_turned_off_the_job_goes_on() -> None:
    script = (
        INSTALL
        + MPI
        + "import sys\n"
        + "if world.Get_rank() == 1:\n"
        + "    sys.excepthook(ArithmeticError, ArithmeticError('told'), None)\n"
        + "world.Barrier()\nprint('after')"
    )
    done = run_script(script, 2, env={"MPIDIST_ABORT_ON_EXCEPTION": "0"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("after") == 2
    assert "on host" not in done.stderr


def test_one_rank_alone_prints_what_python_prints() -> None:
    script = INSTALL + MPI + "raise ArithmeticError('alone')"
    done = _python("-c", script)
    plain = _python("-c", "raise ArithmeticError('alone')")
    assert done.returncode == plain.returncode == 1
    assert done.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1]
    assert "on host" not in done.stderr


@pytest.mark.parametrize("state", ["import sys; sys.ps1 = '>>> '", "import os; os.getpid = lambda: -1"])
def test_not_at_a_prompt_nor_in_another_process(state: str) -> None:
    script = (
        INSTALL
        + MPI
        + state
        + "\nimport sys\nsys.excepthook(ArithmeticError, ArithmeticError('told'), None)\n"
        + "world.Barrier()\nprint('after')"
    )
    done = run_script(script, 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("after") == 2
    assert done.stderr.count("ArithmeticError: told") == 2


def test_a_wrong_setting_is_an_error_when_it_is_read() -> None:
    # It is read before MPI starts, or with MPI at the first use; `import mpidist` alone leaves it to doctor.
    uses = (
        "import mpidist.topology; mpidist.topology.import_mpi()",
        "import mpidist.topology; from mpi4py import MPI; mpidist.topology.world_topology()",
        MPI + INSTALL,
    )
    for script in uses:
        done = _python("-c", script, MPIDIST_ABORT_ON_EXCEPTION="yes")
        assert done.returncode == 1, script
        assert "MPIDIST_ABORT_ON_EXCEPTION='yes': expected 0 or 1" in done.stderr
    assert _python("-c", INSTALL, MPIDIST_ABORT_ON_EXCEPTION="yes").returncode == 0


def test_installing_twice_is_installing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    abort.install_excepthook()
    first = sys.excepthook
    abort.install_excepthook()
    assert sys.excepthook is first


def test_exit_code_of_one_rank_with_mpi4py_as_the_runner(tmp_path) -> None:
    """Ranks outside of any collective of mpidist that leave by sys.exit: mpi4py's runner makes it an abort."""
    program = tmp_path / "program.py"
    program.write_text(INSTALL + MPI + "import sys\nif world.Get_rank() == 1: sys.exit(3)" + WAIT)
    done = run_script(
        "import runpy, sys\nsys.argv[0] = 'mpi4py'\nrunpy.run_module('mpi4py.run', run_name='__main__')",
        2,
        str(program),
    )
    assert done.returncode != 0


def test_a_signal_that_python_turns_into_an_exception() -> None:
    script = INSTALL + MPI + "import os, signal\nif world.Get_rank() == 1: os.kill(os.getpid(), signal.SIGINT)" + WAIT
    done = run_script(script, 2)
    assert done.returncode != 0
    assert "rank 1 of 2 on host " in done.stderr


def test_a_launcher_that_does_not_answer_keeps_no_rank_waiting(tmp_path) -> None:
    script = (
        INSTALL
        + MPI
        + f"""
import os, pathlib, signal, time
from tests.support.speed import scaled
launcher = os.getppid()
process = world.allgather(os.getpid())[1]
if world.Get_rank() == 1:
    world.Recv(bytearray(1))
    raise ArithmeticError("nobody hears of it")
os.kill(launcher, signal.SIGSTOP)
try:
    world.Send(bytearray(1), 1)
    give_up, state = time.monotonic() + scaled(30), ""
    while state != "Z" and time.monotonic() < give_up:
        state = pathlib.Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()[0]
        time.sleep(0.05)
    pathlib.Path({str(tmp_path)!r}, "state").write_text(state)
finally:
    os.kill(launcher, signal.SIGCONT)
world.Recv(bytearray(1), 1)
"""
    )
    done = run_script(script, 2)
    assert done.returncode != 0
    assert (tmp_path / "state").read_text() == "Z"
    assert "ArithmeticError: nobody hears of it" in done.stderr


def _python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=child_environment(env),
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
