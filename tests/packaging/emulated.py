"""Other machines: Python and MPI of Debian for aarch64, which qemu-user runs here, and the loader of musl."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.packaging.release import MACHINE, run
from tests.support.ranks.jobs import child_environment

# Those of wheels of NumPy and mpi4py, too; pip derives none from another.
_PLATFORMS = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 27, 28)]


class Aarch64:
    """Programs of another machine, in a folder.

    Args:
        folder: Where to put them.
        wheel: To install, with what it needs.
    """

    def __init__(self, folder: Path, wheel: Path) -> None:
        if MACHINE == "aarch64":
            pytest.skip("this machine is one: the other tests install that wheel")
        self._qemu = _program("qemu-aarch64", "qemu-user")
        self._root, self._packages = folder / "root", folder / "packages"
        _unpack_debs(folder, ["python3", "libstdc++6", "openmpi-bin"], self._root, architecture="arm64")
        (self._python,) = (path for path in self._root.glob("usr/bin/python3.*") if path.name[-1].isdigit())
        version = self._python.name.removeprefix("python")
        options = [*_PLATFORMS, f"--python-version={version}", "--only-binary=:all:", "--target", self._packages]
        run([sys.executable, "-m", "pip", "install", "--quiet", *options, wheel])

    def on_2_ranks(self, *arguments: str | Path) -> str:
        """Run its Python on two ranks."""
        libraries = self._root / "usr/lib/aarch64-linux-gnu"
        emulated = [self._qemu, "-E", f"LD_LIBRARY_PATH={libraries}:{libraries}/openmpi/lib"]
        # Its launcher starts this machine's qemu, for each rank.
        command = [*emulated, self._root / "usr/bin/orterun", "-n", "2", *emulated, self._python, *arguments]
        return run(command, self._packages, self._environment())

    def _environment(self) -> Mapping[str, str]:
        paths = {"QEMU_LD_PREFIX": self._root, "OPAL_PREFIX": self._root / "usr", "PYTHONPATH": self._packages}
        return {**child_environment(), **{name: str(path) for name, path in paths.items()}}


# Loads a library as Python would, by the names of Python's that it asks for; prints what nc_build says.
_HOST = """
#include <dlfcn.h>
#include <stdio.h>
{names}
int main(int count, char **arguments)
{{
    void *library = dlopen(arguments[count - 1], RTLD_NOW);
    const char *(*build)(void) = library ? (const char *(*)(void))dlsym(library, "nc_build") : NULL;
    puts(build ? build() : dlerror());
    return !build;
}}
"""


def loaded_by_musl(library: Path, undefined: Sequence[str], folder: Path) -> str:
    """Load a library for musl and x86-64 by Debian's musl, and return which sources it says that it is of."""
    pytest.importorskip("ziglang", reason="type: make dist")
    if MACHINE != "x86_64":
        pytest.skip("needs x86_64")
    _unpack_debs(folder, ["musl"], folder / "musl", architecture="amd64")
    names = "".join(f"void *{name}[64];\n" for name in undefined if re.match("_?Py", name))
    (folder / "host.c").write_text(_HOST.format(names=names))
    # Without checks of its own, which take names of the newest musl.
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-musl", "-O2", "-fno-sanitize=all"]
    variables = {**child_environment(), "ZIG_GLOBAL_CACHE_DIR": str(folder / "zig")}
    run([*compiler, "-dynamic", "-rdynamic", "-o", folder / "host", folder / "host.c"], folder, variables)
    return run([folder / "musl/lib/ld-musl-x86_64.so.1", folder / "host", library]).strip()


def _program(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}; type: apt-get install {package}")
    return found


def _unpack_debs(scratch: Path, packages: Sequence[str], root: Path, architecture: str) -> None:
    """Unpack packages of Debian, and all that they need, into a folder; nothing is installed on this machine."""
    apt, dpkg = _program("apt-get", "apt, on Debian"), _program("dpkg-deb", "dpkg, on Debian")
    state, archives = scratch / "state", scratch / "cache/archives"
    for folder in (state / "lists/partial", archives / "partial"):
        folder.mkdir(parents=True)
    # None of this machine's is there.
    (state / "status").touch()
    options = {
        "APT::Architecture": architecture, "APT::Architectures": architecture, "APT::Sandbox::User": "root",
        "Dir::State": state, "Dir::State::status": state / "status", "Dir::Cache": scratch / "cache",
    }  # fmt: skip
    command = [apt, "--quiet", *(f"--option={name}={value}" for name, value in options.items())]
    run([*command, "update"])
    run([*command, "install", "--yes", "--download-only", "--no-install-recommends", *packages])
    for deb in archives.glob("*.deb"):
        run([dpkg, "--extract", deb, root])
