"""Whether MPI is given pointers to GPU memory."""

from __future__ import annotations

import ctypes
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from mpidist import Communicator
from mpidist.collectives.channel.operation import Operation, describe
from mpidist.collectives.gpu import probes
from mpidist.collectives.gpu.probes import answer_here, takes_device_memory
from mpidist.topology import import_mpi

pytestmark = [pytest.mark.nodes, pytest.mark.counts]


def answer(comm: Communicator) -> bool:
    return comm._channel.run(Operation[bool](takes_device_memory(comm._channel.comm), describe("asking")))


VARIABLES = (
    "MPIDIST_GPU_AWARE_MPI",
    "MPICH_GPU_SUPPORT_ENABLED",
    "MPICH_RDMA_ENABLED_CUDA",
    *(variable for _, variable in probes._SWITCHES),
)


class Library:
    """An MPI library as far as it is asked.

    Args:
        version: As it tells it.
        kinds: Of memory, as MPI 4.1 tells them.
        functions: Those it has; ctypes would give the same.
        libraries: Others that the process has loaded.
    """

    def __init__(self, version: str, kinds: str | None = None, libraries: str = "", **functions: Any) -> None:
        self._version = version
        self._kinds = kinds
        self.__file__ = "MPI.so"
        self.COMM_WORLD = self
        self.functions = functions
        self.libraries = libraries

    def Get_info(self) -> Library:  # noqa: N802 - MPI's name
        return self

    def Get(self, key: str) -> str | None:  # noqa: N802
        assert key == "mpi_memory_alloc_kinds"
        return self._kinds

    def Get_library_version(self) -> str:  # noqa: N802
        return self._version


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def test_mpi_of_pypi_is_not_gpu_aware(comm: Communicator) -> None:
    if not any(name in import_mpi().Get_library_version() for name in ("Open MPI", "MPICH")):
        pytest.skip("this MPI is neither Open MPI nor MPICH")
    assert answer(comm) is False


def test_the_setting_decides_if_all_ranks_agree(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mpidist")
    monkeypatch.setenv("MPIDIST_GPU_AWARE_MPI", "1")
    assert answer(comm) is True
    if comm.rank == 0:
        assert "directly from GPU memory (as MPIDIST_GPU_AWARE_MPI says" in caplog.text
    if comm.size > 1:
        monkeypatch.setenv("MPIDIST_GPU_AWARE_MPI", str(int(comm.rank == 0)))
        assert answer(comm) is False


def asserts() -> int:
    """Fail as MPIX_Query_cuda_support of MPICH 3.4 always does."""
    raise AssertionError("the process ends: assert(mpi_errno)")


def query(status: int, is_supported: int) -> Any:
    """Return an MPIX_GPU_query_support."""

    def answered(kind: int, flag: Any) -> int:
        assert kind == 0
        flag._obj.value = is_supported
        return status

    return answered


CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.1 (ANL base 3.4a2)"
GTL = "7f00-7f01 r-xp 00000000 00:2f 1 /opt/cray/pe/mpich/8.1.28/gtl/lib/libmpi_gtl_cuda.so.0.0.0"
MPICH = "MPICH Version:      3.4.3"


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("library", "environment", "expected", "why"),
    [
        (Library("MPICH Version: 5.0", "mpi,system,cuda:device"), {}, True, "memory kinds"),
        (Library("MPICH Version: 5.0", "mpi,system"), {"MPIR_CVAR_ENABLE_GPU": "1"}, False, "memory kinds"),
        (Library(MPICH, MPIX_GPU_query_support=query(0, 1), MPIX_Query_cuda_support=asserts), {}, True, "says yes"),
        (Library(MPICH, MPIX_GPU_query_support=query(0, 0), MPIX_Query_cuda_support=asserts), {}, False, "CVAR"),
        (Library(MPICH, MPIX_GPU_query_support=query(12, 1), MPIX_Query_cuda_support=asserts), {}, False, "error 12"),
        (Library("MPICH Version: 3.3"), {"MPIR_CVAR_ENABLE_GPU": "1"}, False, "has no MPIX_GPU_query_support"),
        (Library(CRAY, libraries=GTL), {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True, "libmpi_gtl_cuda.so is loaded"),
        (Library(CRAY), {"MPICH_GPU_SUPPORT_ENABLED": "1"}, False, "libmpi_gtl_cuda.so is not loaded: docs/gpu.md"),
        (Library(CRAY, libraries=GTL), {"MPICH_GPU_SUPPORT_ENABLED": "0"}, False, "ENABLED is not set"),
        (Library(CRAY), {"MPICH_RDMA_ENABLED_CUDA": "1"}, True, "MPICH_RDMA_ENABLED_CUDA is set"),
        (Library(CRAY, "mpi,system,cuda", MPIX_GPU_query_support=query(0, 1)), {}, False, "ENABLED is not set"),
        (Library("Open MPI v5.0.11", MPIX_Query_cuda_support=lambda: 1), {}, True, "says yes"),
        (Library("Open MPI v5.0.11", MPIX_Query_cuda_support=lambda: 0), {}, False, "says no"),
        (Library("Open MPI v5.0.11"), {"MPICH_GPU_SUPPORT_ENABLED": "1"}, False, "does not say"),
        (Library("Intel(R) MPI Library 2021.18"), {"I_MPI_OFFLOAD": "1"}, True, "I_MPI_OFFLOAD is set"),
        (Library("MVAPICH2 Version      :\t2.3.7"), {"MV2_USE_CUDA": "1"}, True, "MV2_USE_CUDA is set"),
        (Library("MVAPICH Version: 4.0", MPIX_Query_cuda_support=asserts), {}, False, "MVP_USE_CUDA is not set"),
        (Library("ParaStation MPI 5.10"), {"PSP_CUDA": "1"}, True, "PSP_CUDA is set"),
    ],
)
def test_what_a_library_says(
    monkeypatch: pytest.MonkeyPatch, library: Library, environment: dict[str, str], expected: bool, why: str
) -> None:
    monkeypatch.setattr(probes, "import_mpi", lambda: library)
    loaded = SimpleNamespace(**library.functions)
    monkeypatch.setattr(
        probes,
        "ctypes",
        SimpleNamespace(CDLL={"MPI.so": loaded}.__getitem__, c_int=ctypes.c_int, byref=ctypes.byref),
    )
    maps = SimpleNamespace(exists=lambda: True, read_text=lambda: library.libraries)
    monkeypatch.setattr(probes, "Path", {"/proc/self/maps": maps}.__getitem__)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    answer, reason = answer_here()
    assert answer is expected
    assert why in reason
