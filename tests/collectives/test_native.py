"""Loading the native core: once, on first use, unless disabled, and never a library of other sources."""

from __future__ import annotations

import _ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpidist.collectives.node import native
from mpidist.native.build_library import LIBRARY, SOURCES

pytestmark = pytest.mark.one_rank


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources, without a library, in the place of the real ones."""
    copy = tmp_path / "native"
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    monkeypatch.setattr(native, "SOURCES", copy)
    monkeypatch.delenv("MPIDIST_NATIVE", raising=False)
    return copy


@pytest.fixture
def library() -> Path:
    path = SOURCES / LIBRARY
    if not path.exists():
        pytest.skip("the native core is not built; type: make native")
    return path


def test_the_library_is_loaded_once(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIDIST_NATIVE", raising=False)
    opener = native.opener()
    assert opener is not None
    assert native.why_not() is None
    assert native.opener() is opener


def test_the_setting_does_without(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDIST_NATIVE", "0")
    assert native.opener() is None
    assert native.why_not() == "MPIDIST_NATIVE=0"


def test_where_it_was_not_built(folder: Path) -> None:
    assert native.opener() is None
    reason = native.why_not()
    assert reason is not None
    assert reason.startswith(f"{folder / LIBRARY} is missing (docs/install.md; ")


def test_what_cannot_be_loaded(folder: Path) -> None:
    (folder / LIBRARY).write_text("of another machine")
    assert native.opener() is None
    reason = native.why_not()
    assert reason is not None
    assert reason.startswith("it cannot be loaded: ")
    assert str(folder / LIBRARY) in reason


def test_a_library_of_the_sources_beside_it(folder: Path, library: Path) -> None:
    shutil.copy(library, folder)
    assert native.opener() is not None


def test_a_library_of_other_sources_is_an_error(folder: Path, library: Path) -> None:
    shutil.copy(library, folder)
    header = folder / "mpidist.h"
    header.write_text(header.read_text() + "/* changed */\n")
    for ask in (native.opener, native.why_not, native.opener):
        with pytest.raises(RuntimeError, match=r"was built from other sources .* Build it again: .*build_library\.py"):
            ask()


def test_an_mpi_without_symbols_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.why_not_between_nodes() is None
    monkeypatch.setattr(native, "import_mpi", lambda: _ctypes)
    reason = native.why_not_between_nodes()
    assert reason is not None
    assert reason.startswith(f"it cannot call MPI: {_ctypes.__file__}: undefined symbol: MPI_")


@pytest.mark.jobs
def test_an_import_loads_nothing() -> None:
    source = "import mpidist, mpidist.collectives.node.native; print('libmpidist' in open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr
