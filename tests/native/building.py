"""Builds the C programs that check the native core, by the compilers and sanitizers of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("programs")
NATIVE = PROGRAMS.parents[2] / "mpidist" / "native"
FLAGS = ("-std=c11", "-g", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", f"-I{NATIVE}", "-pthread")
# What a program consists of beside its own file and the reference.
_CORE = tuple(NATIVE / f"{name}.c" for name in ("core", "chunks", "push", "leaders", "memory", "kernels"))
_SOURCES = {
    "check_kernels": (),  # includes the kernels
    "check_threads": (PROGRAMS / "plans.c", PROGRAMS / "worlds.c", *_CORE),
    "check_leaders": _CORE,
    "check_kills": _CORE,
    "check_overlap": _CORE,
}
_COMPILER_SECONDS, _RUN_SECONDS = 120, 900


@dataclass(frozen=True)
class Variant:
    """A way to build the programs.

    Args:
        name: Of the tests.
        compilers: The first of them that can is taken.
        options: For them.
        emulators: The first of them that is here runs the programs, where this machine cannot.
    """

    name: str
    compilers: tuple[str, ...]
    options: tuple[str, ...]
    emulators: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the name."""
        return self.name


_ANY = ("gcc", "clang", "cc")
GCC = Variant("gcc", ("gcc",), ("-O3",))
CLANG = Variant("clang", ("clang",), ("-O3",))
PLAIN = Variant("plain", _ANY, ("-O3",))
BASE = Variant("without AVX2", _ANY, ("-O3", "-DNC_NO_AVX2"))
ADDRESSES = Variant("ASan and UBSan", _ANY, ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"))
THREADS = Variant("TSan", _ANY, ("-O1", "-fsanitize=thread"))
# Debian's packages are qemu-user, gcc-aarch64-linux-gnu and libc6-dev-arm64-cross.
AARCH64 = Variant(
    "aarch64", ("aarch64-linux-gnu-gcc",), ("-O3", "-static"), emulators=("qemu-aarch64", "qemu-aarch64-static")
)


def compiled(program: str, variant: Variant, folder: Path) -> list[str]:
    """Return the command of a program, built unless it is in the folder; skip the test where no compiler can."""
    made = folder / f"{program} {variant}"
    if not made.exists():
        sources = [PROGRAMS / f"{program}.c", PROGRAMS / "reference.c", *_SOURCES[program]]
        run(
            [compiler_of(variant), *FLAGS, *variant.options, *map(str, sources), "-lm", "-o", str(made)],
            _COMPILER_SECONDS,
        )
    return [*emulator_of(variant), str(made)]


# Builds a program of nothing with the compiler and options given, and runs it by what is in the first argument.
_PROBE = """
emulator=$1; shift
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
echo 'int main(void) { return 0; }' | "$@" -x c - -o "$folder/probe" && $emulator "$folder/probe"
"""


@cache
def compiler_of(variant: Variant) -> str:
    """Return the first compiler of a variant whose programs run here; skip the test where there is none."""
    reasons = []
    for compiler in filter(shutil.which, variant.compilers):
        command = ["sh", "-c", _PROBE, "sh", " ".join(emulator_of(variant)), compiler, "-pthread", *variant.options]
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILER_SECONDS)
        if tried.returncode == 0:
            return compiler
        reasons.append(f"{compiler} {' '.join(variant.options)}: {tried.stderr.strip()[-300:]}")
    pytest.skip(f"{variant}: {', '.join(reasons) or 'there is no ' + ' or '.join(variant.compilers)}")


def emulator_of(variant: Variant) -> list[str]:
    """Return how the commands of a variant begin; skip the test where there is no such emulator."""
    if not variant.emulators:
        return []
    found = next(filter(None, map(shutil.which, variant.emulators)), None)
    if found is None:
        pytest.skip(f"{variant}: there is no {' or '.join(variant.emulators)}")
    return [found]


def run(command: Sequence[str], seconds: float = _RUN_SECONDS) -> str:
    """Run a program that has to succeed, and return what it printed."""
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout
