"""Bare environments: a virtual environment of each Python that is there, with nothing in it but what pip puts there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.packaging.release import run
from tests.support.ranks.jobs import ROOT, child_environment

VERSIONS = [f"3.{minor}" for minor in range(10, 15)]
_PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")


@cache
def interpreter(version: str) -> Path:
    """Return a Python of a version, from PATH or from pyenv; skip the test where there is none."""
    found = [
        *filter(None, [shutil.which(f"python{version}")]),
        *sorted(_PYENV.glob(f"{version}.*/bin/python{version}")),
    ]
    for path in map(Path, found):
        # A shim of pyenv may stand for a version that is not chosen; Debian's Python may come without venv.
        if subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
            return path
    pytest.skip(f"there is no python{version} with venv, neither in PATH nor in {_PYENV}")


class Environment:
    """A virtual environment of a version of Python.

    Attributes:
        folder: Where it is.
        outside: A folder without a checkout, in which its programs run.
    """

    def __init__(self, version: str, folder: Path) -> None:
        run([interpreter(version), "-m", "venv", folder / "env"])
        self.folder, self.outside = folder / "env", folder / "outside"
        self.outside.mkdir()

    def python(self, *arguments: str | Path) -> str:
        """Run its Python, and return what it printed; none of this environment's packages is seen there."""
        return run([self.folder / "bin/python", *arguments], self.outside, _variables())

    def pip(self, *arguments: str | Path) -> str:
        """Run its pip."""
        return self.python("-m", "pip", *arguments)

    def on_2_ranks(self, *command: str | Path) -> str:
        """Run a program by its own launcher."""
        return self.python("-m", "mpidist", "launch", "-n", "2", *command)

    def files(self) -> set[str]:
        """Return all of its files, but what Python has compiled of others than mpidist."""
        found = {str(path.relative_to(self.folder)) for path in self.folder.rglob("*")}
        return {name for name in found if "__pycache__" not in name or "mpidist" in name}


def _variables() -> dict[str, str]:
    return {name: value for name, value in child_environment().items() if name not in ("PYTHONPATH", "MPIRUN")}


def program_of_readme(folder: Path) -> Path:
    """Write the README's program into a folder, and return its path."""
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    path = folder / "train.py"
    path.write_text(program)
    return path
