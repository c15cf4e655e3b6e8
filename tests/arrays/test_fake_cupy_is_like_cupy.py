"""The pretended CuPy offers nothing that the real one lacks, by the same names and arguments; needs CuPy, not a GPU."""

from __future__ import annotations

import inspect
import re
from types import ModuleType
from typing import Any

import pytest

from mpidist.arrays.streams import find_cupy
from tests.support.fake_cupy import devices, memory, module, ndarray, raw_kernel, streams

pytestmark = pytest.mark.one_rank

# What tests ask of the stand-in; the names of modules and of Python itself.
_OF_THE_FAKE = {"host_view", "view_of", "bytes", "capture"}
# What a real object has as an instance only, so that the class does not show it.
_OF_INSTANCES = {"ptr", "device_id", "is_non_blocking"}
# CuPy's arrays and their parts live in Cython, which names the streams' classes by themselves.
_CLASSES = ("Device", "Event", "ExternalStream", "MemoryPointer", "Stream")


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="compares with the real CuPy, which is not installed")


def _public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")} - _OF_THE_FAKE


def _own(kind: type) -> set[str]:
    special = {"__setitem__", "__getitem__", "__array_ufunc__", "__array_function__", "__array__", "__enter__"}
    special |= {"__dlpack__", "__dlpack_device__", "__cuda_array_interface__", "__len__", "__iter__", "__iadd__"}
    return {name for name in dir(kind) if not name.startswith("_") or name in special} - _OF_THE_FAKE


def parameters(function: Any) -> list[tuple[str, str]] | None:
    """Return names and defaults; Cython's functions tell them in the first line of their text.

    >>> parameters(len)
    [('obj', '')]
    """
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:
        return _of_text(function.__doc__ or "")
    return [
        (value.name, "" if value.default is value.empty else _written(value.default))
        for value in found
        if value.name != "self"
    ]


def _written(default: Any) -> str:
    return default.__name__ if isinstance(default, type) else repr(default)


def _of_text(text: str) -> list[tuple[str, str]] | None:
    match = re.match(r"[\w.]+\((.*?)\)(?: ->.*)?(?:\n|$)", text)
    if match is None:
        return None
    named = []
    for part in match[1].split(","):
        left, _, default = part.partition("=")
        words = left.split()
        if words and words[-1] not in ("self", "*", "/"):
            named.append((words[-1].lstrip("*"), {"u'C'": "'C'"}.get(default.strip(), default.strip())))
    return named


def _check_same(fake: Any, real: Any, name: str) -> None:
    mine, theirs = parameters(fake), parameters(real)
    if theirs is None or theirs == [("args", ""), ("kwargs", "")]:
        return  # Cython does not tell
    assert mine == theirs, f"{name}: the fake takes {mine}, CuPy {theirs}"


def test_every_name_of_the_modules_is_cupys(cupy: Any) -> None:
    fakes = module.build()
    import cupyx

    for name, real in {
        "cupy": cupy, "cupy.cuda": cupy.cuda, "cupy.cuda.memory": cupy.cuda.memory,
        "cupy.cuda.runtime": cupy.cuda.runtime, "cupyx": cupyx,
    }.items():  # fmt: skip
        missing = [key for key in _public(vars(fakes[name])) if not hasattr(real, key)]
        assert missing == [], f"{name} lacks {missing}"
    missing = [key for key in _public(vars(fakes["cupy"].linalg)) if not hasattr(cupy.linalg, key)]
    assert missing == []


def test_functions_take_the_same_arguments(cupy: Any) -> None:
    import cupyx

    for function in module._MADE:
        if function.__name__ not in ("array", "asarray", "arange", "from_dlpack", "get_array_module"):
            _check_same(function, getattr(cupy, function.__name__), function.__name__)
    for name in ("array", "asarray", "arange", "from_dlpack"):
        _check_same(getattr(module.build()["cupy"], name), getattr(cupy, name), name)
    for name in ("alloc_pinned_memory", "alloc"):
        _check_same(getattr(memory, name), getattr(cupy.cuda, name), name)
    _check_same(streams.get_current_stream, cupy.cuda.get_current_stream, "get_current_stream")
    for name in ("empty_pinned", "zeros_pinned"):
        _check_same(getattr(memory, name), getattr(cupyx, name), name)


@pytest.mark.parametrize("name", _CLASSES)
def test_classes_have_cupys_methods(cupy: Any, name: str) -> None:
    fake, real = getattr(module._cuda(), name), getattr(cupy.cuda, name)
    _check_class(fake, real)
    _check_same(fake.__init__, real.__init__, f"{name}.__init__")


def test_arrays_have_cupys_methods(cupy: Any) -> None:
    _check_class(ndarray.ndarray, cupy.ndarray)
    real = cupy._core.flags.Flags(True, False, True)
    fake = ndarray.Flags(True, False, True)
    assert _public(dir(fake)) <= _public(dir(real))
    assert not hasattr(real, "writeable")


def test_kernels_are_made_and_launched_alike(cupy: Any) -> None:
    text = cupy.RawKernel.__doc__
    for name in ("code", "name", "options", "backend", "translate_cucomplex", "enable_cooperative_groups", "jitify"):
        assert f"{name} (" in text
        assert name in inspect.signature(raw_kernel.RawKernel.__init__).parameters
    assert "shared_mem=0" in cupy.RawKernel.__call__.__doc__
    real = cupy.RawKernel('extern "C" __global__ void f() {}', "f")
    assert (real.name, real.options, real.backend) == ("f", (), "nvrtc")


def _check_class(fake: type, real: type) -> None:
    missing = sorted(name for name in _own(fake) - _OF_INSTANCES if not hasattr(real, name))
    assert missing == [], f"{real.__name__} lacks {missing}"
    for name in sorted(_own(fake) - _OF_INSTANCES):
        mine, theirs = getattr(fake, name), getattr(real, name)
        assert callable(mine) == callable(theirs), f"{real.__name__}.{name} is called with one of them only"
        if callable(mine) and not name.startswith("__") and name not in _LOOSE:
            _check_same(mine, theirs, f"{real.__name__}.{name}")


# Methods that the fake hands on to NumPy with whatever it is given.
_LOOSE = {
    "argmax", "argmin", "argsort", "clip", "conj", "cumprod", "cumsum", "item", "repeat", "round", "std", "var",
    "reshape", "transpose", "tobytes",
}  # fmt: skip


def test_errors_of_cuda_are_made_of_their_numbers(cupy: Any) -> None:
    mine, theirs = module.build()["cupy.cuda.runtime"], cupy.cuda.runtime
    for status in devices._TEXTS:
        fake, real = mine.CUDARuntimeError(status), theirs.CUDARuntimeError(status)
        assert (str(fake), fake.status) == (str(real), real.status)
    for runtime in (mine, theirs):
        runtime.check_status(0)
        with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorIllegalAddress"):
            runtime.check_status(700)
    for name in ("check_status", "eventQuery"):
        _check_same(getattr(mine, name), getattr(theirs, name), name)
    assert not hasattr(theirs, "cudaErrorNotReady")


def test_real_cupy_without_gpu_gives_its_reason(cupy: ModuleType) -> None:
    if cupy.cuda.is_available():
        pytest.skip("this machine has a GPU")
    find_cupy.cache_clear()
    state = find_cupy()
    find_cupy.cache_clear()
    assert state.module is None
    assert f"CuPy {cupy.__version__} is installed and sees no GPU: cudaError" in state.problem
