"""Names of communicators. All ranks compute the same name without communication."""

from __future__ import annotations

import zlib
from array import array
from hashlib import sha256

from mpidist.collectives.mpi.waiting import Comm
from mpidist.core.text import ranks_text
from mpidist.topology import import_mpi

# The flight record has 80 bytes for a name.
_RANKS_WIDTH = 40
# Communicators so far, by a digest of their ranks, because a list of ranks may be long.
_counts: dict[bytes, int] = {}


def ranks_in_job(comm: Comm) -> tuple[int, ...]:
    """Return the ranks of ``comm`` in the job."""
    group, world = comm.Get_group(), import_mpi().COMM_WORLD.Get_group()
    ranks = tuple(group.Translate_ranks(None, world))
    group.Free()
    world.Free()
    return ranks


def next_name(ranks: tuple[int, ...]) -> str:
    """Return a name for a new communicator of these ranks, with its number."""
    key = sha256(array("q", ranks).tobytes()).digest()
    number = _counts[key] = _counts.get(key, 0) + 1
    return _name(number, ranks)


def first_name() -> str:
    """Return the name of the first communicator of all ranks of the job."""
    return _name(1, tuple(range(import_mpi().COMM_WORLD.Get_size())))


def _name(number: int, ranks: tuple[int, ...]) -> str:
    text = ranks_text(ranks, _RANKS_WIDTH)
    # Different ranks may have the same abbreviated text.
    checksum = f" ({zlib.crc32(array('q', ranks).tobytes()):08x})" if "..." in text else ""
    return f"communicator {number} of ranks {text}{checksum}"
