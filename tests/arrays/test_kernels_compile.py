"""The kernels go through NVIDIA's compiler, for the GPUs it knows, without spilled registers; no GPU is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mpidist.arrays.kernels import INTRINSICS, TEMPLATES, entry_of
from tests.support.kernel_values import KERNELS

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank, pytest.mark.timeout(400)]

ARCHITECTURES = (70, 80, 90, 100)
# CuPy adds -ftz=true to what it compiles.
OPTIONS = ["-std=c++17", "-ftz=true", "-Werror=all-warnings"]


@pytest.fixture(scope="module")
def nvcc() -> str:
    found = shutil.which("nvcc")
    if found is None:
        pytest.skip("needs nvcc, NVIDIA's CUDA compiler")
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda") / "kernels.cu"
    path.write_text(INTRINSICS + TEMPLATES + "".join(map(entry_of, KERNELS)))
    return path


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills_registers(nvcc: str, source: Path, architecture: int) -> None:
    if f"sm_{architecture}" not in run(nvcc, "--list-gpu-code").split():
        pytest.skip(f"this nvcc does not compile for sm_{architecture}")
    target = f"arch=compute_{architecture},code=sm_{architecture}"
    result = str(source.with_suffix(".cubin"))
    output = run(nvcc, *OPTIONS, "-gencode", target, "-Xptxas", "-v", "-cubin", "-o", result, str(source))
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", output)
    assert len(frames) == len(KERNELS)
    assert set(frames) == {("0", "0", "0")}


@pytest.mark.long
def test_denormal_numbers_are_kept(nvcc: str, source: Path) -> None:
    ptx = source.with_suffix(".ptx")
    run(nvcc, *OPTIONS, "-arch=compute_80", "-ptx", "-o", str(ptx), str(source))
    text = ptx.read_text()
    # The divisor itself is a whole number.
    assert set(re.findall(r"\S+\.ftz\S*", text)) <= {"cvt.rn.ftz.f32.f64"}
    assert len(re.findall(r"\.entry (\w+)\(", text)) == len(KERNELS)
