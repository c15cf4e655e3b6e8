"""Checkpoints that others have made up: nothing outside of their folders is opened, and what is wrong is damage."""

from __future__ import annotations

import copy
import json
import os
import re
import resource
import socket
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpidist
from mpidist import Checkpoint, CheckpointManager
from mpidist.checkpoint import DamagedCheckpointError, latest_checkpoint, reader
from mpidist.checkpoint import format as files
from mpidist.checkpoint.agreement import Agreement
from mpidist.checkpoint.format import Manifest, Tensor, TensorPart
from mpidist.checkpoint.writer import Job

pytestmark = pytest.mark.one_rank

DATA = ("data-00001-of-00002.safetensors", "data-00002-of-00002.safetensors")


class Reader:
    """An iterator that can tell no state from another; to check it is the iterator's own business."""

    def state(self) -> Any:
        return 0

    def restore(self, state: Any) -> None:
        json.dumps(state)


def new_batches() -> Any:
    return iter(mpidist.Dataset.range(9).shuffle().batch(2))


def new_objects() -> dict[str, Any]:
    return {
        "v": mpidist.Variable(np.zeros((3, 2))), "z": np.zeros(2, complex), "half": np.zeros(0, np.float16),
        "step": 0, "history": [], "curves": {}, "reader": Reader(), "batches": new_batches(),
        "model": SimpleNamespace(a=mpidist.Variable(0.0), b=mpidist.Variable(0.0)),
    }  # fmt: skip


def write_in_two_parts(path: Path) -> None:
    """Write a checkpoint of such objects as two ranks do."""
    path.mkdir()
    v, z = np.arange(6.0).reshape(3, 2), np.array([1 + 2j, 3])
    parts = (
        {"v": v.reshape(-1)[:2], "z": z.view(np.uint8), "model/a": np.array(5.0)},
        {"v": v.reshape(-1)[2:], "half": np.zeros(0, np.float16)},
    )
    records = {name: files.write_tensors(path / name, part) for name, part in zip(DATA, parts, strict=True)}
    parts_of_v = TensorPart(DATA[0], 0, 2), TensorPart(DATA[1], 2, 6)
    tensors = {
        "v": Tensor((3, 2), "float64", "tensor", parts_of_v, "ON_WRITE", "NONE"),
        "z": Tensor((2,), "complex128", "bytes", (TensorPart(DATA[0], 0, 2),)),
        "model/a": Tensor((), "float64", "tensor", (TensorPart(DATA[0], 0, 1),), "ON_WRITE", "NONE"),
        "half": Tensor((0,), "float16", "tensor", (TensorPart(DATA[1], 0, 0),)),
    }
    values = {
        "step": 7,
        "history/0/0": 0.5,
        "history/0/1": None,
        "curves/7": "x",
        "reader": {"position": 4, "seeds": [1, 2]},
        "batches": new_batches().state(),
    }
    containers = {
        "history": ["list", 1], "history/0": ["list", 2], "curves": ["dict", [7, "t"]], "curves/t": ["tuple", 1],
        "curves/t/0": ["list", 0],
    }  # fmt: skip
    kept, writer = (1e9, ("ckpt-1",)), ("host", 1)
    classes, links = {"o": "SGD"}, {"model/b": "model/a", "model/self": "model"}
    manifest = Manifest(
        9, 2, tensors, values, containers, ("reader", "batches"), records, 1e9, kept, writer, True, 3, classes, links
    )
    (path / "manifest.json").write_text(manifest.to_text())


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Return a good checkpoint, and a newer one to be forged."""
    Checkpoint(**new_objects()).write(tmp_path / "ckpt-1")
    write_in_two_parts(tmp_path / "ckpt-2")
    return tmp_path / "ckpt-1", tmp_path / "ckpt-2"


def signed(content: dict[str, Any]) -> bytes:
    """Return a manifest with the checksum of itself."""
    text = json.dumps(type(content)({**content, "checksum": "0" * 8}), indent=1)
    return text.replace('"checksum": "00000000"', f'"checksum": "{zlib.crc32(text.encode()):08x}"', 1).encode()


# What is planted --------------------------------------------------------------------------------------------------


def plant_link(place: Path) -> None:
    place.symlink_to(place.rename(place.parent.parent / "elsewhere"))


def plant_pipe(place: Path) -> None:
    place.unlink(missing_ok=True)
    os.mkfifo(place)


def plant_folder(place: Path) -> None:
    place.unlink(missing_ok=True)
    place.mkdir()


def plant_socket(place: Path) -> None:
    place.unlink(missing_ok=True)
    here = os.open(place.parent, os.O_RDONLY)
    try:  # the path of a socket is short
        socket.socket(socket.AF_UNIX).bind(f"/proc/self/fd/{here}/{place.name}")
    finally:
        os.close(here)


PLANTS = pytest.mark.parametrize("plant", [plant_link, plant_pipe, plant_folder, plant_socket])


@PLANTS
@pytest.mark.parametrize("name", ["manifest.json", DATA[0]])
@pytest.mark.filterwarnings("ignore:unclosed <socket")
def test_only_regular_files_are_opened(plant: Callable[[Path], None], name: str, two: tuple[Path, Path]) -> None:
    before, forged = two
    plant(forged / name)
    checkpoint = Checkpoint(**new_objects())
    with pytest.raises(DamagedCheckpointError, match=rf"{name} is damaged: .* is no regular file but"):
        checkpoint.restore(forged)
    with pytest.warns(UserWarning, match=rf"{name} is damaged.*restored {before} instead"):
        assert checkpoint.restore_latest(before.parent) is not None
    with pytest.warns(UserWarning, match=f"{name} is damaged"):
        assert latest_checkpoint(before.parent) == str(before)
    if name == "manifest.json":
        with pytest.raises(FileExistsError, match="exists and is no checkpoint"):
            checkpoint.write(forged)


@pytest.mark.parametrize("name", ["../ckpt-1/data.safetensors", "{}/ckpt-1/data.safetensors", "data.safetensors\0"])
def test_parts_lie_in_the_folder_of_the_checkpoint(name: str, two: tuple[Path, Path]) -> None:
    before, forged = two
    content = json.loads((before / "manifest.json").read_text())
    content["files"] = {name.format(before.parent): content["files"]["data.safetensors"]}
    for tensor in content["tensors"].values():
        tensor["parts"][0]["file"] = name.format(before.parent)
    content["sequence"] += 9
    (forged / "manifest.json").write_bytes(signed(content))
    with pytest.warns(UserWarning, match=f"ckpt-2.*manifest.json is damaged: its '.*restored {before} instead"):
        CheckpointManager(Checkpoint(**new_objects()), before.parent, None).restore_or_initialize()


def test_folders_may_be_reached_through_links(two: tuple[Path, Path]) -> None:
    _, path = two
    (path.parent / "linked").symlink_to(path.parent)
    (path.parent / "last").symlink_to(path)
    for name in ("linked/ckpt-2", "last"):
        Checkpoint(**new_objects()).restore(path.parent / name).expect_partial()


@PLANTS
@pytest.mark.filterwarnings("ignore:unclosed <socket")
def test_no_lock_is_taken_through_what_was_planted(plant: Callable[[Path], None], tmp_path: Path) -> None:
    lock = tmp_path / ".ckpt-1.lock"
    lock.touch()
    plant(lock)
    before = sorted(tmp_path.parent.rglob("*"))
    with pytest.raises(OSError, match=r"\.ckpt-1\.lock is no regular file but a "):
        Checkpoint(step=1).save(tmp_path / "ckpt")
    CheckpointManager(Checkpoint(step=1), tmp_path, 1)
    assert sorted(tmp_path.parent.rglob("*")) == before


@pytest.mark.parametrize("record", ['{"bytes": "1", "crc32": 7}', "[]", '{"bytes": 1', "link"])
def test_a_note_that_no_rank_wrote(record: str, tmp_path: Path) -> None:
    note = tmp_path / "rank-1.json"
    if record == "link":
        (tmp_path / "of others").write_text("null")
        note.symlink_to(tmp_path / "of others")
    else:
        note.write_text(record)
    job = Job(tmp_path / "ckpt", 0, 2, {}, lambda: Manifest(1, 1, {}, {}))
    job.directory = tmp_path
    with pytest.raises(DamagedCheckpointError, match=r"rank-1\.json is damaged"):
        job.await_notes(None, lambda _: False)
    (tmp_path / "rank-0.json.part").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        job.leave_note(None)
    assert not (tmp_path / "elsewhere").exists()


# What is made up --------------------------------------------------------------------------------------------------

DEEP = json.loads("[" * 200 + "]" * 200)
NAMES = (
    "", "..", "../../outside/data.safetensors", "OUTSIDE/data.safetensors", "data.safetensors\0", "x" * 300,
    "/" * 500, "a/b", "data-00001-of-00009.safetensors", "ü\ud800", "dict", "V5", "O", "f4,i4", "F64", "bytes",
)  # fmt: skip
NUMBERS = (-1, 0, 1, 2, 3, 6, 1 << 31, (1 << 63) - 1, 1 << 63, 10**400, 0.5, 1e300, float("nan"), float("-inf"))
SHAPES = ([2, 3], [6], [0, 1 << 62, 4], [1 << 32, 1 << 32], [1] * 65, [[1]])
CONTAINERS = (["list", 1 << 40], ["dict", ["a", "a"]], ["dict", [1, "1"]], ["tuple", 2])
JUNK: tuple[Any, ...] = (*NAMES, *NUMBERS, *SHAPES, *CONTAINERS, None, True, [], {}, DEEP)


class Twice(dict[str, Any]):
    """A dict of which JSON has every name twice."""

    def items(self) -> Any:
        return [*super().items(), *super().items()]


def put(parent: Any, name: Any, junk: Any) -> None:
    parent[name] = junk


def rename(parent: Any, name: Any, junk: Any) -> None:
    if isinstance(parent, dict):
        parent[str(junk)] = parent.pop(name)


def add(parent: Any, name: Any, junk: Any) -> None:
    parent[name] = {**parent[name], "extra": junk} if isinstance(parent[name], dict) else [parent[name], junk]


def shift(parent: Any, name: Any, junk: Any) -> None:
    if type(parent[name]) is int:
        parent[name] += 1 if junk else -1


def double(parent: Any, name: Any, junk: Any) -> None:
    if isinstance(parent[name], dict):
        parent[name] = Twice(parent[name])


def drop(parent: Any, name: Any, junk: Any) -> None:
    del parent[name]


CHANGES = st.tuples(
    st.integers(0, 200), st.sampled_from([put, put, put, rename, add, shift, double, drop]), st.sampled_from(JUNK)
)
TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "whole": lambda text: text,
    "cut": lambda text: text[: len(text) * 2 // 3],
    "not UTF-8": lambda text: text.replace(b"v", b"\xff", 1),
    "UTF-16": lambda text: text.decode().encode("utf-16"),
    "too deep": lambda text: b"[" * 100_000,
    "too deep in a whole": lambda text: text.replace(b"null", b"[" * 900 + b"]" * 900, 1),
    "twice": lambda text: text + text,
    "none": lambda text: b"",
}
WRONG_TEXTS = st.sampled_from(["whole"] * 20 + list(TEXTS))
LENGTHS = st.sampled_from([None] * 12 + [0, 1, 100, 1 << 40, (1 << 64) - 1])
FEW_CHANGES = st.lists(CHANGES, max_size=2)
FORGERIES = st.tuples(
    st.lists(CHANGES, max_size=3), FEW_CHANGES, WRONG_TEXTS, FEW_CHANGES, WRONG_TEXTS, LENGTHS
)  # fmt: skip


def places_in(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what holds something, and under which name, for all that is in a tree."""
    for name, child in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, name
        if isinstance(child, (dict, list)):
            yield from places_in(child)


def change(tree: Any, changes: list[Any]) -> Any:
    for place, how, junk in changes:
        everywhere = list(places_in(tree))
        if everywhere:
            how(*everywhere[place % len(everywhere)], copy.deepcopy(junk))
    return tree


def forge(folder: Path, good: dict[str, bytes], forgery: Any) -> None:
    """Write what is made up of the files of a checkpoint, with checksums that are right."""
    changes, state_changes, wrong, header_changes, wrong_header, length = forgery
    data, content = good[DATA[0]], json.loads(good["manifest.json"])
    begin = 8 + int.from_bytes(data[:8], "little")
    text = TEXTS[wrong_header](json.dumps(change(json.loads(data[8:begin]), header_changes)).encode())
    data = (len(text) if length is None else length).to_bytes(8, "little") + text + data[begin:]
    content["files"][DATA[0]] = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    outside = str(folder.parent.parent / "outside").encode()
    # The state itself is a place, too.
    content["values"].update(change({"batches": content["values"]["batches"]}, state_changes))
    manifest = TEXTS[wrong](signed(change(content, changes))).replace(b"OUTSIDE", outside)
    (folder / DATA[0]).write_bytes(data)
    (folder / "manifest.json").write_bytes(manifest)


class Watch:
    """Knows which files are opened."""

    def __init__(self) -> None:
        self.is_on, self.opened = False, list[str]()
        sys.addaudithook(self._see)  # for good

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event == "open":
            self.opened.append(str(arguments[0]))

    def __enter__(self) -> list[str]:
        self.is_on, self.opened = True, []
        return self.opened

    def __exit__(self, *_: object) -> None:
        self.is_on = False


@contextmanager
def little_memory() -> Iterator[None]:
    """Let this process have half a gigabyte more than it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@dataclass
class Place:
    """A folder with a checkpoint and a newer one to be forged; what this was; and what watches over all files."""

    folder: Path
    good: dict[str, bytes]
    watch: Watch


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("forged") / "in"
    Checkpoint(**new_objects()).write(folder / "ckpt-1")
    write_in_two_parts(folder / "ckpt-2")
    (folder.parent / "outside").mkdir()
    (folder.parent / "outside" / "data.safetensors").write_bytes((folder / "ckpt-2" / DATA[0]).read_bytes())
    return Place(folder, {file.name: file.read_bytes() for file in (folder / "ckpt-2").iterdir()}, Watch())


def error_of(read: Callable[[], Any]) -> ValueError | None:
    try:
        read()
    except ValueError as error:
        return error
    return None


def read_alone(path: Path) -> None:
    """Read all tensors of a checkpoint, whatever objects there are."""
    strategy = mpidist.get_strategy()
    agreement = Agreement(strategy, "restoring", "a checkpoint")
    whole = reader.find_whole(reader.only(path), agreement, lambda path, manifest: None)
    assert whole is not None
    for key in whole.manifest.tensors:
        whole.values.of(key)


def check_forged(place: Place, forgery: Any) -> None:
    """Read what is made up: it is damaged, and the one before is restored, or it is whole, be it of others."""
    path = place.folder / "ckpt-2"
    forge(path, place.good, forgery)
    checkpoint, found = Checkpoint(**new_objects()), []
    with place.watch as opened, little_memory(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error = error_of(lambda: read_alone(path))
        refusal = error_of(lambda: found.append(checkpoint.restore_latest(place.folder)))
    assert not [name for name in opened if "outside" in os.path.normpath(name)]
    assert error is None or isinstance(error, DamagedCheckpointError) or "use the mpidist that wrote it" in str(error)
    if found:
        assert error is None or found[0].path.endswith("ckpt-1")
        found[0].expect_partial()
    else:
        assert error is None
        assert re.search("does not fit the objects|the state is (that of|behind)", str(refusal))
        assert checkpoint.step == 0


@pytest.mark.parametrize(
    "links",
    [{"a": "a"}, {"a": "a/b"}, {"a": "b", "b": "a"}, {"a": "b/c", "b": "v"}, {"a": 1}, ["a"], {"a": "/" * 500}],
    ids=str,
)
def test_links_that_lead_nowhere(place: Place, links: Any) -> None:
    content = {**json.loads(place.good["manifest.json"]), "links": links}
    (place.folder / "ckpt-2" / DATA[0]).write_bytes(place.good[DATA[0]])
    (place.folder / "ckpt-2" / "manifest.json").write_bytes(signed(content))
    with pytest.raises(DamagedCheckpointError, match="its 'links' is"):
        Checkpoint(**new_objects()).restore(place.folder / "ckpt-2")


@settings(max_examples=200)
@given(FORGERIES)
def test_all_that_is_made_up_is_damaged(place: Place, forgery: Any) -> None:
    check_forged(place, forgery)


@pytest.mark.long
@pytest.mark.timeout(600)
@settings(max_examples=10_000)
@given(FORGERIES)
def test_all_that_is_made_up_is_damaged_10000_times(place: Place, forgery: Any) -> None:
    check_forged(place, forgery)
