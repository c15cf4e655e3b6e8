"""Compile the native core: the hooks that pip calls (PEP 517, 660), and ``python mpidist/native/build_library.py``.

The hooks call the setuptools hooks. They add the library to the wheel, or write it to the folder of the sources. They
also add the examples to wheels. pip runs this file before it installs mpidist and its requirements. So this file
imports only the standard library, and the hooks import setuptools. Programs import it for the ids of the sources, so
functions that build import what they need.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    ConfigSettings = Mapping[str, Any] | None
    Compiler = tuple[str, list[str]]

SOURCES = Path(__file__).resolve().parent
PACKAGE = SOURCES.parent
LIBRARY = "libmpidist.so"
EXAMPLES = SOURCES.parents[1] / "examples"
# Recorded in a wheel, so that ranks need not read the sources again.
BUILD_ID = "build_id.txt"

_VARIABLE = "MPIDIST_BUILD_NATIVE"
# -ffp-contract=off: results must not depend on the compiler. No -march: the library supports every CPU of its kind.
_FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra")
_LIBRARIES = ("-lm", "-pthread")
# Without a target, zig compiles for the CPU that it runs on.
_ZIG_TARGETS = {"x86_64": "x86_64-linux", "aarch64": "aarch64-linux"}
_ZIG_GLIBC = "gnu.2.17"
# Needs the same as the sources: the headers of C11 and of the C library, and a linker.
_PROBE = "#include <stdatomic.h>\n#include <string.h>\nint probe(_Atomic int *p) { return atomic_load(p); }\n"
# Excludes examples and hidden files of editors.
_IS_SOURCE = re.compile(r"(?!examples/)(.*/)?[^./][^/]*\.(py|c|h)").fullmatch
_HOOKS_OF_SETUPTOOLS = ("prepare_metadata_for_build_wheel", "prepare_metadata_for_build_editable", "build_sdist")
_SHOWN_LINES = 15
_SECONDS = 600.0


class _CompilerError(Exception):
    """A compiler is missing or failed."""


def source_id(folder: Path) -> str:
    """Return the id of a folder's C sources, which is compiled into the library."""
    digest = hashlib.blake2b(digest_size=8)
    for path in _c_files(folder):
        for part in (path.name.encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _c_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.c"), *folder.glob("*.h")])


@functools.cache
def build_id() -> str:
    """Return the id of this package's sources: recorded in a wheel, computed in a checkout."""
    return _recorded_id() or _package_id({name: (PACKAGE / name).read_bytes() for name in _sources()})


@functools.cache
def quick_build_id() -> str:
    """Return an id without reading the sources. Equal ids mean equal sources, but not the other way round."""
    recorded = _recorded_id()
    return recorded or str([(name, at.st_size, at.st_mtime_ns) for name, at in sorted(_sources().items())])


def _recorded_id() -> str:
    try:
        return (PACKAGE / BUILD_ID).read_text()
    except OSError:  # a checkout
        return ""


def _sources() -> dict[str, os.stat_result]:
    """Return the status of each source of the package, by its path inside the package."""
    found: dict[str, os.stat_result] = {}
    folders = [""]
    for folder in folders:
        with os.scandir(PACKAGE / folder) as entries:
            for entry in entries:
                name = folder + entry.name
                if entry.is_dir(follow_symlinks=False):
                    folders += [f"{name}/"] if entry.name != "__pycache__" else []
                elif _IS_SOURCE(name) and entry.is_file():
                    found[name] = entry.stat()
    return found


def _package_id(sources: Mapping[str, bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, data in sorted(sources.items()):
        digest.update(f"{name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def is_wanted() -> bool:
    """Return whether to build the library: on 64-bit Linux, unless MPIDIST_BUILD_NATIVE is 0.

    Raises SystemExit if MPIDIST_BUILD_NATIVE is neither 0 nor 1, because pip prints only the text of a SystemExit.
    """
    value = os.environ.get(_VARIABLE) or "1"
    if value not in ("0", "1"):
        raise SystemExit(f"{_VARIABLE}={value!r}: expected 0 or 1")
    return value == "1" and has_platform()


def has_platform() -> bool:
    """Return whether the library exists for this platform."""
    return sys.platform == "linux" and sys.maxsize > 1 << 32 and sys.implementation.name == "cpython"


def compile_library(target: Path) -> None:
    """Compile the sources into a shared library, with the first compiler that works.

    Replaces an older file as a whole, because programs may have loaded it. Raises SystemExit if no compiler works.
    """
    import shlex
    import tempfile

    sources = [str(path) for path in _c_files(SOURCES) if path.suffix == ".c"]
    define = f'-DNC_BUILD="{source_id(SOURCES)}"'
    failures = []
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".mpidist-") as folder:
        made = Path(folder) / LIBRARY
        for name, command in [*_compilers_of_the_system(), *_zig()]:
            try:
                _run([*command, *_FLAGS, define, "-o", str(made), *sources, *_LIBRARIES], Path(folder))
                if name != "$CC" and _machine_of(made) != _machine_of(Path("/proc/self/exe")):
                    raise _CompilerError("compiles for another machine")
            except _CompilerError as error:
                failures.append(f"  {name} ({shlex.join(command)}): {error}")
                continue
            made.replace(target)
            print("\n".join([*failures, f"{target} was made by {name} ({shlex.join(command)})"]), file=sys.stderr)
            return
    raise SystemExit(_advice(failures))


def _compilers_of_the_system() -> list[Compiler]:
    """Return names and commands of the compilers to try first."""
    import shlex

    named = os.environ.get("CC")
    # The cc of an HPE Cray may compile for the CPU of other nodes.
    return [*([("$CC", shlex.split(named))] if named else []), *((name, [name]) for name in ("gcc", "clang", "cc"))]


def _zig() -> list[Compiler]:
    """Return the compiler of PyPI, if it has a wheel for this machine."""
    import platform

    target = _ZIG_TARGETS.get(platform.machine())
    if target is None:
        return []
    libc = _ZIG_GLIBC if platform.libc_ver()[0] == "glibc" else "musl"
    return [("ziglang", [sys.executable, "-m", "ziglang", "cc", "-target", f"{target}-{libc}", "-s"])]


def _machine_of(file: Path) -> tuple[bytes, bytes]:
    """Return bits and byte order of an ELF file, and its kind of CPU."""
    with file.open("rb") as opened:
        header = opened.read(20)
    return header[4:6], header[18:]


def _run(command: list[str], scratch: Path) -> None:
    """Run a compiler, and print its warnings."""
    import subprocess

    try:
        done = subprocess.run(
            command,
            # The home folder, where zig keeps its cache by default, may be full or missing.
            env={"ZIG_GLOBAL_CACHE_DIR": str(scratch / "zig"), **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            check=False,
        )
    except OSError as error:
        raise _CompilerError(error.strerror) from None
    except subprocess.TimeoutExpired:
        raise _CompilerError(f"not done after {_SECONDS:.0f} s") from None
    said = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        lines = said.splitlines()[:_SHOWN_LINES]
        raise _CompilerError("\n    ".join([f"exit status {done.returncode}", *lines]))
    sys.stderr.write(said)


def _advice(failures: list[str]) -> str:
    return "\n".join(
        [
            "mpidist: no compiler could build the native core. Tried, in this order:",
            *failures,
            "Type one of these, and install again:",
            "  apt-get install gcc libc6-dev      or the like of your system",
            "  export CC=/path/to/compiler        one that knows C11",
            f"  {sys.executable} -m pip install ziglang      with --no-build-isolation; x86_64 and aarch64",
            f"  export {_VARIABLE}=0      without it: collectives inside a node are slower (docs/install.md)",
        ]
    )


def build_in_place() -> None:
    """Build the library in the folder of its sources, or remove it if unwanted."""
    if is_wanted():
        compile_library(SOURCES / LIBRARY)
    else:
        (SOURCES / LIBRARY).unlink(missing_ok=True)


def requirements() -> list[str]:
    """Return the requirements of the build on PyPI: ziglang if no other compiler works."""
    import tempfile

    if not is_wanted() or not _zig():
        return []
    with tempfile.TemporaryDirectory(prefix="mpidist-") as folder:
        source = Path(folder) / "probe.c"
        source.write_text(_PROBE)
        for _, command in _compilers_of_the_system():
            try:
                _run([*command, *_FLAGS, "-o", str(source.with_suffix(".so")), str(source), *_LIBRARIES], source.parent)
            except _CompilerError:
                continue
            return []
    return ["ziglang"]


def finish_wheel(wheel: Path, library: bytes | None) -> Path:
    """Add examples, build id and, unless it is None, the library to a wheel. Return its path.

    The tag of a wheel with the library names the platform. The C sources in the wheel are replaced by the compiled
    ones, because setuptools also packs files that an earlier build left in ``build/``.
    """
    import sysconfig
    import zipfile

    with zipfile.ZipFile(wheel) as archive:
        contents = {info.filename: archive.read(info) for info in archive.infolist()}
    wheel.unlink()
    examples = sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.npz")])
    contents |= {f"mpidist/examples/{path.name}": path.read_bytes() for path in examples}
    if library is not None:
        *first, python, abi, system = wheel.stem.split("-")
        # --plat-name, for a library that $CC compiles for another machine, has already replaced "any".
        system = re.sub(r"[-.]", "_", sysconfig.get_platform()) if system == "any" else system
        tag = f"{python}-{abi}-{system}"
        wheel = wheel.with_name("-".join([*first, tag]) + ".whl")
        contents = {name: data for name, data in contents.items() if not re.fullmatch(r"mpidist/native/.*\.[ch]", name)}
        contents |= {f"mpidist/native/{path.name}": path.read_bytes() for path in _c_files(SOURCES)}
        contents[f"mpidist/native/{LIBRARY}"] = library
        (about,) = (name for name in contents if name.endswith(".dist-info/WHEEL"))
        text = re.sub(r"^Tag: .*$", f"Tag: {tag}", contents[about].decode(), flags=re.MULTILINE)
        contents[about] = text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false").encode()
    inside = {name.removeprefix("mpidist/"): data for name, data in contents.items() if name.startswith("mpidist/")}
    sources = {name: data for name, data in inside.items() if _IS_SOURCE(name)}
    _write_wheel(wheel, {**contents, f"mpidist/{BUILD_ID}": _package_id(sources).encode()})
    return wheel


def _write_wheel(path: Path, contents: dict[str, bytes]) -> None:
    import base64
    import csv
    import io
    import zipfile

    (record,) = (name for name in contents if name.endswith(".dist-info/RECORD"))
    del contents[record]
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        writer.writerow([name, f"sha256={digest}", len(data)])
    writer.writerow([record, "", ""])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in [*contents.items(), (record, rows.getvalue().encode())]:
            # A fixed time, so that equal files make equal wheels.
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(entry, data)


# The hooks, with the names and arguments of PEP 517 and 660.


def _setuptools() -> ModuleType:
    # Imported late, because programs import this file for source_id, and many have no setuptools.
    return importlib.import_module("setuptools.build_meta")


def get_requires_for_build_wheel(config_settings: ConfigSettings = None) -> list[str]:
    """Return the packages that building a wheel needs."""
    return [*requirements(), *_setuptools().get_requires_for_build_wheel(config_settings)]


def get_requires_for_build_editable(config_settings: ConfigSettings = None) -> list[str]:
    """Return the packages that an editable installation needs."""
    return [*requirements(), *_setuptools().get_requires_for_build_editable(config_settings)]


def build_wheel(
    wheel_directory: str, config_settings: ConfigSettings = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel, with the library if it is wanted, and return its name."""
    import tempfile

    name: str = _setuptools().build_wheel(wheel_directory, config_settings, metadata_directory)
    library = None
    if is_wanted():
        with tempfile.TemporaryDirectory(prefix="mpidist-") as folder:
            # Build in the folder of the sources, because a program that starts in the checkout imports the checkout.
            # If --plat-name names another machine, build in a temporary folder.
            target = (SOURCES if name.endswith("-any.whl") else Path(folder)) / LIBRARY
            compile_library(target)
            library = target.read_bytes()
    return finish_wheel(Path(wheel_directory) / name, library).name


def build_editable(
    wheel_directory: str, config_settings: ConfigSettings = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel of an editable installation, and the library beside the sources."""
    build_in_place()
    name: str = _setuptools().build_editable(wheel_directory, config_settings, metadata_directory)
    return name


def __getattr__(name: str) -> Any:
    """Return a hook that setuptools runs alone."""
    if name not in _HOOKS_OF_SETUPTOOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_setuptools(), name)


if __name__ == "__main__":
    # The Makefile installs the requirements first.
    if sys.argv[1:] == ["requirements"]:
        print(*requirements())
    else:
        build_in_place()
