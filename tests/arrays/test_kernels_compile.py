"""The kernels go through NVIDIA's compiler, for the GPUs it knows, without spilled registers; no GPU is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mpidist.arrays.kernel_source import INTRINSICS, TEMPLATES, all_kernels, entry

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
    path.write_text(INTRINSICS + TEMPLATES + "".join(entry(kernel) for kernel in all_kernels()))
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
    assert len(frames) == len(all_kernels())
    assert set(frames) == {("0", "0", "0")}


@pytest.mark.long
def test_accesses_are_wide_and_denormal_numbers_are_kept(nvcc: str, source: Path) -> None:
    ptx = source.with_suffix(".ptx")
    run(nvcc, *OPTIONS, "-arch=compute_80", "-ptx", "-o", str(ptx), str(source))
    text = ptx.read_text()
    assert ".ftz" not in text
    bodies = dict(re.findall(r"\.entry (\w+)\((.*?)\n}", text, re.DOTALL))
    assert set(bodies) == {kernel.name for kernel in all_kernels()}
    for name in ("float32_to_float32_divided", "uint32_to_uint32", "int8_to_float32", "float16_to_float32"):
        assert re.search(r"st\.global\.v4\.[uf]32", bodies[f"mpidist_{name}"]), name
    for name in ("float32_to_float16", "float32_to_bfloat16", "float32_to_float16_divided"):
        assert re.search(r"ld\.global\.v4\.[uf]32", bodies[f"mpidist_{name}"]), name
    for name, body in bodies.items():
        assert not re.search(r"\b(ld|st)\.(?!global|param)", body), f"{name} does not know that its memory is global"
