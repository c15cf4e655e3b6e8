"""What a program that closes nothing leaves of NCCL between the GPUs of its process."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from mpidist import NcclAllReduce
from tests.cross_device_ops.test_gpu_reductions import on_devices
from tests.support.ranks.jobs import ROOT, child_environment
from tests.support.speed import scaled

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

PROGRAM = """
import atexit
@atexit.register
def tell():
    print("open at the end:", len(nccl.open_communicators()))
from tests.support import fake_cupy
cupy = fake_cupy.install(devices=2, jitter=0.002)
import mpidist
from tests.support.fake_cupy import nccl
strategy = mpidist.MirroredStrategy(["gpu:0", "gpu:1"])
strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", cupy.ones(5)))
print("open before:", len(nccl.open_communicators()))
"""


@pytest.mark.one_rank
def test_the_end_of_the_program_closes_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=child_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["open before: 2", "open at the end: 0"]
    assert done.stderr == ""


@pytest.mark.parametrize("fake_gpus", [{"jitter": 0.005}], indirect=True)
def test_so_does_dropping_it_once_its_work_is_done(fake_gpus: Any) -> None:
    from tests.support.fake_cupy import nccl

    ops = NcclAllReduce()
    value = on_devices(fake_gpus, [np.ones(2), np.ones(2)])
    result = ops.reduce("SUM", value, value)
    assert len(nccl.open_communicators()) == 2
    del ops
    gc.collect()
    assert nccl.open_communicators() == []
    assert [array.get().tolist() for array in result.values] == [[2.0, 2.0]] * 2
