"""Wheels for other machines than this one: on aarch64, which qemu-user emulates, and with musl."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from mpidist.native.build_library import source_id
from tests.packaging.bare import program_of_readme
from tests.packaging.emulated import Aarch64, loaded_by_musl
from tests.packaging.release import wheel
from tests.support.ranks.jobs import ROOT

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.all_cores
def test_on_aarch64(tmp_path: Path) -> None:
    machine = Aarch64(tmp_path, wheel("manylinux_2_17_aarch64"))
    assert "replicas: loss 0.00002" in machine.on_2_ranks(program_of_readme(tmp_path))
    program = tmp_path / "core.py"
    program.write_text(
        "import platform, mpidist\nfrom mpidist.collectives.node import native\n"
        "print(platform.machine(), mpidist.Communicator().size, native.why_not(), mpidist.__file__)\n"
    )
    expected = f"aarch64 2 None {tmp_path}/packages/mpidist/__init__.py"
    assert machine.on_2_ranks(program).count(expected) == 2


def test_with_musl(tmp_path: Path) -> None:
    elffile = pytest.importorskip("elftools.elf.elffile", reason="type: make dist")
    with zipfile.ZipFile(wheel("musllinux_1_2_x86_64")) as opened:
        library = Path(opened.extract("mpidist/native/libmpidist.so", tmp_path))
    symbols = elffile.ELFFile(io.BytesIO(library.read_bytes())).get_section_by_name(".dynsym").iter_symbols()
    undefined = [symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF"]
    assert loaded_by_musl(library, undefined, tmp_path) == source_id(ROOT / "mpidist/native")
