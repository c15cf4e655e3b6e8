"""Which GPU is current: made so by no call where it is, and none that the process has nothing to do with."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from mpidist.arrays.device_ops import DeviceOps, ops_for
from mpidist.arrays.streams import CurrentDevice
from mpidist.core.concurrency import mark_own_thread
from mpidist.core.errors import DeviceError
from tests.support import fake_cupy
from tests.support.fake_cupy.devices import current_device, machine

pytestmark = [pytest.mark.one_rank, pytest.mark.parametrize("fake_gpus", [{"devices": 3}], indirect=True)]


@pytest.fixture
def ops(fake_gpus: Any) -> DeviceOps:
    return ops_for("gpu")


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_a_device_that_is_current_costs_no_call(ops: DeviceOps, fake_gpus: Any) -> None:
    fake_gpus.cuda.Device(1).use()
    fake_cupy.counts().clear()
    array = ops.zeros((5,), np.dtype("f4"), 1)
    with ops.on(1), ops.stream(1) as stream:
        stream.wait(ops.current_stream(1).record())
        stream.record().synchronize()
    ops.copy(array)
    assert fake_cupy.counts().device_switches == 0


def test_used_devices_are_restored(ops: DeviceOps, fake_gpus: Any) -> None:
    fake_gpus.cuda.Device(2).use()
    with pytest.raises(KeyError), ops.on(1):
        ops.stream(1)
        with ops.on(2):
            assert current_device() == 2
        fake_gpus.cuda.Device(2).use()
        with ops.on(1):
            pass
        assert current_device() == 2
        raise KeyError
    assert current_device() == 2


def test_unused_devices_are_not_restored(ops: DeviceOps) -> None:
    with ops.on(1):
        ops.from_host(np.ones(3), 1)
    assert current_device() == 1
    with ops.stream(2):
        pass
    assert current_device() == 1
    assert machine().contexts.devices == {1, 2}


def test_a_thread_of_mpidist_stays_where_it_began(ops: DeviceOps, fake_gpus: Any) -> None:
    fake_gpus.zeros(3)
    ops.stream(1), ops.stream(2)
    event = ops.current_stream(1).record()
    event.synchronize()

    def own() -> tuple[int, int, bool]:
        mark_own_thread()
        is_done = event.is_done
        first = current_device()
        with ops.on(2):
            pass
        return first, current_device(), is_done

    assert in_thread(own) == (1, 1, True)

    def chosen() -> int:
        mark_own_thread()
        fake_gpus.cuda.Device(2).use()
        assert event.is_done
        return current_device()

    assert in_thread(chosen) == 2
    assert in_thread(lambda: (event.is_done, current_device())) == (True, 0)


def test_pinning_makes_no_context_elsewhere(ops: DeviceOps) -> None:
    array = ops.from_host(np.ones(3), 1)
    assert in_thread(lambda: ops.to_host(array).sum()) == 3
    assert machine().contexts.devices == {1}


def test_the_driver_says_where_there_is_a_context(fake_gpus: Any) -> None:
    driver = CurrentDevice(fake_gpus)
    assert not driver.has_context(1)
    fake_gpus.cuda.Device(1).use()
    assert driver.has_context(1)
    with pytest.raises(DeviceError, match="cuDeviceGet of the NVIDIA driver failed with status 101. Check `nvidia-smi"):
        driver.has_context(7)
