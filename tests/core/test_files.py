"""What mpidist writes goes through no symbolic link, which another user may have put there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mpidist.collectives.node import memory
from mpidist.collectives.observe.record import FlightFile, flight_path
from mpidist.collectives.observe.trace import TraceFile, merge, trace_path
from mpidist.collectives.reduce import tuning_file
from mpidist.collectives.reduce.registry import SHIPPED
from mpidist.core.files import open_regular, replacing
from mpidist.estimator import evaluations

pytestmark = pytest.mark.one_rank

FLIGHT = "MPIDIST_FLIGHT_RECORD"


def write_trace(folder: Path) -> Path:
    TraceFile(str(folder), 0, 1)
    return trace_path(folder, 0)


def write_merged_trace(folder: Path) -> Path:
    write_trace(folder)
    return merge(folder)


def write_flight_record(folder: Path) -> Path:
    FlightFile(folder, 0, 1)
    return flight_path(folder, 0)


def write_tuning(folder: Path) -> Path:
    tuning_file.merge(folder / "tuning.json", tuning_file.Setup("host", "mpi", "layout"), SHIPPED)
    return folder / "tuning.json"


def write_metrics(folder: Path) -> Path:
    evaluations.append(folder, evaluations.EvalResult("ckpt-1", {"loss": 0.5}, 0.0, 1.0))
    return folder / evaluations.FILE


WRITERS = [write_trace, write_merged_trace, write_flight_record, write_tuning, write_metrics]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("is_there", [True, False], ids=["an existing file", "a file to be made"])
def test_a_symbolic_link_is_not_written_through(tmp_path: Path, write: Callable[[Path], Path], is_there: bool) -> None:
    folder, victim = tmp_path / "shared", tmp_path / "victim"
    folder.mkdir()
    path = write(folder)
    assert write(folder) == path, "a second run into the same folder"
    content = path.read_bytes()
    if is_there:
        victim.write_bytes(content)  # what would be read first is right
        victim.chmod(0o640)
    path.unlink()
    path.symlink_to(victim)
    names = sorted(entry.name for entry in folder.iterdir())
    with pytest.raises((OSError, ValueError), match=f"a symbolic link to '{victim}'; type: rm -r {path}, or name"):
        write(folder)
    assert path.is_symlink()
    assert sorted(entry.name for entry in folder.iterdir()) == names
    assert (victim.read_bytes() == content) if is_there else not victim.exists()
    path.unlink()
    assert write(folder) == path


@pytest.mark.parametrize(
    ("make", "variable"),
    [(lambda f: TraceFile(f, 0, 1), "MPIDIST_TRACE"), (lambda f: FlightFile(f, 0, 1), FLIGHT)],
    ids=["trace", "flight record"],
)
def test_what_is_no_folder_is_named(tmp_path: Path, make: Callable[[str], object], variable: str) -> None:
    (tmp_path / "file").touch()
    for folder in ("/dev/null", str(tmp_path / "file"), str(tmp_path / "file" / "x")):
        text = f"{variable}='{folder}': [Errno 20] Not a directory: '{folder}'; expected a folder that every rank can "
        with pytest.raises(OSError, match=re.escape(text) + f"write to. Type: export {variable}=DIR, or unset"):
            make(folder)


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a file"
    path.write_text("old")

    def write(text: str, error: Exception | None) -> None:
        with replacing(path) as descriptor:
            os.write(descriptor, text.encode())
            assert path.read_text() == "old"
            if error is not None:
                raise error

    with pytest.raises(ArithmeticError):
        write("half", ArithmeticError())
    assert path.read_text() == "old"
    write("new", None)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask:")]
    return int(line.split()[1], 8)


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing", os.O_WRONLY)
    with pytest.raises(FileExistsError):
        open_regular(tmp_path / "link", os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def test_links_among_the_files_of_shared_memory_are_left_alone(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "victim").write_text(json.dumps("precious"))
    planted, left = tmp_path / "mpidist-1-1", tmp_path / "mpidist-1-2"
    planted.symlink_to(tmp_path / "victim")
    left.touch()
    monkeypatch.setattr(memory, "_DIRECTORY", str(tmp_path))
    memory.remove_leftovers.__wrapped__()
    assert planted.is_symlink()
    assert not left.exists()
    assert memory._mapped(str(planted), 8, 0, 0) is None
