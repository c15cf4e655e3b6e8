"""Jobs that a command starts by itself: the launcher, and a program under a time limit."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def mpirun() -> list[str]:
    """Return the launcher: ``$MPIRUN``, else the one beside this Python, else the one on PATH."""
    if os.environ.get("MPIRUN"):
        return shlex.split(os.environ["MPIRUN"])
    found = shutil.which("mpirun", path=sysconfig.get_path("scripts")) or shutil.which("mpirun")
    if found is None:
        raise SystemExit("there is no mpirun beside this Python nor on PATH; load the cluster's MPI, or set MPIRUN")
    return [found]


def environment_of_ranks(**more: str) -> dict[str, str]:
    """Return an environment in which ranks of this machine find the suite, wherever it was started."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": paths, **more}


def run_job(command: Sequence[str], seconds: float, env: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Run a program; return what went wrong (with what it printed), or nothing, and what it printed."""
    with subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # mpirun ends its ranks.
            process.terminate()
            printed, _ = process.communicate()
            return f"ended after {seconds:g} s\n{printed}", printed
    return "" if process.returncode == 0 else f"status {process.returncode}\n{printed}", printed
