"""One communicator of all ranks per test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpidist import Communicator


@pytest.fixture
def comm() -> Iterator[Communicator]:
    """A communicator of all ranks; closed afterwards."""
    with Communicator() as communicator:
        yield communicator
