"""Whether MPI is given pointers to GPU memory."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from mpidist import Communicator
from mpidist.collectives import gpu_aware_mpi
from mpidist.collectives.gpu_aware_mpi import answer_here, takes_device_memory
from mpidist.topology import import_mpi

pytestmark = [pytest.mark.nodes, pytest.mark.counts]


def answer(comm: Communicator) -> bool:
    return bool(comm._channel.run(takes_device_memory(comm._channel.comm), "asking"))


class Library:
    """An MPI library as far as it is asked."""

    def __init__(self, version: str, kinds: str | None = None) -> None:
        self._version = version
        self._kinds = kinds
        self.__file__ = None
        self.COMM_WORLD = self

    def Get_info(self) -> Library:  # noqa: N802 - MPI's name
        return self

    def Get(self, key: str) -> str | None:  # noqa: N802
        assert key == "mpi_memory_alloc_kinds"
        return self._kinds

    def Get_library_version(self) -> str:  # noqa: N802
        return self._version


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIDIST_GPU_AWARE_MPI", raising=False)
    for _, variable in gpu_aware_mpi._SWITCHES:
        monkeypatch.delenv(variable, raising=False)


def test_the_libraries_from_the_package_index_do_not(comm: Communicator) -> None:
    if not any(name in import_mpi().Get_library_version() for name in ("Open MPI", "MPICH")):
        pytest.skip("this MPI is neither Open MPI nor MPICH")
    assert answer(comm) is False


def test_the_setting_has_the_last_word_and_all_ranks_must_agree(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mpidist")
    monkeypatch.setenv("MPIDIST_GPU_AWARE_MPI", "1")
    assert answer(comm) is True
    if comm.rank == 0:
        assert "straight to and from GPU memory (as MPIDIST_GPU_AWARE_MPI says" in caplog.text
    if comm.size > 1:
        monkeypatch.setenv("MPIDIST_GPU_AWARE_MPI", str(int(comm.rank == 0)))
        assert answer(comm) is False


@pytest.mark.parametrize(
    ("library", "environment", "expected"),
    [
        (Library("MPICH Version: 5.0", "mpi,system,cuda:device"), {}, True),
        (Library("MPICH Version: 5.0", "mpi,system"), {"MPIR_CVAR_ENABLE_GPU": "1"}, False),
        (Library("MPI VERSION    : CRAY MPICH version 8.1"), {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True),
        (Library("MPI VERSION    : CRAY MPICH version 8.1"), {"MPICH_GPU_SUPPORT_ENABLED": "0"}, False),
        (Library("Open MPI v5.0.11"), {"MPICH_GPU_SUPPORT_ENABLED": "1"}, False),
        (Library("Intel(R) MPI Library 2021.18"), {"I_MPI_OFFLOAD": "1"}, True),
        (Library("MVAPICH2 Version      :\t2.3.7"), {"MV2_USE_CUDA": "1"}, True),
        (Library("ParaStation MPI 5.10"), {"PSP_CUDA": "1"}, True),
    ],
)
def test_what_a_library_says(
    monkeypatch: pytest.MonkeyPatch, library: Any, environment: dict[str, str], expected: bool
) -> None:
    monkeypatch.setattr(gpu_aware_mpi, "import_mpi", lambda: library)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert answer_here()[0] is expected
