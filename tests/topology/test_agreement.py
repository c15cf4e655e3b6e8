"""Facts that only one rank has: the ranks agree on them, or all get a LaunchError."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import mpidist
from mpidist.core.settings import SETTINGS
from tests.support.ranks.jobs import ROOT, run_script
from tests.support.speed import deadlines

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs]

# Compares collectives of all kinds and sizes with NumPy, after `change` has changed a fact on one rank.
PROGRAM = """
import os, sys

rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
if rank == {odd}:
    {change}
import numpy as np
import mpidist

with mpidist.Communicator() as comm:
    def value(owner, count, dtype="f4"):
        return (np.arange(count) % 97 + owner).astype(dtype)

    owners = range(comm.size)
    for count in (1, 1000, 20_000, 100_000, 700_001, 3_000_000):
        total = sum(value(owner, count) for owner in owners)
        np.testing.assert_array_equal(comm.all_reduce("SUM", value(rank, count)), total)
        np.testing.assert_array_equal(comm.all_reduce_async("SUM", value(rank, count)).wait(), total)
        lists = comm.all_reduce("SUM", [value(rank, count), value(rank, 10), value(rank, count // 2)])
        np.testing.assert_array_equal(lists[2], sum(value(owner, count // 2) for owner in owners))
        gathered = comm.all_gather(value(rank, count))
        np.testing.assert_array_equal(gathered, np.concatenate([value(owner, count) for owner in owners]))
        root = comm.size - 1
        np.testing.assert_array_equal(comm.broadcast(value(rank, count), root=root), value(root, count))
        rows = comm.reduce_scatter("SUM", value(rank, count).reshape(-1, 1))
        assert rows.sum() == comm.all_gather_object(float(rows.sum()))[rank]
        in_place = comm.empty(count, "f4")
        in_place[:] = value(rank, count)
        np.testing.assert_array_equal(comm.all_reduce("SUM", in_place, out=in_place), total)
    comm.barrier()
print(f"rank {{rank}} is right", flush=True)
"""
# A value of each setting that is not its default.
VALUES = {
    "MPIDIST_ABORT_ON_EXCEPTION": "0",
    "MPIDIST_BUILD_NATIVE": "0",
    "MPIDIST_CHECK_NAN": "1",
    "MPIDIST_FLIGHT_RECORD": "{folder}",
    "MPIDIST_FULL_TRACEBACK": "1",
    "MPIDIST_GPU_AWARE_MPI": "1",
    "MPIDIST_GUARD": "0",
    "MPIDIST_JOBS": "worker:2",
    "MPIDIST_METRICS": "{folder}",
    "MPIDIST_NATIVE": "0",
    "MPIDIST_PROGRESS_THREAD": "0",
    "MPIDIST_PUSH_FROM": "65536",
    "MPIDIST_RANKS_PER_NODE": "1",
    "MPIDIST_READ_NEIGHBOURS": "0",
    "MPIDIST_REPORT": "1",
    "MPIDIST_STAGING_BYTES": "65536",
    "MPIDIST_STATUS": "{folder}",
    "MPIDIST_TIMEOUT": "20",
    "MPIDIST_TRACE": "{folder}",
    "MPIDIST_TUNING_FILE": "{folder}/missing.json",
    "MPIDIST_WARN_AFTER": "5",
}


def check(change: str, odd: int, error: str | None = None) -> str:
    """Run the program with a fact changed on one of two ranks; return what it printed."""
    done = run_script(PROGRAM.format(change=change, odd=odd), 2, env=deadlines(30), timeout=50)
    if error is None:
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == ["rank 0 is right", "rank 1 is right"]
    else:
        assert done.returncode != 0
        assert error in done.stderr
        assert "is right" not in done.stdout
    return done.stderr


@pytest.mark.parametrize("odd", [0, 1])
def test_one_bound_rank_changes_no_sums(odd: int) -> None:
    check("os.sched_setaffinity(0, {0})", odd)


def test_other_python_sources_are_an_error(tmp_path: Path) -> None:
    copy = tmp_path / "mpidist"
    shutil.copytree(ROOT / "mpidist", copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "collectives" / "node" / "packing.py").open("a") as file:
        file.write("\n")
    text = check(f"sys.path.insert(0, {str(tmp_path)!r})", 1, "LaunchError: Ranks run different builds of mpidist")
    for folder in (ROOT / "mpidist", copy):
        assert f"{mpidist.__version__}, build" in text
        assert f"in {folder}" in text


def test_a_recorded_build_id_counts(tmp_path: Path) -> None:
    copy = tmp_path / "mpidist"
    shutil.copytree(ROOT / "mpidist", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "build_id.txt").write_text("0123456789abcdef")
    check(f"sys.path.insert(0, {str(tmp_path)!r})", 1, "build 0123456789abcdef")


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("name", ["MPIDIST_RANKS_PER_NODE", "MPIDIST_JOBS"])
def test_settings_that_must_agree(name: str, odd: int) -> None:
    check(f"os.environ[{name!r}] = {VALUES[name]!r}", odd, f"LaunchError: Ranks differ in {name}")


def test_a_setting_that_one_rank_changes_later() -> None:
    program = """
    import os
    import mpidist

    first = mpidist.Communicator()
    if first.rank == 1:
        os.environ["MPIDIST_RANKS_PER_NODE"] = "1"
    try:
        mpidist.Communicator()
    except mpidist.LaunchError as error:
        print(error)
    print("the first one has", first.all_reduce("SUM", 1))
    """
    done = run_script(program, 2, env=deadlines(20), timeout=40)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Ranks differ in MPIDIST_RANKS_PER_NODE: it is not set on rank 0 and 1 on rank 1.") == 2
    assert done.stdout.count("the first one has 2") == 2


def test_memory_that_one_rank_may_not_read() -> None:
    # Denies process_vm_readv with EPERM by a seccomp filter.
    number = {"x86_64": 310, "aarch64": 270}
    check(
        f"""import ctypes, platform, struct
    number = {number!r}[platform.machine()]
    rules = struct.pack("HBBI" * 4, 0x20, 0, 0, 0, 0x15, 0, 1, number, 0x06, 0, 0, 0x00050001, 0x06, 0, 0, 0x7FFF0000)
    class Program(ctypes.Structure):
        _fields_ = [("count", ctypes.c_ushort), ("rules", ctypes.c_char_p)]
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(Program(4, rules))) == 0, ctypes.get_errno()""",
        1,
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
@pytest.mark.parametrize("odd", [0, 1])
def test_a_private_shared_memory_folder(odd: int) -> None:
    printed = check(
        """import ctypes
    libc, new_namespace, private_tree = ctypes.CDLL(None), 0x20000, 0x44000
    assert libc.unshare(new_namespace) == 0
    assert libc.mount(b"none", b"/", None, private_tree, None) == 0
    assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None) == 0""",
        odd,
    )
    assert printed.count("ranks of a node do not share one /dev/shm") == 1


def test_every_setting_has_a_value_here() -> None:
    assert sorted(VALUES) == sorted(SETTINGS)


@pytest.mark.long
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("name", sorted(name for name, setting in SETTINGS.items() if not setting.same_on_all))
def test_settings_of_one_rank_change_no_sums(name: str, odd: int, tmp_path: Path) -> None:
    value = VALUES[name].format(folder=tmp_path)
    # Only rank 0 reads the tuning file.
    error = "missing.json" if name == "MPIDIST_TUNING_FILE" and odd == 0 else None
    check(f"os.environ[{name!r}] = {value!r}", odd, error)
