"""The native core's sources: no warning of any compiler or checker that is here."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from tests.native.building import FLAGS, NATIVE, run

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs]

SOURCES = sorted(map(str, NATIVE.glob("*.c")))
DEFINE = '-DNC_BUILD="0"'
ZIG = [sys.executable, "-m", "ziglang", "cc"]
# What a finding would name: not the C library's own choice of functions, nor comparisons by memcmp.
TIDY = "-*,bugprone-*,clang-analyzer-*,-*.DeprecatedOrUnsafeBufferHandling,-*-swappable-parameters"
TIDY += ",-*-reserved-identifier,-*-suspicious-string-compare"


def needs(program: str, package: str) -> str:
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program}; type: apt-get install {package}")
    return program


@pytest.mark.parametrize("compiler", ["gcc", "clang", "zig", "aarch64-linux-gnu-gcc"])
@pytest.mark.parametrize("level", ["-O3", "-O0"])
def test_no_warnings(compiler: str, level: str, tmp_path: Path) -> None:
    if compiler == "zig":
        if importlib.util.find_spec("ziglang") is None:
            pytest.skip("there is no ziglang; type: pip install ziglang")
        command = ZIG
    else:
        command = [needs(compiler, f"gcc-{compiler.removesuffix('-gcc')}" if "-" in compiler else compiler)]
    run([*command, *FLAGS, level, "-fPIC", "-shared", DEFINE, *SOURCES, "-lm", "-o", str(tmp_path / "library.so")])


def test_cppcheck() -> None:
    command = [needs("cppcheck", "cppcheck"), "--quiet", "--enable=warning,performance", "--error-exitcode=1"]
    run([*command, "--std=c11", "-D__x86_64__", DEFINE, *SOURCES])


def test_clang_tidy() -> None:
    command = [needs("clang-tidy", "clang-tidy"), "--quiet", "--warnings-as-errors=*", f"--checks={TIDY}"]
    run([*command, *SOURCES, "--", "-std=c11", DEFINE])
