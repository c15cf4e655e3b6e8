"""The programs of docs/checkpoints.md run, alone and on several ranks, and go on where they stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import programs
from tests.support.ranks.jobs import run_script
from tests.support.ranks.programs import run_program

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

RESUMABLE, PREEMPTED, PER_EPOCH = programs("docs/checkpoints.md")


def run(program: str, ranks: int, *arguments: str) -> str:
    job = run_program(program, ranks, *arguments)
    assert (job.returncode, job.stderr) == (0, "")
    return job.stdout


def test_the_program_that_goes_on_on_any_number_of_ranks(tmp_path: Path) -> None:
    expected = run(RESUMABLE, 1, str(tmp_path / "alone"))
    assert expected == "step 100, 100 entries, weights [1. 1.]\n"
    stopping = RESUMABLE.replace(
        "    manager.save()", "    if checkpoint.step == 70:\n        break\n    manager.save()"
    )
    stopping = stopping.replace("manager.save(check_interval=False)\n", "")
    assert run(stopping, 2, str(tmp_path / "out")).startswith("step 70, ")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["ckpt-2", "ckpt-3", "ckpt-4"]
    # The last checkpoint is that of step 61.
    assert run(RESUMABLE, 3, str(tmp_path / "out")) == expected


def test_the_program_that_is_preempted(tmp_path: Path) -> None:
    rows = sum(range(1000)) * 5
    signalled = PREEMPTED.replace(
        "    checkpoint.step += 1\n",
        "    checkpoint.step += 1\n    if checkpoint.step == 20 and strategy.extended.should_checkpoint:\n"
        "        import os, signal\n        os.kill(os.getpid(), signal.SIGUSR1)\n        slow.append(1)\n"
        "    if slow:\n        import time\n        time.sleep(0.01)\n",
    ).replace("import sys\n", "import sys\nslow = []\n", 1)
    job = run_script(signalled, 2, str(tmp_path / "out"))
    assert job.returncode == 42, job.stderr
    assert run(PREEMPTED, 3, str(tmp_path / "out")) == f"step 500, total {rows}\n"


def test_a_checkpoint_per_epoch(tmp_path: Path) -> None:
    failing = PER_EPOCH.replace("    manager.save()", "    manager.save()\n    if backup.epoch == 3:\n        break")
    failing = failing.split("if strategy.extended")[0]
    run(failing, 2, str(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["ckpt-3"]
    assert run(PER_EPOCH, 1, str(tmp_path / "out")) == "epoch 4, total 4.0\n"
    assert list(tmp_path.iterdir()) == []
