"""While the program records a CUDA graph: mpidist's threads do not disturb it; what CUDA does not tell is not known."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpidist.arrays.convert import to_array
from mpidist.arrays.device_ops import DeviceOps, ops_for
from mpidist.core.concurrency import mark_own_thread
from tests.support.fake_cupy.devices import CUDARuntimeError

pytestmark = pytest.mark.one_rank


@pytest.fixture
def ops(fake_gpus: Any) -> DeviceOps:
    fake_gpus.cuda.Device(0).use()
    return ops_for("gpu")


@contextmanager
def recording(cupy: Any) -> Iterator[Any]:
    """Record as ``torch.cuda.graph`` does."""
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
    with stream:
        yield stream
    stream.end_capture()


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_threads_of_mpidist_do_not_disturb_it(ops: DeviceOps, fake_gpus: Any) -> None:
    event = ops.current_stream(0).record()
    event.synchronize()

    def own() -> tuple[bool, int]:
        mark_own_thread()
        with ops.on(0):
            return event.is_done, ops.pinned(5000).nbytes + ops.empty((1 << 20,), np.dtype("i1"), 0).nbytes

    with recording(fake_gpus):
        assert in_thread(own) == (True, 5000 + (1 << 20))


def test_unknown_events_are_not_done(ops: DeviceOps, fake_gpus: Any) -> None:
    event = ops.current_stream(0).record()
    with pytest.raises(CUDARuntimeError, match="cudaErrorStreamCaptureInvalidated"), recording(fake_gpus) as stream:
        assert not in_thread(lambda: event.is_done)
        with ops.on(0):
            inside = ops.current_stream(0).record()
        assert not inside.is_done
        del stream
    event.synchronize()
    assert event.is_done


def test_a_stream_knows_that_it_records(ops: DeviceOps, fake_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with recording(fake_gpus):
        assert ops.current_stream(0).is_capturing
    assert not ops.current_stream(0).is_capturing

    def refused(stream: int) -> bool:
        raise CUDARuntimeError(906)

    # The default stream, while one that waits for it is recording.
    monkeypatch.setattr(fake_gpus.cuda.runtime, "streamIsCapturing", refused)
    assert ops.current_stream(0).is_capturing


def test_tensors_of_a_capturing_stream_raise(fake_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        is_cuda = True

        def detach(self) -> Tensor:
            return self

    cuda = SimpleNamespace(is_current_stream_capturing=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor, cuda=cuda))
    with pytest.raises(RuntimeError, match=r"grads.*CUDA graph.*between two graphs"):
        to_array(Tensor(), "grads")
