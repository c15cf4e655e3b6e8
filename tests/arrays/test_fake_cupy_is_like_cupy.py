"""The simulated CuPy has no name that the real one lacks. Needs CuPy, but no GPU (make test-binding)."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from mpidist.arrays.streams import find_cupy
from tests.support.fake_cupy import devices, module, ndarray, raw_kernel

pytestmark = pytest.mark.one_rank

# Names for tests only, and attributes that real objects have as instances only.
_OF_THE_FAKE = {"host_view", "view_of", "bytes", "capture", "ptr", "device_id", "is_non_blocking"}
_SPECIAL = {
    "__setitem__", "__getitem__", "__array_ufunc__", "__array_function__", "__array__", "__enter__", "__dlpack__",
    "__dlpack_device__", "__cuda_array_interface__", "__len__", "__iter__", "__iadd__",
}  # fmt: skip


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="compares with the real CuPy, which is not installed")


def missing(fake: Any, real: Any) -> list[str]:
    names = vars(fake) if inspect.ismodule(fake) else dir(fake)
    public = {name for name in names if not name.startswith("_") or name in _SPECIAL} - _OF_THE_FAKE
    return [name for name in sorted(public) if not hasattr(real, name)]


def test_every_name_is_cupys(cupy: Any) -> None:
    import cupyx

    fakes = module.build()
    pairs = [
        (fakes["cupy"], cupy),
        (fakes["cupy"].linalg, cupy.linalg),
        (fakes["cupy.cuda"], cupy.cuda),
        (fakes["cupy.cuda.memory"], cupy.cuda.memory),
        (fakes["cupy.cuda.runtime"], cupy.cuda.runtime),
        (fakes["cupyx"], cupyx),
        (ndarray.ndarray, cupy.ndarray),
        *(
            (getattr(module._cuda(), name), getattr(cupy.cuda, name))
            for name in ("Device", "Event", "ExternalStream", "MemoryPointer", "Stream")
        ),
    ]
    assert {str(real): names for fake, real in pairs if (names := missing(fake, real))} == {}


def test_kernels_have_cupys_arguments(cupy: Any) -> None:
    text = cupy.RawKernel.__doc__
    for name in ("code", "name", "options", "backend", "translate_cucomplex", "enable_cooperative_groups", "jitify"):
        assert f"{name} (" in text
        assert name in inspect.signature(raw_kernel.RawKernel.__init__).parameters


def test_cuda_errors_have_cupys_texts(cupy: Any) -> None:
    mine, theirs = module.build()["cupy.cuda.runtime"], cupy.cuda.runtime
    for status in devices._TEXTS:
        fake, real = mine.CUDARuntimeError(status), theirs.CUDARuntimeError(status)
        assert (str(fake), fake.status) == (str(real), real.status)
    assert not hasattr(theirs, "cudaErrorNotReady")


def test_real_cupy_without_gpu_gives_its_reason(cupy: Any) -> None:
    if cupy.cuda.is_available():
        pytest.skip("this machine has a GPU")
    find_cupy.cache_clear()
    state = find_cupy()
    find_cupy.cache_clear()
    assert state.module is None
    assert f"CuPy {cupy.__version__} is installed and sees no GPU: cudaError" in state.problem
