"""Files mapped into memory: seen by all who map them, kept without a descriptor, gone with the last array."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from mpidist.collectives.node.native import map_shared

pytestmark = pytest.mark.one_rank

NBYTES = 3 * 4096


def mappings_of(path: Path) -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count(str(path))


def test_a_mapping_lasts_as_long_as_arrays_over_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(NBYTES))
    before = len(os.listdir("/proc/self/fd"))
    descriptor = os.open(path, os.O_RDWR)
    one, other = map_shared(descriptor, NBYTES), map_shared(descriptor, NBYTES)
    os.close(descriptor)
    assert len(os.listdir("/proc/self/fd")) == before
    one[5000] = 7
    assert (other[5000], path.read_bytes()[5000], one.dtype, one.shape) == (7, 7, np.uint8, (NBYTES,))
    view = one[4096:].view(np.float64).reshape(2, -1)
    del one
    assert mappings_of(path) == 2
    view[:] = 1.0
    assert other[4096:].view(np.float64).sum() == view.size
    del view
    assert mappings_of(path) == 1
    del other
    assert mappings_of(path) == 0


def test_what_the_system_refuses(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file, pytest.raises(OSError, match="mapping 0 bytes: Invalid argument"):
        map_shared(file.fileno(), 0)
