"""Finding CuPy: not installed, broken, without a GPU, with one; each with what to type."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mpidist.arrays import streams
from mpidist.arrays.device_ops import is_device_array, ops_for
from mpidist.arrays.streams import find_cupy, gpus_may_be_present, loaded_cupy, require_cupy
from mpidist.core.errors import DeviceError
from tests.support.speed import scaled

pytestmark = pytest.mark.one_rank

MakeCupy = Callable[[str], None]


@pytest.fixture
def unknown_cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing has looked for CuPy yet, and afterwards nothing has, either."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "cupy"}
    find_cupy.cache_clear()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        del sys.modules[name]
    sys.modules.update(hidden)
    find_cupy.cache_clear()


@pytest.fixture
def make_cupy(unknown_cupy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeCupy:
    """A function that installs a package ``cupy`` with that source."""

    def make(source: str) -> None:
        (tmp_path / "cupy").mkdir()
        (tmp_path / "cupy" / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)

    return make


def test_without_cupy_the_error_says_what_to_type(unknown_cupy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # type: ignore[arg-type]
    assert (find_cupy().module, find_cupy().is_installed) == (None, False)
    with pytest.raises(DeviceError, match=r"not installed; type: pip install -e '.*\[cuda13\]'"):
        require_cupy()
    with pytest.raises(DeviceError, match="not installed"):
        ops_for("gpu")
    assert loaded_cupy() is None
    del sys.modules["cupy"]


def test_missing_cupy_and_driver_are_both_named(unknown_cupy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # type: ignore[arg-type]
    monkeypatch.setattr(streams, "_DRIVER_FILES", ("/no/such/device",))
    assert "no NVIDIA driver" in find_cupy().problem
    find_cupy.cache_clear()
    monkeypatch.setattr(streams, "_DRIVER_FILES", ("/dev/null",))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "no NVIDIA driver" not in find_cupy().problem
    del sys.modules["cupy"]


def test_broken_cupy_differs_from_missing_cupy(make_cupy: MakeCupy) -> None:
    make_cupy("raise ImportError('libnvrtc.so.13: cannot open shared object file')")
    with pytest.raises(DeviceError, match=r"installed and does not load.*libnvrtc\.so\.13: cannot open"):
        require_cupy()


def test_cupy_without_its_own_module_is_broken(make_cupy: MakeCupy) -> None:
    make_cupy("import a_module_that_nobody_has")
    with pytest.raises(DeviceError, match=r"does not load.*a_module_that_nobody_has"):
        require_cupy()


_NO_GPU = """
__version__ = "14.2.0"
class cuda:
    class runtime:
        @staticmethod
        def getDeviceCount():
            raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")
    @staticmethod
    def is_available():
        %s
"""


@pytest.mark.parametrize(
    "answer", ["return False", "raise RuntimeError('cudaErrorInsufficientDriver: of an older version')"]
)
def test_a_cupy_without_a_gpu_gives_the_reason(
    answer: str, make_cupy: MakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    make_cupy(_NO_GPU % answer)
    with pytest.raises(DeviceError, match=r"CuPy 14\.2\.0 is installed and sees no GPU: cudaErrorInsufficientDriver"):
        require_cupy()
    assert "CUDA_VISIBLE_DEVICES is '7'" in find_cupy().problem
    assert find_cupy().is_installed
    assert loaded_cupy() is None


def test_a_driver_that_counts_no_gpu_is_named(make_cupy: MakeCupy) -> None:
    make_cupy(_NO_GPU.replace('raise RuntimeError("cuda', 'return 0; ("') % "return False")
    assert "sees no GPU: it counts 0" in find_cupy().problem


def test_the_answer_is_kept(make_cupy: MakeCupy) -> None:
    make_cupy("raise ImportError('once')")
    first = find_cupy()
    assert find_cupy() is first


def test_with_gpus_the_module_is_found(fake_gpus: object) -> None:
    assert find_cupy() == (fake_gpus, "", True)
    assert require_cupy() is fake_gpus
    assert loaded_cupy() is fake_gpus


def test_looking_for_a_loaded_cupy_imports_none(make_cupy: MakeCupy) -> None:
    make_cupy("raise AssertionError('was imported')")
    assert loaded_cupy() is None
    assert not is_device_array(np.float32(1))
    assert not is_device_array([1.0])
    assert "cupy" not in sys.modules


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_are_not_present(hidden: str, fake_gpus: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert not gpus_may_be_present()


def test_gpus_are_present_where_the_driver_is(unknown_cupy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(streams, "_DRIVER_FILES", ("/no/such/device", "/dev/null"))
    assert gpus_may_be_present()
    monkeypatch.setattr(streams, "_DRIVER_FILES", ("/no/such/device",))
    assert not gpus_may_be_present()
    assert "cupy" not in sys.modules


def test_gpus_are_present_if_cupy_is_usable(fake_gpus: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(streams, "_DRIVER_FILES", ())
    assert gpus_may_be_present()


@pytest.mark.jobs
@pytest.mark.one_rank
def test_arrays_need_neither_mpi_nor_cupy() -> None:
    # The room alone, without the package's __init__, which brings all rooms.
    program = """
import sys, types
package = types.ModuleType("mpidist"); package.__path__ = [sys.argv[1]]
sys.modules["mpidist"] = package
import numpy as np
from mpidist.arrays import convert, device_ops, dtypes, kernels
device_ops.ops_of(np.zeros(3)).copy(convert.to_array([1.0] and np.ones(3)))
print([name for name in sys.modules if name.partition(".")[0] in ("mpi4py", "cupy", "torch")])
"""
    package = Path(streams.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", program, package], capture_output=True, text=True, timeout=scaled(60))
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
