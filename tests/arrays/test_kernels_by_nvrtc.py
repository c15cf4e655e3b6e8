"""Every kernel compiled by the NVRTC that CuPy uses, for the oldest GPUs and for H100; needs no GPU."""

from __future__ import annotations

import importlib.util
import re

import pytest

from mpidist.arrays.kernels import INTRINSICS, TEMPLATES, entry_of
from tests.support.kernel_values import KERNELS

pytestmark = [
    pytest.mark.one_rank,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed; see make test-binding"),
]


@pytest.mark.parametrize("kind", ["oldest", "H100"])
def test_kernels_compile_without_spills(kind: str) -> None:
    from cupy.cuda import nvrtc

    try:
        oldest = min(arch for arch in nvrtc.getSupportedArchs() if arch >= 70)
    except RuntimeError as error:
        pytest.skip(f"there is no NVRTC: {error}")
    # CuPy adds -ftz=true to what it compiles.
    options = (f"-arch=sm_{oldest if kind == 'oldest' else 90}", "-std=c++17", "-ftz=true", "--ptxas-options=-v")
    for name in KERNELS:
        program = nvrtc.createProgram(INTRINSICS + TEMPLATES + entry_of(name), f"{name}.cu", [], [])
        try:
            nvrtc.compileProgram(program, options)
            log = nvrtc.getProgramLog(program)
        finally:
            nvrtc.destroyProgram(program)
        assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}, log
