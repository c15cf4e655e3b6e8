"""The pretended GPUs: what goes wrong on a GPU now and then goes wrong on them every time."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import fake_cupy
from tests.support.speed import scaled

pytestmark = pytest.mark.one_rank

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


def hold(stream: Any, gate: threading.Event) -> None:
    stream.launch_host_func(lambda event: event.wait(30), gate)


def test_a_missing_wait_gives_stale_data(fake_gpus: Any, gate: threading.Event) -> None:
    cp = fake_gpus
    first, second = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
    array = cp.zeros(100)
    cp.cuda.Stream.null.synchronize()
    hold(first, gate)
    array.data.memset_async(1, array.nbytes, first)
    stale = array.get(stream=second)
    second.wait_event(first.record())
    gate.set()
    assert not stale.any()
    assert array.get(stream=second).any()


def test_unseen_errors_are_raised_at_the_end() -> None:
    cp = fake_cupy.install(1)
    cp.cuda.Stream.null.launch_host_func(lambda number: 1 / number, 0)
    with pytest.raises(ZeroDivisionError):
        fake_cupy.uninstall()
    assert "cupy" not in sys.modules
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fake stream")]


@pytest.mark.jobs
def test_a_program_runs_on_pretended_gpus(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import cupy, sys\nprint(cupy.cuda.runtime.getDeviceCount(), sys.argv[1:], cupy.ones(3).sum())\n"
    )
    command = [sys.executable, "-m", "tests.support.fake_cupy", "--devices", "3", "--jitter", "0.001", program, "-x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(60))
    assert (done.returncode, done.stdout.strip()) == (0, "3 ['-x'] 3.0"), done.stderr
