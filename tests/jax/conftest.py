"""What the tests of mpidist.jax have in common."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def jax() -> Iterator[ModuleType]:
    """JAX, with a communicator of all ranks of this session for reductions outside of strategies."""
    jax = pytest.importorskip("jax", reason="JAX is missing: pip install '.[jax]'")
    from mpidist.jax.reduction import communicator_of
    from mpidist.topology import world_topology

    comm = communicator_of(world_topology())
    yield jax
    comm.close()
    communicator_of.cache_clear()
