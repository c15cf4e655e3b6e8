"""Starting NCCL between ranks: all of them get a communicator, or all of them the same reason why not."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from mpidist.arrays import streams as array_streams
from mpidist.arrays.streams import CupyState
from mpidist.collectives.gpu import nccl as nccl_module
from mpidist.collectives.gpu.nccl import NcclComm, make_nccl, nccl_problem
from mpidist.core.text import numbered_ranks
from mpidist.topology import world_topology
from tests.collectives.nccl_ranks import finished, private_world
from tests.support.fake_cupy import devices
from tests.support.fake_cupy import nccl as fake_nccl

pytestmark = [pytest.mark.nodes, pytest.mark.counts]

four_gpus = pytest.mark.parametrize("fake_gpus", [{"devices": 4, "jitter": 0.001}], indirect=True)
Raw = fake_nccl.NcclCommunicator


def outcome(device: int | str | None = "one per rank", patience: float = 20.0) -> tuple[str, int]:
    """Return what comes of ``made``, the same on all ranks, and how many ranks there are; a communicator is closed."""
    with private_world() as world:
        device = world.rank if isinstance(device, str) else device
        made = finished(make_nccl(world, device, patience))
        if isinstance(made, NcclComm):
            assert (made.rank, made.size, made.device) == (world.rank, world.size, device)
            made.close()
            text = "made"
        else:
            text = made
        assert world.allgather(text) == [text] * world.size
        assert fake_nccl.open_communicators() == []
        return text, world.size


def is_last() -> bool:
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1


@four_gpus
def test_made(fake_gpus: Any) -> None:
    assert outcome()[0] == "made"
    assert outcome()[0] == "made"


# Ranks that cannot --------------------------------------------------------------------------------------------------


@four_gpus
@pytest.mark.parametrize("reason", ["no CuPy", "no GPU", "no library", "a surprise"])
def test_one_rank_without_nccl(fake_gpus: Any, monkeypatch: Any, reason: str) -> None:
    if is_last():
        if reason == "no library":
            monkeypatch.setattr(fake_nccl, "available", False)
            reason = "finds no NCCL library"
        elif reason == "a surprise":
            monkeypatch.delattr(fake_nccl, "get_version")
            reason = "AttributeError"
        else:
            monkeypatch.setattr(nccl_module, "find_cupy", lambda: CupyState(None, reason))
    text, size = outcome()
    assert text.startswith(f"rank {size - 1} cannot use NCCL: ")
    if is_last():
        assert reason in text


@four_gpus
def test_a_rank_without_a_gpu(fake_gpus: Any) -> None:
    text, size = outcome(device=None if is_last() else 0)
    assert text == f"rank {size - 1} cannot use NCCL: no GPU was assigned to it"


@four_gpus
@pytest.mark.min_ranks(2)
def test_different_versions(fake_gpus: Any, monkeypatch: Any) -> None:
    if is_last():
        monkeypatch.setattr(fake_nccl, "version_code", 23004)
    text, size = outcome()
    assert text.startswith("the ranks load different versions of NCCL")
    assert f"2.28.9 on {numbered_ranks(range(size - 1))}" in text
    assert f"2.30.4 on rank {size - 1}" in text


@four_gpus
def test_no_unique_id(fake_gpus: Any, monkeypatch: Any) -> None:
    def fail() -> bytes:
        raise fake_nccl.NcclError(2)

    monkeypatch.setattr(fake_nccl, "get_unique_id", fail)
    assert "NCCL could not open a socket on rank 0" in outcome()[0]


# Ranks on one GPU ---------------------------------------------------------------------------------------------------


@four_gpus
@pytest.mark.min_ranks(2)
def test_two_ranks_on_one_gpu(fake_gpus: Any) -> None:
    text, _ = outcome(device=0)
    for part in ("ranks 0 and 1 have the same GPU (0000:01:00.0 of", "Duplicate GPU detected", "INVALID_USAGE"):
        assert part in text
    for remedy in ("cupy.cuda.Device(comm.rank % ", "docs/gpu.md", "NCCL_HOSTID and NCCL_MULTI_RANK_GPU_ENABLE"):
        assert remedy in text
    assert "this is NCCL 2.28.9" in text
    assert outcome()[0] == "made"


@four_gpus
@pytest.mark.parametrize("recipe", ["A", "B"])
def test_the_two_ways_to_share_a_gpu(fake_gpus: Any, monkeypatch: Any, recipe: str) -> None:
    if recipe == "A":
        from mpi4py import MPI

        monkeypatch.setenv("NCCL_HOSTID", f"rank-{MPI.COMM_WORLD.rank}")
    else:
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        monkeypatch.setattr(fake_nccl, "version_code", 23003)
    assert outcome(device=0)[0] == "made"


# Failing starts -----------------------------------------------------------------------------------------------------


@four_gpus
@pytest.mark.parametrize("error", [fake_nccl.NcclError(1), KeyError(7), RuntimeError("out of memory")])
def test_one_rank_fails_while_the_others_wait_for_it(fake_gpus: Any, monkeypatch: Any, error: Exception) -> None:
    def fail(*_: Any) -> Any:
        raise error

    if is_last():
        monkeypatch.setattr(fake_nccl, "NcclCommunicator", fail)
    text, size = outcome()
    assert text.startswith(f"NCCL did not start on rank {size - 1} of {size} (gpu:{size - 1}): ")
    words = {1: "UNHANDLED_CUDA", 7: "status 7, which CuPy has no name for"}
    status = getattr(error, "status", error.args[0])
    assert words.get(status, "RuntimeError: out of memory") in text


@four_gpus
def test_nothing_is_left_of_a_failure_for_the_next_start(fake_gpus: Any, monkeypatch: Any) -> None:
    def fail(*_: Any) -> Any:
        raise fake_nccl.NcclError(1)

    with private_world() as world:
        with monkeypatch.context() as changed:
            changed.setattr(fake_nccl, "NcclCommunicator", fail)
            assert isinstance(finished(make_nccl(world, world.rank)), str)
        made = finished(make_nccl(world, world.rank))
        assert isinstance(made, NcclComm), made
        made.close()


@four_gpus
def test_nccl_gets_the_memory_that_cupy_keeps_for_later_arrays(fake_gpus: Any, monkeypatch: Any) -> None:
    """On one rank; its program has let go of an array that was as large as what NCCL takes."""
    monkeypatch.setattr(fake_nccl, "communicator_bytes", 1 << 20)
    if is_last():
        device = world_topology().rank
        devices.machine().memory[device] = 2 << 20
        with fake_gpus.cuda.Device(device):
            array = fake_gpus.zeros(3 << 18, "f4")
            assert array.nbytes > 1 << 20
            del array
    assert outcome()[0] == "made"


@four_gpus
def test_a_start_that_does_not_come_to_an_end(fake_gpus: Any, monkeypatch: Any) -> None:
    release = threading.Event()

    def hang(*arguments: Any) -> Any:
        release.wait()
        return Raw(*arguments)

    if is_last():
        monkeypatch.setattr(fake_nccl, "NcclCommunicator", hang)
    try:
        text, size = outcome(patience=0.5)
    finally:
        release.set()
    assert text.startswith("NCCL was not ready on rank ")
    assert text.endswith(f"of {size} after 0.5 s")


@four_gpus
def test_a_first_call_that_does_nothing_on_one_rank(fake_gpus: Any, monkeypatch: Any) -> None:
    """The others wait on their GPUs for it, until they abort."""
    if is_last():
        monkeypatch.setattr(Raw, "allReduce", lambda *_: None)
    text, size = outcome()
    # Their threads end some time after the abort, and are not to outlive their GPUs.
    for thread in [thread for thread in threading.enumerate() if thread.name == "mpidist-nccl-start"]:
        thread.join(20)
    if size > 1:
        assert text == f"NCCL did not start on rank {size - 1} of {size} (gpu:{size - 1}): it added {size} ones to 1.0"
    else:
        assert text == "made"


@four_gpus
def test_a_start_whose_waiting_is_given_up(fake_gpus: Any, monkeypatch: Any) -> None:
    """What comes of it later is aborted, and not used."""
    release, ended = threading.Event(), threading.Event()
    used: list[bool] = []

    def late(*arguments: Any) -> Any:
        release.wait()
        raw = Raw(*arguments)
        abort = raw.abort
        raw.abort = lambda: (abort(), ended.set())  # type: ignore[method-assign]
        raw.allReduce = lambda *_: used.append(True)  # type: ignore[method-assign]
        return raw

    monkeypatch.setattr(fake_nccl, "NcclCommunicator", late)
    with private_world() as world:
        steps = make_nccl(world, world.rank)
        while not [thread for thread in threading.enumerate() if thread.name == "mpidist-nccl-start"]:
            next(steps)
        steps.close()
        release.set()
        assert ended.wait(20)
    assert not used
    assert fake_nccl.open_communicators() == []


# What a process lacks -----------------------------------------------------------------------------------------------


@pytest.mark.one_rank
def test_problem_without_cupy(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    array_streams.find_cupy.cache_clear()
    try:
        assert "[cuda13]'" in str(nccl_problem())
    finally:
        array_streams.find_cupy.cache_clear()


@pytest.mark.one_rank
def test_problem_without_a_gpu(fake_gpus: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(fake_gpus.cuda, "is_available", lambda: False)
    array_streams.find_cupy.cache_clear()
    assert "sees no GPU" in str(nccl_problem())


@pytest.mark.one_rank
@pytest.mark.parametrize("fake_gpus", [{"nccl": False}], indirect=True)
def test_problem_without_the_library(fake_gpus: Any) -> None:
    problem = str(nccl_problem())
    assert "finds no NCCL library (libnccl.so.2)" in problem
    assert "pip install nvidia-nccl-cu13" in problem


@pytest.mark.one_rank
def test_no_problem(fake_gpus: Any) -> None:
    assert nccl_problem() is None
