"""Which MPI library mpi4py loads, and whose an mpirun is; against the real ones of this machine where it has them."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

from mpidist.core.errors import LaunchError
from mpidist.topology.mpi_library import (
    MpiLibrary,
    belongs,
    find_library,
    find_mpirun,
    library_of,
    loaded_library,
    mpirun_beside,
)
from tests.support.speed import scaled

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

# What the libraries say, word for word where they were at hand.
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11, Sep 16, 2026\0"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25 20:45:26 UTC 2026\nMPICH ABI:          18:2:6\n"
INTEL = "Intel(R) MPI Library 2021.18.1 for Linux* OS\n"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)\nMPI BUILD INFO : Wed Nov 15 20:57 2023\n"
MVAPICH = "MVAPICH2 Version      :\t2.3.7\nMPICH base: 3.2.1\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (OPEN_MPI, "Open MPI 5.0.11"),
        (MPICH, "MPICH 5.0.2"),
        (INTEL, "Intel MPI 2021.18.1"),
        (CRAY, "Cray MPICH 8.1.28.15"),
        ("Homemade MPI, build 7", "Homemade MPI"),
        ("", "an MPI library without a name"),
    ],
)
def test_names_of_libraries(text: str, shown: str) -> None:
    assert str(library_of(text, None)) == shown


def test_mvapich_is_not_taken_for_mpich() -> None:
    assert library_of(MVAPICH, None).vendor == "MVAPICH"


def test_the_library_of_this_python_is_found_without_starting_mpi() -> None:
    found = find_library()
    here = library_of(MPI.Get_library_version(), loaded_library())
    assert (found.vendor, found.version) == (here.vendor, here.version)
    assert found.path is not None
    assert found.path.exists()


def test_its_mpirun_is_found_and_belongs_to_it() -> None:
    library = find_library()
    mpirun = find_mpirun(library)
    assert mpirun is not None
    assert belongs(mpirun, library.vendor)
    assert not belongs(mpirun, "MPICH" if library.vendor == "Open MPI" else "Open MPI")


def _launcher(folder: Path, name: str, says: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_an_mpirun_of_another_library_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _launcher(tmp_path / "a" / "bin", "mpirun", "HYDRA build details: Version: 5.0.2")
    right = _launcher(tmp_path / "b", "mpirun", "mpirun (Open MPI) 5.0.11")
    monkeypatch.setenv("PATH", f"{tmp_path / 'b'}:/usr/bin:/bin")
    library = MpiLibrary("Open MPI", (5, 0, 11), tmp_path / "a" / "lib" / "libmpi.so.40")
    assert find_mpirun(library) == right
    assert mpirun_beside(library) == tmp_path / "a" / "bin" / "mpirun"  # nobody is asked


def test_debian_keeps_two_side_by_side(tmp_path: Path) -> None:
    _launcher(tmp_path / "bin", "mpirun", "HYDRA build details: Version: 4.0.2")
    right = _launcher(tmp_path / "bin", "mpirun.openmpi", "mpirun (Open MPI) 4.1.4")
    assert find_mpirun(MpiLibrary("Open MPI", (4, 1, 4), tmp_path / "lib" / "x86_64" / "libmpi.so.40")) == right


def test_none_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_mpirun(MpiLibrary("Open MPI", (5,), None)) is None


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    with pytest.raises(LaunchError, match=r"(?s)cannot load an MPI library.*/nowhere/libmpi\.so: .*pip install -e "):
        find_library()


def test_a_python_without_mpi4py() -> None:
    with pytest.raises(LaunchError, match="No module named 'mpi4py'"):
        find_library(_isolated())


def _isolated() -> str:
    """Return a Python that sees no packages."""
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    if not base.exists():
        pytest.skip(f"there is no {base} beside this virtual environment")
    seen = subprocess.run([str(base), "-c", "import mpi4py"], capture_output=True, timeout=scaled(60), check=False)
    if seen.returncode == 0:
        pytest.skip(f"{base} itself has mpi4py")
    return str(base)
