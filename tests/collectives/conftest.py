"""Fixtures of the collectives: a communicator of all ranks, and a simulated GPU for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mpidist import Communicator
from mpidist.topology import world_topology


@pytest.fixture
def comm() -> Iterator[Communicator]:
    """A communicator of all ranks, closed after the test."""
    with Communicator() as communicator:
        yield communicator


@pytest.fixture
def cupy(fake_gpus: Any) -> Iterator[Any]:
    """The simulated CuPy, where each rank's current device is a GPU of its own."""
    with fake_gpus.cuda.Device(world_topology().rank):
        yield fake_gpus
