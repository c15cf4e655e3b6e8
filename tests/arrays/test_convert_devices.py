"""Arrays on GPUs through to_array and restorer: they stay where they are, whichever library made them."""

from __future__ import annotations

import array as buffers
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpidist.arrays.convert import is_array_like, restorer, to_array
from mpidist.arrays.device_ops import is_device_array, ops_of
from mpidist.arrays.streams import find_cupy
from mpidist.core.errors import DeviceError
from tests.support.fake_cupy.devices import machine

pytestmark = pytest.mark.one_rank


class _Namespace:
    """The array library of ``Foreign``."""

    @staticmethod
    def from_dlpack(array: Any) -> Foreign:
        return Foreign(array)


class Foreign:
    """An array of another library on a GPU, which copies to the host for ``__array__``, as JAX does."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.inner.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.inner.__dlpack_device__()  # type: ignore[no-any-return]

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise AssertionError("was copied to the host")

    def __array_namespace__(self) -> type[_Namespace]:
        return _Namespace


class OldForeign:
    """An array that speaks the older protocol only, as those of Numba do."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.inner.__cuda_array_interface__

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise AssertionError("was copied to the host")


class OnDevice:
    """An array on a device of any kind."""

    def __init__(self, kind: int, error: Exception | None = None) -> None:
        self.kind = kind
        self.error = error

    def __dlpack_device__(self) -> tuple[int, int]:
        if self.error is not None and self.kind == 0:
            raise self.error
        return (self.kind, 0)

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise self.error or BufferError("this is never exported")


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "cupy", None)  # type: ignore[arg-type]
    find_cupy.cache_clear()
    yield
    find_cupy.cache_clear()


def test_cupy_arrays_pass_through_untouched(fake_gpus: Any) -> None:
    with fake_gpus.cuda.Device(1):
        given = fake_gpus.arange(6).reshape(2, 3).T
    assert to_array(given) is given
    assert restorer(given) is None
    assert is_array_like(given)


def test_other_libraries_arrays_are_not_copied(fake_gpus: Any) -> None:
    with fake_gpus.cuda.Device(1):
        inner = fake_gpus.arange(6, dtype="float32").reshape(2, 3)
    foreign = Foreign(inner)
    taken = to_array(foreign)
    assert is_device_array(taken)
    ops = ops_of(taken)
    assert (ops.pointer(taken), ops.device_of(taken)) == (inner.data.ptr, 1)
    np.testing.assert_array_equal(ops.to_host(taken), [[0, 1, 2], [3, 4, 5]])
    restore = restorer(foreign)
    assert restore is not None
    assert type(restore(taken)) is Foreign
    assert restore(taken).inner is taken
    assert is_array_like(foreign)


def test_work_of_the_other_library_is_waited_for(fake_gpus: Any) -> None:
    stream = fake_gpus.cuda.Stream(non_blocking=True)
    seen = []

    class Late(Foreign):
        def __dlpack__(self, **kwargs: Any) -> Any:
            seen.append(kwargs["stream"])
            return super().__dlpack__(**kwargs)

    with stream:
        to_array(Late(fake_gpus.zeros(3)))
    to_array(Late(fake_gpus.zeros(3)))
    assert seen == [stream.ptr, 1]  # the stream that is current, or CUDA's number for the default one


@pytest.mark.parametrize("is_torch", [False, True], ids=["namespace", "torch"])
def test_other_libraries_wait_for_another_device(
    is_torch: bool, fake_gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, went_on, ops = threading.Event(), threading.Event(), ops_of(fake_gpus.zeros(1))
    ours, theirs = ops.stream(1), ops.stream(1)
    array = ops.zeros((3,), np.dtype("f4"), 1)
    ours.wait(ops.current_stream(1).record())

    def from_dlpack(given: Any) -> Any:
        return given.__dlpack__(stream=theirs.handle)  # as PyTorch does, whatever device is current

    with ours:
        fake_gpus.cuda.get_current_stream().launch_host_func(lambda gate: gate.wait(30), gate)
        fake_gpus.cuda.Device(0).use()
        if is_torch:
            monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_dlpack=from_dlpack, Tensor=Foreign))
        else:
            monkeypatch.setattr(_Namespace, "from_dlpack", staticmethod(from_dlpack))
        restore = restorer(Foreign(array))
        assert restore is not None
        restore(array)
    theirs.raw.launch_host_func(threading.Event.set, went_on)
    try:
        assert not went_on.wait(0.1)
    finally:
        gate.set()
    theirs.synchronize()


def test_import_makes_the_arrays_device_current(fake_gpus: Any) -> None:
    fake_gpus.cuda.Device(1).use()
    foreign = Foreign(fake_gpus.ones(3))
    thread = threading.Thread(target=lambda: to_array(foreign))
    thread.start()
    thread.join()
    assert machine().contexts.devices == {1}


def test_the_cuda_array_interface_is_enough(fake_gpus: Any) -> None:
    inner = fake_gpus.arange(4, dtype="int32")
    taken = to_array(OldForeign(inner))
    assert is_device_array(taken)
    assert ops_of(taken).pointer(taken) == inner.data.ptr
    assert is_array_like(OldForeign(inner))
    assert restorer(OldForeign(inner)) is None


def test_array_without_export_raises_type_error(fake_gpus: Any) -> None:
    fake_gpus.cuda.Device(0).use()
    with pytest.raises(TypeError, match=r"grads of type .*OnDevice cannot be read by CuPy: this is never exported"):
        to_array(OnDevice(2), "grads")


def test_unreachable_devices_raise_type_error(fake_gpus: Any) -> None:
    with pytest.raises(TypeError, match="cannot be read by CuPy"):
        to_array(OnDevice(10))
    with pytest.raises(TypeError, match="cannot be read on the CPU: no such device"):
        to_array(OnDevice(0, BufferError("no such device")))


def test_array_on_gpu_without_cupy_names_the_fix(no_cupy: None) -> None:
    with pytest.raises(DeviceError, match="CuPy, which is not installed; type: pip install"):
        to_array(OnDevice(2))


def test_what_lies_on_the_cpu_needs_no_cupy(no_cupy: None) -> None:
    given = np.arange(3.0)
    assert to_array(given) is given
    np.testing.assert_array_equal(to_array(buffers.array("i", [1, 2])), [1, 2])
    assert to_array(1.5).shape == ()
    with pytest.raises(TypeError, match="expected a number, a NumPy or CuPy array"):
        to_array(object(), "loss")


@pytest.mark.torch
class TestTorch:
    """Tensors; this PyTorch has no GPU, so a subclass pretends to lie on one."""

    @pytest.fixture
    def tensor(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        torch = pytest.importorskip("torch")
        # A wheel for the CPU alone has no streams to ask.
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

        class OnGpu(torch.Tensor):  # type: ignore[misc, name-defined]
            is_cuda = True
            device = property(lambda self: torch.device("cuda", 1))

            def detach(self) -> Any:
                return torch.Tensor.detach(self).as_subclass(OnGpu)

            def __dlpack_device__(self) -> tuple[int, int]:
                return (2, 1)

            def __dlpack__(self, **kwargs: Any) -> Any:
                return torch.Tensor.__dlpack__(self.as_subclass(torch.Tensor))

        return torch.arange(6, dtype=torch.float32).reshape(2, 3).requires_grad_().as_subclass(OnGpu)

    def test_tensors_are_not_copied(self, fake_gpus: Any, tensor: Any) -> None:
        # torch has a context where its tensors lie.
        fake_gpus.cuda.Device(1).use()
        taken = to_array(tensor)
        assert is_device_array(taken)
        assert ops_of(taken).pointer(taken) == tensor.data_ptr()
        assert ops_of(taken).device_of(taken) == 1
        np.testing.assert_array_equal(ops_of(taken).to_host(taken), [[0, 1, 2], [3, 4, 5]])

    def test_results_go_back_through_dlpack(self, fake_gpus: Any, tensor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        given: list[Any] = []
        monkeypatch.setattr(sys.modules["torch"], "from_dlpack", given.append)
        restore = restorer(tensor)
        assert restore is not None
        result = fake_gpus.zeros(3)
        restore(result)
        assert [value is result for value in given] == [True]

    def test_tensor_on_gpu_without_cupy_names_the_fix(self, no_cupy: None, tensor: Any) -> None:
        with pytest.raises(DeviceError, match="pip install"):
            to_array(tensor)

    def test_a_tensor_on_another_device_is_refused(self) -> None:
        torch = pytest.importorskip("torch")
        with pytest.raises(TypeError, match=r"on meta; expected one on the CPU or on a CUDA device"):
            to_array(torch.empty(3, device="meta"))
