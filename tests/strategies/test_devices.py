"""Which devices a strategy takes, shares out by default, and refuses."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Any

import pytest

import mpidist
from mpidist.collectives.channel.channel import open_channels
from mpidist.core.errors import DeviceError
from mpidist.core.text import numbered_ranks
from mpidist.strategies.replica_devices import agreed_devices
from tests.support.ranks.jobs import ROOT, child_environment
from tests.support.speed import scaled

pytestmark = [pytest.mark.nodes, pytest.mark.counts]


def test_device_strings(fake_gpus: Any) -> None:
    assert mpidist.OneDeviceStrategy("/device:GPU:1").extended.worker_devices == ("gpu:1",)
    for device in ("gpu:2", "/gpu:7"):
        with pytest.raises(ValueError, match=r"sees 2 GPU\(s\); expected one of \['gpu:0', 'gpu:1'\]"):
            mpidist.OneDeviceStrategy(device)
    with pytest.raises(ValueError, match="names a task"):
        mpidist.OneDeviceStrategy("/job:worker/task:0/device:GPU:0")
    with pytest.raises(ValueError, match="each device once"):
        mpidist.MirroredStrategy(["gpu:0", "/gpu:0"])


@pytest.mark.jobs
@pytest.mark.one_rank
def test_without_cupy_a_gpu_is_refused_with_what_to_type() -> None:
    program = "import sys; sys.modules['cupy'] = None; import mpidist; mpidist.OneDeviceStrategy('gpu:0')"
    done = _run(program)
    assert done.returncode
    assert "mpidist.core.errors.DeviceError" in done.stderr
    assert "pip install" in done.stderr


@pytest.mark.jobs
@pytest.mark.one_rank
def test_a_job_on_cpus_does_not_import_cupy() -> None:
    program = (
        "import sys, numpy, mpidist\n"
        "with mpidist.MirroredStrategy(['cpu:0', 'cpu:1']) as strategy:\n"
        "    v = mpidist.Variable(1.0)\n"
        "    strategy.run(lambda: mpidist.get_replica_context().all_reduce('SUM', numpy.ones(2)))\n"
        "assert 'cupy' not in sys.modules\n"
    )
    done = _run(program)
    assert done.returncode == 0, done.stderr


def _run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env=child_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )


@pytest.mark.one_rank
@pytest.mark.parametrize("fake_gpus", [{"devices": 3}], indirect=True)
def test_one_process_has_all_gpus(fake_gpus: Any) -> None:
    for make in (mpidist.MirroredStrategy, mpidist.MultiWorkerMirroredStrategy):
        with make() as strategy:
            assert strategy.extended.worker_devices == ("gpu:0", "gpu:1", "gpu:2")
            assert strategy.num_replicas_in_sync == 3


@pytest.mark.parametrize("fake_gpus", [{"devices": 4}], indirect=True)
def test_a_process_by_itself_leaves_gpus_to_those_beside_it(fake_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    for name in ("SLURM_STEP_ID", "PMI_RANK", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for key, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{key}", value)
    with mpidist.MirroredStrategy(communicator=MPI.COMM_SELF) as strategy:
        assert strategy.extended.worker_devices == ("gpu:2", "gpu:3")


def test_without_gpus_there_is_the_cpu() -> None:
    assert agreed_devices(None, None) == (("cpu:0",), (1,), False)


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("fake_gpus", [{"devices": 5}], indirect=True)
def test_ranks_of_a_machine_share_its_gpus(fake_gpus: Any) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        everyone = world.allgather(strategy.extended.worker_devices)
        assert sorted(device for devices in everyone for device in devices) == [f"gpu:{k}" for k in range(5)]
        assert max(map(len, everyone)) - min(map(len, everyone)) <= 1
        assert strategy.num_replicas_in_sync == 5


@pytest.mark.min_ranks(2)
def test_ranks_that_name_devices_leave_the_gpus_to_the_others(fake_gpus: Any) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    named = ["cpu:0"] if world.rank == 0 else None
    with mpidist.MultiWorkerMirroredStrategy(devices=named) as strategy:
        mine = strategy.extended.worker_devices
        assert mine == ("cpu:0",) if world.rank == 0 else mine[0].startswith("gpu:")
        assert strategy.num_replicas_in_sync == sum(map(len, world.allgather(mine)))


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("named", [None, ["gpu:0"]])
def test_ranks_without_gpus_among_others_are_refused(
    named: list[str] | None, fake_gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    last = world.size - 1
    if world.rank == last:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        named = None
    before = list(open_channels)
    with pytest.raises(DeviceError, match=r"devices=\['cpu:0'\] on all ranks") as refused:
        mpidist.MultiWorkerMirroredStrategy(devices=named)
    host = platform.node()
    assert str(refused.value).startswith(
        f"{numbered_ranks(range(last))} on {host} would compute on GPUs, and others see none"
    )
    assert f"rank {last} on {host}: none to be seen, CUDA_VISIBLE_DEVICES being ''" in str(refused.value)
    assert open_channels == before
    with mpidist.MultiWorkerMirroredStrategy(devices=["cpu:0"]) as strategy:
        assert strategy.reduce("SUM", 1, axis=None) == world.size


def test_a_device_error_is_a_runtime_error() -> None:
    assert issubclass(DeviceError, RuntimeError)
