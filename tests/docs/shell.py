"""Commands as a reader types them."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import uuid
from pathlib import Path

from tests.support.ranks import jobs
from tests.support.speed import scaled


def run_command(command: str, folder: Path, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run lines of shell in ``folder``, which is home, too, and end all that they leave behind.

    ``python`` and ``mpirun`` are those of the tests.

    Raises:
        AssertionError: They did not end in time.
    """
    done = _run_once(command, folder, timeout)
    if jobs.gets_second_chance(done.returncode, done.stderr, command):
        return _run_once(command, folder, timeout)
    return done


def _run_once(command: str, folder: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    jobs.check_mark()
    name = uuid.uuid4().hex
    programs = [sysconfig.get_path("scripts"), str(Path(jobs.mpirun_command()[0]).parent), os.environ["PATH"]]
    own = {"HOME": str(folder), "PATH": os.pathsep.join(programs)}
    own[jobs.JOB] = f"{os.environ.get(jobs.JOB, '')}{name}."
    with subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=jobs.child_environment(own),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=scaled(timeout))
        except subprocess.TimeoutExpired:
            stdout, stderr = jobs.stacks_and_end(process, name)
            raise AssertionError(f"not through after {scaled(timeout):g} s: {command}\n{stdout}{stderr}") from None
        finally:
            jobs.end_all(process, name)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
