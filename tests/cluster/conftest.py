"""Tests on virtual hosts: collected with pytest -m cluster only, as they need root (make test-cluster)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.lab import Lab, Settings, missing

HOSTS = 4
# They are for the ranks of jobs.
collect_ignore = ["programs"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster: brings up virtual hosts with Slurm, as root; run by make test-cluster")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if "cluster" in config.option.markexpr else True


@pytest.fixture(scope="session")
def can_have_labs() -> None:
    """Skip where no lab can come up."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def lab(can_have_labs: None) -> Iterator[Lab]:
    """Four hosts that all tests of a session share; a test that breaks one mends it."""
    # The time limit of the whole run must not leave hosts behind.
    previous = signal.signal(signal.SIGTERM, lambda *_: pytest.exit("ended by SIGTERM"))
    with pytest.MonkeyPatch.context() as environment, Lab(Settings(name="tests", hosts=HOSTS)) as up:
        # Hundreds of ranks start, and each would compile mpidist for itself.
        environment.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield up
    signal.signal(signal.SIGTERM, previous)
