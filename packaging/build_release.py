"""Build a release: the sdist, a wheel for each kind of machine, recipes that name the sdist, checksums.

``make dist`` runs it in an environment that has ``build``, setuptools and ziglang. What is built is the commit that is
checked out; wheels are built from the sdist, so that it holds what building takes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# By tag of the wheel: zig's name of the machine, with the oldest C library that the wheel serves.
TARGETS = {
    "manylinux_2_17_x86_64": "x86_64-linux-gnu.2.17",
    "manylinux_2_17_aarch64": "aarch64-linux-gnu.2.17",
    "musllinux_1_2_x86_64": "x86_64-linux-musl",
    "musllinux_1_2_aarch64": "aarch64-linux-musl",
}
# Files in which the version and the checksum of the sdist stand for themselves, from this folder on.
RECIPES = (
    "spack/spack_repo/mpidist/repo.yaml",
    "spack/spack_repo/mpidist/packages/py_mpidist/package.py",
    "conda/recipe.yaml",
)
CHECKSUMS = "SHA256SUMS"


def build_release(out: Path) -> None:
    """Build all into a folder, which is emptied first.

    Raises:
        SystemExit: Something that git tracks has changed and is not committed.
    """
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    if changed:
        raise SystemExit(f"make dist builds the commit that is checked out; commit these first:\n{changed}")
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="mpidist-dist-") as folder:
        scratch = Path(folder)
        sdist = _build_sdist(scratch, out)
        for tag, target in TARGETS.items():
            _build_wheel(sdist, tag, target, scratch, out)
    write_recipes(sdist, out / "recipes")
    archives = [path for path in sorted(out.iterdir()) if path.is_file()]
    (out / CHECKSUMS).write_text("".join(f"{_sha256(path)}  {path.name}\n" for path in archives))
    print("\n".join(f"{path.stat().st_size:>9,} {path}" for path in archives))


def _build_sdist(scratch: Path, out: Path) -> Path:
    packed = scratch / "head.tar"
    _run("git", "archive", "--output", str(packed), "HEAD")
    _unpack(packed, scratch / "head")
    _run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(out), str(scratch / "head"))
    (sdist,) = out.glob("*.tar.gz")
    return sdist


def _build_wheel(sdist: Path, tag: str, target: str, scratch: Path, out: Path) -> None:
    # One tree for each: setuptools leaves a folder build/ behind.
    _unpack(sdist, scratch / tag)
    (source,) = (scratch / tag).iterdir()
    compiler = f"{sys.executable} -m ziglang cc -target {target} -s"
    # MPIDIST_BUILD_NATIVE=1, so that no setting of the user's leaves the library out.
    variables = {"CC": compiler, "MPIDIST_BUILD_NATIVE": "1", "ZIG_GLOBAL_CACHE_DIR": str(scratch / "zig")}
    option = f"--config-setting=--build-option=--plat-name={tag}"
    command = (sys.executable, "-m", "build", "--wheel", "--no-isolation", option, "--outdir", str(out), str(source))
    _run(*command, **variables)


def write_recipes(sdist: Path, out: Path) -> None:
    """Write the recipes with the version and the checksum of an sdist."""
    version = sdist.name.removeprefix("mpidist-").removesuffix(".tar.gz")
    for name in RECIPES:
        text = (ROOT / "packaging" / name).read_text()
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text.replace("@VERSION@", version).replace("@SHA256@", _sha256(sdist)))


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def _run(*command: str, **variables: str) -> None:
    # What it says is shown where it fails: four builds say much.
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR", help="emptied first")
    build_release(parser.parse_args().out.resolve())
