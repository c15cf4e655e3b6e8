"""The recipes of packaging/, read: their requirements, build steps and modules."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from tests.packaging.release import PACKAGING
from tests.support.ranks.jobs import ROOT

SPACK = PACKAGING / "spack/spack_repo/mpidist/packages/py_mpidist/package.py"
CONDA = PACKAGING / "conda/recipe.yaml"
DOCKERFILE = PACKAGING / "docker/Dockerfile"
APPTAINER = PACKAGING / "apptainer/mpidist.def"
MODULEFILE = PACKAGING / "modulefile/mpidist"


def required() -> dict[str, str]:
    """Return what pyproject.toml requires, by name: the least versions of packages, of setuptools and of Python."""
    text = (ROOT / "pyproject.toml").read_text()
    lists = re.findall(r"^(?:requires|dependencies) = \[(.*)\]$", text, re.MULTILINE)
    (python,) = re.findall(r'^requires-python = ">=(.*)"$', text, re.MULTILINE)
    return {"python": python, **dict(re.findall(r'"([\w-]+)>=([\d.]+)"', " ".join(lists)))}


def spack_directives() -> dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Run Spack's package with stand-ins for Spack, and return the arguments of each directive by its name."""
    seen: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}

    class Recorder(ModuleType):
        __all__ = ("depends_on", "license", "version")

        def __getattr__(self, name: str) -> Any:
            return lambda *given, **options: seen.setdefault(name, []).append((given, options))

    package, build_system = Recorder("spack.package"), ModuleType("spack_repo.builtin.build_systems.python")
    build_system.PythonPackage = object  # type: ignore[attr-defined]
    stand_ins = {module.__name__: module for module in (package, build_system)}
    names = {name.rpartition(".")[0] for name in stand_ins} | {"spack_repo", "spack_repo.builtin"}
    stand_ins |= {name: ModuleType(name) for name in names}
    sys.modules.update(stand_ins)
    try:
        exec(compile(SPACK.read_text(), SPACK, "exec"), {"__file__": str(SPACK), "__name__": "package"})
    finally:
        for name in stand_ins:
            del sys.modules[name]
    return seen


def steps_of_docker() -> list[str]:
    """Return the commands that a build with the Dockerfile runs."""
    lines = DOCKERFILE.read_text().replace("\\\n", "").splitlines()
    return [step.strip() for line in lines if line.startswith("RUN ") for step in line[4:].split(" && ")]


def section(name: str) -> list[str]:
    """Return the lines of a section of Apptainer's definition, without comments."""
    return list(_lines_of(name))


def _lines_of(name: str) -> Iterator[str]:
    inside = False
    for line in map(str.strip, APPTAINER.read_text().splitlines()):
        if line.startswith("%"):
            inside = line == f"%{name}"
        elif inside and line and not line.startswith("#"):
            yield line
