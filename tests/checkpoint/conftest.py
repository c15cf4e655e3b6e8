"""Checkpoints of little data, which many ranks write and read like those of much."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpidist.checkpoint import format as files
from mpidist.checkpoint import reader, writer


@pytest.fixture(scope="module")
def every_rank_has_a_part() -> Iterator[None]:
    """Let every rank write and read a part, however little there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PIECE_BYTES", 1 << 16)
        patch.setattr(writer, "SMALLEST_FILE_BYTES", 1)
        patch.setattr(reader, "SMALLEST_READ_BYTES", 1)
        yield
