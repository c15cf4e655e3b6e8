"""Building the native core: which compiler makes it, what is said where none can, and what a wheel then holds."""

from __future__ import annotations

import base64
import csv
import ctypes
import hashlib
import os
import platform
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from mpidist.native import build_library

pytestmark = pytest.mark.one_rank

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the native core is for 64-bit Linux")
WHEEL = "mpidist-1.0.dist-info/WHEEL"
RECORD = "mpidist-1.0.dist-info/RECORD"


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIDIST_BUILD_NATIVE", raising=False)
    monkeypatch.delenv("CC", raising=False)


def real_compiler() -> str:
    """Return a compiler of this machine by its path."""
    found = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
    if found is None:
        pytest.skip("there is no C compiler; type: apt-get install gcc")
    return found


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with small sources, in the place of the library's own."""
    folder = tmp_path / "native"
    folder.mkdir()
    text = '#include "x.h"\n__attribute__((visibility("default"))) const char *nc_build(void) { return NC_BUILD; }\n'
    (folder / "one.c").write_text(text)
    (folder / "x.h").write_text("int f(void);\n")
    monkeypatch.setattr(build_library, "SOURCES", folder)
    return folder


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is all of PATH, on a machine for which PyPI has no compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(platform, "machine", lambda: "loongarch64")
    return folder


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def id_of(library: Path) -> str:
    nc_build = ctypes.CDLL(str(library)).nc_build
    nc_build.restype = ctypes.c_char_p
    text: bytes = nc_build()
    return text.decode()


def test_the_id_is_of_names_and_contents(sources: Path) -> None:
    before = build_library.source_id(sources)
    (sources / "libmpidist.so").write_text("")
    (sources / "some.py").write_text("")
    assert build_library.source_id(sources) == before
    (sources / "x.h").write_text("int g(void);\n")
    changed = build_library.source_id(sources)
    (sources / "x.h").rename(sources / "y.h")
    assert len({before, changed, build_library.source_id(sources)}) == 3


@on_linux
def test_when_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, wanted in (("", True), ("1", True), ("0", False)):
        monkeypatch.setenv("MPIDIST_BUILD_NATIVE", value)
        assert build_library.is_wanted() is wanted
    monkeypatch.setenv("MPIDIST_BUILD_NATIVE", "no")
    with pytest.raises(SystemExit, match="MPIDIST_BUILD_NATIVE='no': expected 0 or 1"):
        build_library.is_wanted()
    monkeypatch.delenv("MPIDIST_BUILD_NATIVE")
    for name, other in (("platform", "darwin"), ("maxsize", 2**31 - 1), ("implementation.name", "pypy")):
        with monkeypatch.context() as changed:
            changed.setattr(f"sys.{name}", other)
            assert not build_library.is_wanted()
            assert build_library.requirements() == []


@on_linux
@pytest.mark.jobs
class TestCompilers:
    def test_a_library_has_the_id_of_its_sources(self, sources: Path, capfd: pytest.CaptureFixture[str]) -> None:
        real_compiler()
        assert build_library.requirements() == []
        build_library.build_in_place()
        assert id_of(sources / "libmpidist.so") == build_library.source_id(sources)
        assert f"{sources / 'libmpidist.so'} was made by" in capfd.readouterr().err
        assert sorted(os.listdir(sources)) == ["libmpidist.so", "one.c", "x.h"]

    def test_cc_is_first_then_the_system_compilers(
        self, sources: Path, bin_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("gcc", "clang", "cc", "mine"):
            script(bin_folder / name, f"echo {name} says no $1 >&2; exit 3")
        monkeypatch.setenv("CC", "mine --of-me")
        (sources / "libmpidist.so").write_text("an older one")
        with pytest.raises(SystemExit) as caught:
            build_library.build_in_place()
        text = str(caught.value)
        found = [text.index(each) for each in ("$CC (mine --of-me)", "gcc (gcc)", "clang (clang)", "cc (cc)")]
        assert found == sorted(found)
        assert "exit status 3\n    mine says no --of-me\n" in text
        assert "export MPIDIST_BUILD_NATIVE=0" in text
        assert "export CC=" in text
        assert (sources / "libmpidist.so").read_text() == "an older one"

    def test_the_next_compiler_after_a_failure(
        self, sources: Path, bin_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("PATH", os.defpath)
        working = real_compiler()
        monkeypatch.setenv("PATH", str(bin_folder))
        # gcc is missing, clang compiles for a machine that there is not.
        script(bin_folder / "clang", 'while [ "$1" != -o ]; do shift; done; echo "some other machine" > "$2"')
        script(bin_folder / "cc", f'PATH={os.defpath} exec {working} "$@"')
        build_library.build_in_place()
        assert id_of(sources / "libmpidist.so") == build_library.source_id(sources)
        said = capfd.readouterr().err
        assert "gcc (gcc): No such file or directory" in said
        assert "clang (clang): compiles for another machine" in said
        assert "was made by cc" in said

    def test_cc_may_be_for_another_machine(
        self, sources: Path, bin_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = script(bin_folder / "other-cc", 'while [ "$1" != -o ]; do shift; done; echo other > "$2"')
        monkeypatch.setenv("CC", str(other))
        build_library.build_in_place()
        assert (sources / "libmpidist.so").read_text() == "other\n"

    @pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
    def test_one_is_asked_of_pypi_where_none_works(
        self, bin_folder: Path, machine: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script(bin_folder / "gcc", "echo 'fatal error: stdatomic.h: No such file or directory'; exit 1")
        assert build_library.requirements() == []
        monkeypatch.setattr(platform, "machine", lambda: machine)
        assert build_library.requirements() == ["ziglang"]

    def test_without_it_an_older_one_goes(self, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (sources / "libmpidist.so").write_text("an older one")
        monkeypatch.setenv("MPIDIST_BUILD_NATIVE", "0")
        build_library.build_in_place()
        assert sorted(os.listdir(sources)) == ["one.c", "x.h"]


@pytest.mark.parametrize("system", ["any", "manylinux_2_17_aarch64"])
def test_a_wheel_holds_library_and_sources(sources: Path, tmp_path: Path, system: str) -> None:
    wheel = tmp_path / f"mpidist-1.0-py3-none-{system}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("mpidist/__init__.py", "")
        # As setuptools finds it in build/ after a file was renamed.
        archive.writestr("mpidist/native/left_over.c", "")
        archive.writestr(WHEEL, f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-{system}\n")
        archive.writestr(RECORD, "mpidist/native/left_over.c,,\n")
    tagged = build_library.finish_wheel(wheel, b"the library")
    own = sysconfig.get_platform().replace("-", "_").replace(".", "_") if system == "any" else system
    assert tagged.name == f"mpidist-1.0-py3-none-{own}.whl"
    with zipfile.ZipFile(tagged) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    in_native = {f"mpidist/native/{name}" for name in ("libmpidist.so", "one.c", "x.h")}
    examples = {f"mpidist/examples/{path.name}" for path in build_library.EXAMPLES.glob("*") if path.suffix != ".md"}
    whole = {"mpidist/__init__.py", f"mpidist/{build_library.BUILD_ID}", WHEEL, RECORD}
    assert set(contents) - examples == whole | in_native
    assert contents[WHEEL].decode() == f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-{own}\n"
    *rows, last = csv.reader(contents[RECORD].decode().splitlines())
    assert last == [RECORD, "", ""]
    for name, digest, size in rows:
        expected = base64.urlsafe_b64encode(hashlib.sha256(contents[name]).digest()).decode().rstrip("=")
        assert (digest, int(size)) == (f"sha256={expected}", len(contents[name]))
    assert {name for name, _, _ in rows} == set(contents) - {RECORD}
