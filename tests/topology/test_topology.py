"""The GPUs of each rank of a node."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from mpidist.topology.topology import devices_of_each, visible_devices
from tests.support.ranks.jobs import child_environment, run_alone
from tests.support.speed import scaled

pytestmark = [pytest.mark.nodes, pytest.mark.counts]


@pytest.mark.parametrize(
    ("seen", "devices"),
    [
        pytest.param([], [], id="no-process"),
        pytest.param([[], []], [(), ()], id="cpu-node"),
        pytest.param([["a", "b", "c", "d"]], [(0, 1, 2, 3)], id="one-process"),
        pytest.param([["a", "b"]] * 2, [(0,), (1,)], id="by-local-rank"),
        pytest.param([["a", "b", "c", "d"]] * 2, [(0, 1), (2, 3)], id="shared-evenly"),
        pytest.param([["a", "b", "c"]] * 2, [(0, 1), (2,)], id="the-rest-to-the-first"),
        pytest.param([["a", "b", "c", "d", "e"]] * 3, [(0, 1), (2, 3), (4,)], id="the-rest-to-the-first-two"),
        pytest.param([["a"]] * 4, [(0,)] * 4, id="one-device-for-all"),
        pytest.param([["a", "b"]] * 4, [(0,), (1,), (0,), (1,)], id="in-turn"),
        pytest.param([["a", "b"], ["b", "a"]], [(0,), (0,)], id="the-order-does-not-matter"),
        pytest.param([["a"], ["b"]], [(0,), (0,)], id="one-for-each-from-the-launcher"),
        pytest.param([["a", "b"], ["c", "d"]], [(0, 1), (0, 1)], id="several-for-each-from-the-launcher"),
        pytest.param([["a"], ["a"], ["b"], ["b"]], [(0,)] * 4, id="two-processes-each-from-the-launcher"),
        pytest.param([["a"], []], [(0,), ()], id="one-process-without"),
    ],
)
def test_devices_of_each(seen: list[list[str]], devices: list[tuple[int, ...]]) -> None:
    assert devices_of_each(seen) == devices


def test_visible_devices_have_bus_ids(fake_gpus: Any) -> None:
    names = visible_devices()
    assert len(names) == fake_gpus.cuda.runtime.getDeviceCount() == 2
    assert len(set(names)) == 2
    assert all(isinstance(name, str) for name in names)


def test_cupy_is_not_imported_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("mpidist.arrays.streams.find_cupy", lambda: pytest.fail("imports CuPy"))
    assert visible_devices() == ()


@pytest.mark.one_rank
@pytest.mark.jobs
def test_a_cpu_job_does_not_import_cupy() -> None:
    script = (
        "import sys\n"
        "from mpidist.cluster_resolver import MPIClusterResolver\n"
        "resolver = MPIClusterResolver()\n"
        "resolver.cluster_spec()\n"
        "resolver.num_accelerators()\n"
        "assert 'cupy' not in sys.modules"
    )
    hidden = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    subprocess.run([sys.executable, "-c", script], env=hidden, check=True, timeout=scaled(60))


def _assigned(devices: int, visible: dict[int, int] | None) -> tuple[tuple[int, ...], dict[str, int]]:
    from mpidist.cluster_resolver import MPIClusterResolver
    from mpidist.strategies import MultiWorkerMirroredStrategy
    from mpidist.topology import world_topology
    from tests.support import fake_cupy

    topology = world_topology()
    cupy = fake_cupy.install(devices=devices)
    if visible is not None:  # like CUDA_VISIBLE_DEVICES: each rank sees one GPU, as number 0
        device = visible[topology.rank]
        cupy.cuda.runtime.deviceGetPCIBusId = lambda _: f"0000:{device:02d}:00.0"
    strategy = MultiWorkerMirroredStrategy()
    numbers = tuple(int(device.removeprefix("gpu:")) for device in strategy.extended.worker_devices)
    strategy.close()
    return numbers, MPIClusterResolver().num_accelerators()


@pytest.mark.jobs
@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("ranks", "devices", "visible", "expected"),
    [
        pytest.param(2, 4, None, [(0, 1), (2, 3)], id="same-devices"),
        pytest.param(3, 2, None, [(0,), (1,), (0,)], id="more-ranks-than-devices"),
        pytest.param(2, 1, {0: 0, 1: 1}, [(0,), (0,)], id="one-each-from-the-launcher"),
    ],
)
def test_ranks_of_a_node(
    ranks: int, devices: int, visible: dict[int, int] | None, expected: list[tuple[int, ...]]
) -> None:
    found = run_alone(_assigned, ranks, devices, visible)
    assert [mine for mine, _ in found] == expected
    assert [share for _, share in found] == [{"GPU": len(mine)} for mine in expected]
