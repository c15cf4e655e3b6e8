"""CuPy's compiled NCCL binding itself, over a stand-in for the NCCL library: on machines with CuPy, a GPU or none.

Arrays are CuPy's own, over host memory. What runs here on the ranks of a job of its own is NcclComm and what starts it;
only what asks for a GPU is replaced.
"""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from mpidist.arrays.cupy_ops import CupyOps
from mpidist.collectives.gpu import nccl as nccl_module
from mpidist.collectives.gpu.nccl import NcclComm, join_local_gpus, make_nccl, nccl_version
from mpidist.core.options import ReduceOp
from tests.collectives.nccl_ranks import finished, private_world
from tests.support.fake_cupy import nccl as double
from tests.support.ranks.pool import run

_SOURCE = Path(__file__).parents[1] / "support" / "fake_nccl.c"
# Not bound by what this process has imported: the jobs are others.
_HAS_CUPY = importlib.util.find_spec("cupy") is not None
_COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.one_rank,
    pytest.mark.skipif(not _HAS_CUPY, reason="CuPy is not installed; type: pip install cupy-cuda13x"),
    pytest.mark.skipif(_COMPILER is None, reason="there is no C compiler for the stand-in for NCCL"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The stand-in, compiled."""
    target = tmp_path_factory.mktemp("nccl") / "libnccl.so.2"
    flags = ["-O1", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libnccl.so.2"]
    subprocess.run([str(_COMPILER), *flags, "-o", str(target), str(_SOURCE)], check=True)
    return str(target)


# On the ranks -------------------------------------------------------------------------------------------------------


class _HostMemoryOps(CupyOps):
    """CuPy's operations on its arrays, where these lie in host memory."""

    def __init__(self, cupy: Any) -> None:
        super().__init__(cupy)
        self._owners: dict[int, np.ndarray] = {}

    def from_host(self, array: np.ndarray, device: int) -> Any:
        host = np.array(array, order="C")
        memory = self._cupy.cuda.UnownedMemory(host.ctypes.data, max(host.nbytes, 1), host, device)
        made = self._cupy.ndarray(host.shape, host.dtype, self._cupy.cuda.MemoryPointer(memory, 0))
        self._owners[made.data.ptr] = host
        return made

    def to_host(self, array: Any) -> np.ndarray:
        return self._owners[array.data.ptr]

    def on(self, device: int) -> Any:
        return mock.MagicMock()

    def stream(self, device: int) -> Any:
        return mock.MagicMock(handle=0)

    current_stream = stream


@contextmanager
def _binding(library: str) -> Any:
    """Load the stand-in and CuPy's binding, and let NcclComm take both for a GPU's; gives binding and operations."""
    ctypes.CDLL(library)
    import cupy
    from cupy.cuda import nccl

    ops = _HostMemoryOps(cupy)

    def candidate(device: int, ranks: tuple[int, ...]) -> Any:
        return nccl_module._Candidate(None, nccl_version(nccl), "host", str(device))

    found = {"nccl_binding": lambda: nccl, "gpu_ops": lambda: ops}
    starting = {**found, "_candidate": candidate, "require_cupy": mock.MagicMock()}
    with mock.patch.multiple(nccl_module, **starting):
        yield nccl, ops


def _values(rank: int, size: int, dtype: str) -> np.ndarray:
    return ((np.arange(size) + rank) % 3 + 1).astype(dtype)


def _every_call(library: str) -> None:
    with _binding(library) as (_, ops), private_world() as world:
        comm = finished(make_nccl(world, 0))
        assert isinstance(comm, NcclComm), comm
        stream, n, rank = ops.stream(0), comm.size, comm.rank
        assert (comm._raw.size(), comm._raw.rank_id()) == (n, rank) == (world.size, world.rank)

        def array(values: Any) -> Any:
            return ops.from_host(np.asarray(values), 0)

        def check(got: Any, expected: Any) -> None:
            np.testing.assert_array_equal(ops.to_host(got), expected)

        functions = {
            ReduceOp.SUM: np.add,
            ReduceOp.PROD: np.multiply,
            ReduceOp.MIN: np.minimum,
            ReduceOp.MAX: np.maximum,
        }
        for dtype in ("i1", "u1", "i4", "u4", "i8", "u8", "f4", "f8"):
            for op, function in functions.items():
                for size in (1, 50_000):
                    everybody = function.reduce([_values(other, n * size, dtype) for other in range(n)])
                    source, target = array(_values(rank, n * size, dtype)), array(np.zeros(n * size, dtype))
                    piece = array(np.zeros(size, dtype))
                    comm.all_reduce(source, target, op, stream)
                    check(target, everybody)
                    comm.reduce_scatter(source, piece, op, stream)
                    check(piece, everybody[rank * size : (rank + 1) * size])
                    comm.reduce(source, source if rank == n - 1 else None, op, n - 1, stream)
                    check(source, everybody if rank == n - 1 else _values(rank, n * size, dtype))
        turning = array(np.full(3, 1j + rank, "c16"))
        comm.all_reduce(turning, turning, ReduceOp.SUM, stream)
        check(turning, np.full(3, n * 1j + sum(range(n))))
        for dtype in ("?", "i2", "f2", "c8"):
            source, whole = array(_values(rank, 99_999, dtype)), array(np.zeros(99_999 * n, dtype))
            comm.all_gather(source, whole, stream)
            check(whole, np.concatenate([_values(other, 99_999, dtype) for other in range(n)]))
            target = array(np.zeros(99_999, dtype))
            comm.broadcast(source if rank == n - 1 else None, target, n - 1, stream)
            check(target, _values(n - 1, 99_999, dtype))
        comm.close()
        comm.close()


def _local_gpus(library: str) -> None:
    with _binding(library) as (nccl, ops):
        changes = {"nccl_binding": lambda: nccl, "nccl_problem": lambda: None, "gpu_ops": lambda: ops}
        with mock.patch.multiple(nccl_module, **changes):
            comms = join_local_gpus([0, 2, 1])
        arrays = [ops.from_host(np.full(5, place, "f4"), device) for place, device in enumerate([0, 2, 1])]
        streams = [ops.stream(comm.device) for comm in comms]
        with comms[0].group():
            for comm, array, stream in zip(comms, arrays, streams, strict=True):
                comm.all_reduce(array, array, ReduceOp.SUM, stream)
        assert [ops.to_host(array).tolist() for array in arrays] == [[3.0] * 5] * 3
        for comm in comms:
            comm.close()


def _names(text: str) -> list[str]:
    """Return the parameters in the first line of the docstring of a compiled function."""
    head = text.splitlines()[0]
    parameters = head[head.index("(") + 1 : head.rindex(")")].split(",")
    return [parameter.split("=")[0].split()[-1] for parameter in parameters if parameter.strip()]


def _compare_with_the_double(library: str) -> int:
    with _binding(library) as (nccl, _):
        compared = 0
        constants = {name: value for name, value in vars(double).items() if name.startswith("NCCL_")}
        assert constants == {name: value for name, value in vars(nccl).items() if name.startswith("NCCL_")}
        for status in range(1, 7):
            assert str(double.NcclError(status)).split(":")[0] == str(nccl.NcclError(status)).split(":")[0]
            assert nccl.NcclError(status).status == double.NcclError(status).status == status
        for binding in (double, nccl):
            with pytest.raises(KeyError):
                binding.NcclError(7)
        for name in ("get_version", "get_build_version", "get_unique_id", "groupStart", "groupEnd"):
            assert list(inspect.signature(getattr(double, name)).parameters) == _names(getattr(nccl, name).__doc__)
            compared += 1
        start = inspect.signature(double.NcclCommunicator)
        assert list(start.parameters) == _names(nccl.NcclCommunicator.__doc__)
        for name, member in vars(double.NcclCommunicator).items():
            if callable(getattr(member, "__func__", member)) and not name.startswith("_"):
                parameters = inspect.signature(getattr(double.NcclCommunicator, name)).parameters
                assert list(parameters) == _names(getattr(nccl.NcclCommunicator, name).__doc__), name
                compared += 1
        assert len(nccl.get_unique_id()) == len(double.get_unique_id()) == 128
        return compared


# Here ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_call(library: str, ranks: int) -> None:
    run(_every_call, ranks, library)


def test_local_gpus(library: str) -> None:
    run(_local_gpus, 1, library)


def test_the_double_has_the_same_signatures(library: str) -> None:
    (compared,) = run(_compare_with_the_double, 1, library)
    assert compared == 18
