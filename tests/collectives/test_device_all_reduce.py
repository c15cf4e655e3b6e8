"""All-reduce of arrays on GPUs, on stand-ins for CuPy and NCCL whose streams are threads that are late."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mpidist
from mpidist import Communicator, MismatchError
from mpidist.arrays.cupy_ops import CupyOps
from mpidist.core.errors import AlgorithmError, DeviceError, PeerError
from mpidist.experimental import CommunicationOptions
from mpidist.topology import world_topology

LATE = {"devices": 6, "jitter": 0.001}
GPUS = pytest.mark.parametrize("fake_gpus", [LATE], indirect=True)
PUNCTUAL = pytest.mark.parametrize("fake_gpus", [{"devices": 6}], indirect=True)


def layouts() -> list[Any]:
    """Return the numbers of ranks per virtual node that make different layouts of these ranks."""
    size = world_topology().size
    return [None, *range(1, size)]


def values_of(rank: int, round_number: int = 0) -> list[np.ndarray]:
    """Return the contribution of a rank: large, small, empty and 0-d arrays of several dtypes."""
    random = np.random.default_rng([rank, round_number])
    return [
        random.integers(-4, 5, 120_001).astype("f4"),
        random.integers(-4, 5, (7, 3)).astype("f4").T,
        random.integers(-4, 5, (300, 5)).astype("f2"),
        np.float64(rank + round_number),
        random.integers(-4, 5, 70).astype(ml_dtypes.bfloat16),
        random.integers(-400, 500, 40).astype("i2"),
        np.zeros((0, 3), "f4"),
        random.integers(-4, 5, 33) + 1j * rank,
        np.array(rank, "i8"),
    ]


def on_devices(cupy: Any, values: list[np.ndarray]) -> list[Any]:
    return [cupy.asarray(value) for value in values]


def check(got: list[Any], expected: list[np.ndarray], cupy: Any) -> None:
    for result, wanted in zip(got, expected, strict=True):
        assert isinstance(result, cupy.ndarray)
        assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_array_equal(result.get(), wanted)


def summed(size: int, round_number: int = 0) -> list[np.ndarray]:
    return [sum(parts[1:], parts[0]) for parts in zip(*(values_of(r, round_number) for r in range(size)), strict=True)]


@GPUS
@pytest.mark.counts
@pytest.mark.parametrize("per_node", layouts())
def test_many_rounds_in_every_layout(cupy: Any, monkeypatch: pytest.MonkeyPatch, per_node: int | None) -> None:
    monkeypatch.setenv("MPIDIST_STAGING_BYTES", "65536")
    if per_node is not None:
        monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", str(per_node))
    with Communicator() as comm:
        for number in range(6):
            check(
                comm.all_reduce("SUM", on_devices(cupy, values_of(comm.rank, number))), summed(comm.size, number), cupy
            )
        expected = "nccl" if comm._channel.node.is_alone else "hierarchical"
        assert comm.last_algorithm == ("alone" if comm.size == 1 else expected)


@GPUS
@pytest.mark.counts
@pytest.mark.parametrize("algorithm", ["nccl", "hierarchical", "staged"])
@pytest.mark.parametrize("op", ["SUM", "MEAN", "MIN", "MAX", "PROD"])
def test_every_operation(cupy: Any, comm: Communicator, op: str, algorithm: str) -> None:
    options = CommunicationOptions(algorithm=algorithm)
    mine = [value for value in values_of(comm.rank) if op in ("SUM", "MEAN", "PROD") or value.dtype.kind != "c"]
    got = comm.all_reduce(op, on_devices(cupy, mine), options=options)
    expected = comm.all_reduce(op, mine)
    for result, wanted in zip(got, expected, strict=True):
        assert (result.shape, result.dtype) == (np.shape(wanted), wanted.dtype)
        np.testing.assert_allclose(result.get().astype("c16"), np.asarray(wanted).astype("c16"), rtol=1e-2)


@GPUS
def test_arrays_on_the_host_among_them_stay_there(cupy: Any, comm: Communicator) -> None:
    total = sum(range(comm.size))
    for _ in range(5):
        device, host, number = comm.all_reduce("SUM", [cupy.full(3, comm.rank, "f4"), np.full(4, comm.rank), comm.rank])
        assert isinstance(device, cupy.ndarray)
        assert isinstance(host, np.ndarray)
        assert device.get().tolist() == [total] * 3
        assert host.tolist() == [total] * 4
        assert number == total


@GPUS
@pytest.mark.parametrize("is_started", [False, True])
def test_results_in_arrays_of_the_caller(cupy: Any, comm: Communicator, is_started: bool) -> None:
    values = values_of(comm.rank)
    out = [cupy.empty(value.shape, value.dtype) for value in values]
    # One that is not contiguous, and one that is written where it is read.
    out[0] = cupy.empty((values[0].size, 2), "f4")[:, 0]
    given = on_devices(cupy, values)
    out[2] = given[2]
    got = comm.all_reduce_async("SUM", given, out=out).wait() if is_started else comm.all_reduce("SUM", given, out=out)
    assert all(result is target for result, target in zip(got, out, strict=True))
    check(got, summed(comm.size), cupy)
    with pytest.raises(ValueError, match=r"out has float32\(3,\); expected float32\(3,\) on a GPU, as the result has"):
        comm.all_reduce("SUM", cupy.ones(3, "f4"), out=np.ones(3, "f4"))


OUTS: dict[str, Any] = {
    "separate": lambda cupy, arrays: [cupy.empty_like(array) for array in arrays],
    "inputs": lambda cupy, arrays: arrays,
    "views of inputs": lambda cupy, arrays: [array[:] for array in arrays],
    "shifted": lambda cupy, arrays: [*arrays[1:], arrays[0]],
}


@PUNCTUAL
@pytest.mark.one_rank
@pytest.mark.parametrize("kind", OUTS)
@pytest.mark.parametrize("bytes_per_pack", [1, 0])
def test_costs_per_array_are_constant(
    cupy: Any, comm: Communicator, monkeypatch: pytest.MonkeyPatch, kind: str, bytes_per_pack: int
) -> None:
    asked: list[Any] = []
    pointer = CupyOps.pointer
    monkeypatch.setattr(CupyOps, "pointer", lambda self, array: (asked.append(array), pointer(self, array))[1])
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack)
    costs = []
    for count in (20, 60):
        arrays = [cupy.full(5, number, "f4") for number in range(count)]
        asked.clear()
        got = comm.all_reduce("SUM", arrays, out=OUTS[kind](cupy, arrays), options=options)
        costs.append(len(asked))
        assert [result.get().tolist() for result in got] == [[number] * 5 for number in range(count)]
    # A few for each call, and eight for each array.
    assert costs[1] <= 3 * costs[0] <= 3 * 8 * 20 + 10


@GPUS
def test_dropped_arrays_live_until_used(cupy: Any, comm: Communicator) -> None:
    count = 50_000
    for number in range(20):
        work = comm.all_reduce_async("SUM", cupy.full(count, number, "f4"))
        # Takes the memory of the input if that has been let go.
        cupy.full(count, -1, "f4")
        comm.all_reduce_async("SUM", cupy.full(count, 7, "f4"))
        np.testing.assert_array_equal(work.wait().get(), np.full(count, number * comm.size, "f4"))


@PUNCTUAL
def test_a_sixteen_bit_wire_between_nodes(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "1")
    with Communicator() as comm:
        for feedback in (False, True):
            options = CommunicationOptions(wire_dtype="bfloat16", error_feedback=feedback)
            mean = 0
            for _ in range(30):
                mean += comm.all_reduce("MEAN", cupy.full(1000, 1.001, "f4"), options=options).get()[0] / 30
            exact = comm.size == 1 or feedback
            assert abs(mean - 1.001) < (2e-4 if exact else 5e-3)


@PUNCTUAL
def test_deterministic_sums_use_the_host(cupy: Any, comm: Communicator) -> None:
    value = np.random.default_rng(comm.rank).random(1000).astype("f4")
    options = CommunicationOptions(deterministic=True)
    got = comm.all_reduce("SUM", cupy.asarray(value), options=options)
    np.testing.assert_array_equal(got.get(), comm.all_reduce("SUM", value, options=options))
    assert comm.last_algorithm != "nccl"


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("fake_gpus", [{"devices": 6, "nccl": False}], indirect=True)
def test_without_nccl_the_host_reduces(cupy: Any, comm: Communicator, caplog: pytest.LogCaptureFixture) -> None:
    if not comm._channel.node.is_alone:
        pytest.skip("NCCL is needed by ranks that share a node")
    for _ in range(3):
        check(comm.all_reduce("SUM", on_devices(cupy, values_of(comm.rank))), summed(comm.size), cupy)
    assert comm.last_algorithm == "staged"
    said = [record.message for record in caplog.records if "slow" in record.message]
    assert len(said) == (comm.rank == 0)
    with pytest.raises(AlgorithmError, match="finds no NCCL library.*pip install nvidia-nccl-cu"):
        comm.all_reduce("SUM", cupy.ones(3), options=CommunicationOptions(algorithm="nccl"))


@pytest.mark.min_ranks(2)
@PUNCTUAL
def test_two_ranks_on_one_gpu_get_a_hint(fake_gpus: Any, comm: Communicator, caplog: pytest.LogCaptureFixture) -> None:
    if not comm._channel.node.is_alone:
        pytest.skip("ranks of several nodes have GPUs of their own")
    got = comm.all_reduce("SUM", fake_gpus.ones(3))
    assert got.get().tolist() == [comm.size] * 3
    assert comm.last_algorithm == "staged"
    if comm.rank == 0:
        assert "NCCL_HOSTID" in caplog.text


@pytest.mark.min_ranks(2)
@PUNCTUAL
def test_algorithms_of_the_other_kind_of_memory(cupy: Any, comm: Communicator) -> None:
    with pytest.raises(AlgorithmError, match="'nccl' is for arrays on GPUs, but the arrays are in host memory"):
        comm.all_reduce("SUM", np.ones(1000), options=CommunicationOptions(algorithm="nccl"))
    with pytest.raises(AlgorithmError, match="'mpi' is for arrays in host memory, but the arrays are on GPUs"):
        comm.all_reduce("SUM", cupy.ones(1000), options=CommunicationOptions(algorithm="mpi"))
    assert comm.all_reduce("SUM", cupy.ones(2)).get().tolist() == [comm.size] * 2


@pytest.mark.min_ranks(2)
@PUNCTUAL
def test_host_and_device_arrays_mismatch(cupy: Any, comm: Communicator) -> None:
    with pytest.raises(MismatchError, match=r"float32\(3,\) on a GPU"):
        comm.all_reduce("SUM", np.ones(3, "f4") if comm.rank else cupy.ones(3, "f4"))
    assert comm.all_reduce("SUM", cupy.ones(2)).get().tolist() == [comm.size] * 2


@PUNCTUAL
def test_a_rank_keeps_to_one_device(cupy: Any) -> None:
    # A communicator of its own: its ranks part ways when one is told of the other's error.
    with mpidist.Communicator(world_topology().world) as comm:
        comm.all_reduce("SUM", cupy.ones(2))
        other = (comm.rank + 1) % 6
        with cupy.cuda.Device(other):
            array = cupy.ones(2)
        with pytest.raises(ValueError, match=f"arrays are on gpu:{other}, but this communicator uses gpu:{comm.rank}"):
            comm.all_reduce("SUM", array)


@PUNCTUAL
@pytest.mark.parametrize("everywhere", [True, False])
def test_per_thread_default_streams_raise(everywhere: bool, cupy: Any) -> None:
    with mpidist.Communicator(world_topology().world) as comm:
        array = cupy.ones(2)
        is_refused = everywhere or comm.rank == 0
        if is_refused:
            cupy.cuda.Stream.ptds.use()
        with pytest.raises(DeviceError if is_refused else PeerError, match="unset CUPY_CUDA_PER_THREAD_DEFAULT_STREAM"):
            comm.all_reduce("SUM", array)
