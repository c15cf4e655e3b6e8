"""What the backend knows of launchers before torch or MPI is there."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from unittest.mock import patch

import pytest

from mpidist.topology.launchers import LAUNCHER_VARIABLES, LAUNCHERS
from mpidist.torch.variables import set_variables
from mpidist_torch_entry import RANK_VARIABLES

pytestmark = pytest.mark.one_rank

TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture
def environ() -> Iterator[MutableMapping[str, str]]:
    """The environment of this process without what a launcher sets, until the test ends."""
    with patch.dict(os.environ):
        for name in {*TORCH, *LAUNCHER_VARIABLES} & os.environ.keys():
            del os.environ[name]
        yield os.environ


def open_mpi(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items()}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_each_launcher_is_known_by_a_variable(name: str) -> None:
    row = LAUNCHERS[name]
    assert {row.rank, row.size} & {*RANK_VARIABLES}


def test_programs_find_their_place(environ: MutableMapping[str, str]) -> None:
    environ |= open_mpi(5, 8, 1, 4)
    set_variables()
    assert [environ[name] for name in TORCH] == ["5", "8", "1", "4"]


def test_numbers_that_a_launcher_does_not_give_are_not_set(environ: MutableMapping[str, str]) -> None:
    environ |= {"PMI_RANK": "5", "PMI_SIZE": "8"}
    set_variables()
    assert {name: environ[name] for name in TORCH if name in environ} == {"RANK": "5", "WORLD_SIZE": "8"}


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_place_that_is_set_stays(environ: MutableMapping[str, str], name: str) -> None:
    environ |= {**open_mpi(5, 8, 1, 4), name: "3"}
    set_variables()
    assert {each: environ[each] for each in TORCH if each in environ} == {name: "3"}


def test_without_a_launcher_there_is_no_place(environ: MutableMapping[str, str]) -> None:
    set_variables()
    assert not {*TORCH} & environ.keys()
