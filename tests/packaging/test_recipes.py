"""The recipes agree with pyproject.toml, with the release and with one another."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mpidist.core import __version__
from tests.packaging import recipes
from tests.packaging.release import PACKAGING, builder
from tests.support.ranks.jobs import ROOT

pytestmark = pytest.mark.one_rank

PLACE = re.compile("@[A-Z0-9]+@")


def test_the_version_has_its_part_of_the_changelog() -> None:
    heads = re.findall(r"^## \[(.*?)\](.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0][0] == "Unreleased"
    if ".dev" not in __version__:
        assert heads[1][0] == __version__
        assert re.fullmatch(r" - \d{4}-\d\d-\d\d", heads[1][1])


def test_every_recipe_is_described() -> None:
    table = (PACKAGING / "README.md").read_text()
    files = {path.relative_to(PACKAGING).parts[0] for path in PACKAGING.rglob("*") if path.is_file()} - {"README.md"}
    assert set(re.findall(r"^\| \[(.*?)/?\]\(.*\)", table, re.MULTILINE)) == files - {"__pycache__"}


def test_spack() -> None:
    directives = recipes.spack_directives()
    assert directives["version"] == [(("@VERSION@",), {"sha256": "@SHA256@"})]
    assert directives["license"] == [(("Apache-2.0",), {})]
    needs = {given[0]: options["type"] for given, options in directives["depends_on"]}
    least = recipes.required()
    assert needs == {
        "c": "build",
        f"python@{least['python']}:": ("build", "run"),
        f"py-setuptools@{least['setuptools']}:": "build",
        f"py-numpy@{least['numpy']}:": "run",
        f"py-mpi4py@{least['mpi4py']}:": "run",
    }


def test_conda() -> None:
    text = recipes.CONDA.read_text()
    parts = re.findall(r"^  (host|run):\n((?:    .*\n)+)", text, re.MULTILINE)
    needs = {name: dict(re.findall(r"- ([\w-]+) >=(.*)", lines)) for name, lines in parts}
    least = recipes.required()
    assert needs["run"] == {name: least[name] for name in ("python", "numpy", "mpi4py")}
    assert needs["host"] == {name: least[name] for name in ("python", "setuptools")}


def test_a_release_fills_in_the_recipes(tmp_path: Path) -> None:
    files = [path for path in PACKAGING.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    with_places = {str(path.relative_to(PACKAGING)) for path in files if PLACE.search(path.read_text())}
    names = builder().RECIPES
    assert with_places - {"build_release.py"} <= set(names)
    sdist = tmp_path / "mpidist-7.8.9.tar.gz"
    sdist.write_bytes(b"")
    builder().write_recipes(sdist, tmp_path / "recipes")
    assert [name for name in names if PLACE.search((tmp_path / "recipes" / name).read_text())] == []
    assert 'version: "7.8.9"' in (tmp_path / "recipes/conda/recipe.yaml").read_text()


def test_both_images_are_built_alike() -> None:
    (base,) = re.findall(r"^FROM (.*)$", recipes.DOCKERFILE.read_text(), re.MULTILINE)
    assert f"From: {base}\n" in recipes.APPTAINER.read_text()
    assert recipes.section("post") == ["set -e", *recipes.steps_of_docker()]


# Stand-ins for the commands of a module: each prints itself.
_TCL = """
foreach command {module-whatis conflict prereq prepend-path} { proc $command args "puts \\[list $command {*}\\$args]" }
proc module-info what { return mpidist/7.8 }
source [lindex $argv 0]
"""


def test_the_module(tmp_path: Path) -> None:
    if shutil.which("tclsh") is None:
        pytest.skip("needs tclsh; type: apt-get install tcl")
    prefix, module = tmp_path / "7.8", tmp_path / "mpidist"
    (prefix / "lib/python3.11/site-packages").mkdir(parents=True)
    text, lines = re.subn(
        r"^set prefix .*$", f"set prefix {tmp_path}/$version", recipes.MODULEFILE.read_text(), flags=re.M
    )
    assert lines == 1
    module.write_text(text)
    (tmp_path / "run.tcl").write_text(_TCL)
    said = subprocess.run(["tclsh", tmp_path / "run.tcl", module], check=True, capture_output=True, text=True)
    assert said.stderr == ""
    assert said.stdout.splitlines()[1:] == [
        "conflict mpidist",
        "prereq openmpi mpich intel-mpi cray-mpich-abi",
        f"prepend-path PATH {prefix}/bin",
    ]
