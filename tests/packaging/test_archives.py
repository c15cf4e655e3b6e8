"""The archives of a release hold every file that must be there and none that must not, and say for what they are."""

from __future__ import annotations

import csv
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from mpidist.core import __version__
from mpidist.native.build_library import source_id
from tests.packaging.release import RELEASE, SDIST, TAGS, builder, run, wheel
from tests.support.ranks.jobs import ROOT

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs, pytest.mark.long]

LIBRARY = "mpidist/native/libmpidist.so"
INFO = f"mpidist-{__version__}.dist-info"
_MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
# Of git and of CI, with which nobody who has the sdist can do anything.
_NOT_IN_SDIST = re.compile(r"\.ci/|\.git|\.pre-commit-config\.yaml$")


def tracked(folder: str = ".") -> set[str]:
    """Return the files of a folder that git tracks."""
    asked = subprocess.run(["git", "ls-files", folder], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return set(asked.stdout.split())


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as opened:
        assert opened.testzip() is None
        return {name: opened.read(name) for name in opened.namelist()}


def test_nothing_else_was_built() -> None:
    names = {wheel(tag).name for tag in TAGS}
    assert {path.name for path in RELEASE.iterdir()} == {*names, SDIST.name, "recipes", "SHA256SUMS"}


def test_the_checksums() -> None:
    wheel(TAGS[0])
    lines = [line.split("  ") for line in (RELEASE / "SHA256SUMS").read_text().splitlines()]
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in RELEASE.glob("*.[gw]*")}
    assert {name: checksum for checksum, name in lines} == sums


def test_the_sdist_holds_what_git_tracks() -> None:
    wheel(TAGS[0])
    with tarfile.open(SDIST) as opened:
        names = {member.name.partition("/")[2] for member in opened if member.isfile()}
    generated = {name for name in names if name == "PKG-INFO" or name.startswith("mpidist.egg-info/")}
    assert names - generated == {name for name in tracked() if not _NOT_IN_SDIST.match(name)}


@pytest.mark.parametrize("tag", TAGS)
def test_a_wheel_holds_the_package_and_nothing_else(tag: str) -> None:
    held = contents(wheel(tag))
    described = {f"{INFO}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt")}
    described.add(f"{INFO}/licenses/LICENSE")
    examples = {f"mpidist/{name}" for name in tracked("examples")}
    assert set(held) == {*tracked("mpidist"), *examples, "mpidist_torch_entry.py", LIBRARY, *described}
    assert {held[name] == (ROOT / name).read_bytes() for name in tracked("mpidist")} == {True}
    rows = {name: checksum for name, checksum, _ in csv.reader(io.StringIO(held[f"{INFO}/RECORD"].decode()))}
    assert rows.keys() == held.keys()
    about = held[f"{INFO}/WHEEL"].decode()
    assert "Root-Is-Purelib: false\n" in about
    assert re.findall(r"^Tag: (.*)$", about, re.MULTILINE) == [f"py3-none-{tag}"]


def test_wheels_differ_in_the_library_alone() -> None:
    first, *others = (contents(wheel(tag)) for tag in TAGS)
    own = {LIBRARY, f"{INFO}/WHEEL", f"{INFO}/RECORD"}
    for other in others:
        assert {name for name in first if first[name] != other[name]} == own


@pytest.mark.parametrize("tag", TAGS)
def test_the_library_is_for_the_machine_of_the_tag(tag: str) -> None:
    elffile = pytest.importorskip("elftools.elf.elffile", reason="type: make dist")
    library = contents(wheel(tag))[LIBRARY]
    elf = elffile.ELFFile(io.BytesIO(library))
    assert [elf["e_machine"]] == [machine for name, machine in _MACHINES.items() if tag.endswith(name)]
    dynamic = elf.get_section_by_name(".dynamic")
    # musl's loader takes any name that begins with "libc." for itself.
    needed = [entry.needed for entry in dynamic.iter_tags("DT_NEEDED")]
    assert needed == ["libc.so" if tag.startswith("musl") else "libc.so.6"]
    assert not [entry for entry in dynamic.iter_tags() if entry.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")]
    symbols = list(elf.get_section_by_name(".dynsym").iter_symbols())
    assert {symbol.name for symbol in symbols[1:] if symbol["st_shndx"] != "SHN_UNDEF"} == {"nc_build", "nc_functions"}
    # Its sources, of which mpidist asks when it loads it.
    assert source_id(ROOT / "mpidist/native").encode() in library


@pytest.mark.parametrize("tag", [tag for tag in TAGS if tag.startswith("many")])
def test_the_c_library_is_not_newer_than_the_tag_says(tag: str) -> None:
    pytest.importorskip("auditwheel", reason="type: make dist")
    said = " ".join(run([sys.executable, "-m", "auditwheel", "show", wheel(tag)]).split())
    assert f'is consistent with the following platform tag: "{tag}"' in said


def test_tools_of_the_index_find_nothing_wrong() -> None:
    pytest.importorskip("twine", reason="type: make dist")
    archives = [SDIST, *map(wheel, TAGS)]
    run([sys.executable, "-m", "twine", "check", "--strict", *archives])
    # PyTorch imports the entry point alone, without mpidist, which is why it stands beside the package.
    run([sys.executable, "-m", "check_wheel_contents", "--ignore", "W009", *archives[1:]])


def test_recipes_name_the_sdist() -> None:
    wheel(TAGS[0])
    checksum = hashlib.sha256(SDIST.read_bytes()).hexdigest()
    texts = {name: (RELEASE / "recipes" / name).read_text() for name in builder().RECIPES}
    assert {name for name, text in texts.items() if checksum in text} == {
        "conda/recipe.yaml", "spack/spack_repo/mpidist/packages/py_mpidist/package.py"
    }  # fmt: skip
    assert [name for name, text in texts.items() if "@VERSION@" in text or "@SHA256@" in text] == []
