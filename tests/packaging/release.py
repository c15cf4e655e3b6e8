"""The release that ``make dist`` has built: where it is, and which file is for which machine."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from mpidist.core import __version__
from tests.support.ranks.jobs import ROOT

RELEASE = ROOT / "dist"
PACKAGING = ROOT / "packaging"
SDIST = RELEASE / f"mpidist-{__version__}.tar.gz"
MACHINE = platform.machine()
_SECONDS = 300


def builder() -> ModuleType:
    """Return the script that builds it, as a module."""
    spec = importlib.util.spec_from_file_location("build_release", PACKAGING / "build_release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TAGS: list[str] = list(builder().TARGETS)


def wheel(tag: str) -> Path:
    """Return the wheel with a tag; skip the test where nothing was built."""
    path = RELEASE / f"mpidist-{__version__}-py3-none-{tag}.whl"
    if not path.exists():
        pytest.skip(f"there is no {path.relative_to(ROOT)}; type: make dist")
    return path


def wheel_of_this_machine() -> Path:
    """Return the wheel that pip takes here; skip the test where there is none."""
    return wheel(f"{'manylinux_2_17' if platform.libc_ver()[0] == 'glibc' else 'musllinux_1_2'}_{MACHINE}")


def run(command: Sequence[str | Path], folder: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    """Run a program that has to succeed, and return what it printed."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout[-8000:]}"
    return done.stdout
