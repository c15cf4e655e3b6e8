"""Agreement: every rank must run the same mpidist with the same settings.

It is checked before anything else is exchanged, because later messages have layouts that depend on both. The messages
here have a layout of their own that must never change, so that each version of mpidist understands every other.
"""

from __future__ import annotations

import os
import struct
from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING

from mpidist.core import __version__
from mpidist.core.errors import LaunchError, shared_error
from mpidist.core.settings import SETTINGS
from mpidist.native.build_library import PACKAGE, build_id, quick_build_id
from mpidist.topology.start import finish, import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

_DOING = "checking that all ranks run the same mpidist"
_DIGEST_WORDS, _TEXT_BYTES = 8, 4096
_INSTALLATION, _HOST, _FOLDER = "installation", "host", "folder"


def check_same_everywhere(comm: MPI.Intracomm) -> None:
    """Check that all ranks have the same installation and settings (collective; MPI_Iallreduce).

    Raises:
        LaunchError: Two ranks differ. Raised on every rank.
    """
    values = {name: os.environ.get(name) or "not set" for name, setting in SETTINGS.items() if setting.same_on_all}
    # Copies of the same sources may have other times. Only then each rank reads all sources.
    if not _differences(comm, {_INSTALLATION: f"{__version__}, {quick_build_id()}", **values}):
        return
    facts = {_INSTALLATION: f"{__version__}, build {build_id()}", **values}
    differing = _differences(comm, facts)
    if differing:
        own, size = comm.Get_rank(), comm.Get_size()
        word, *extreme = differing[0]
        first_ranks = _reduced(comm, [own if word == each else size for each in extreme], import_mpi().MIN)
        text = _encoded({_HOST: os.uname().nodename, _FOLDER: str(PACKAGE), **facts})
        error = LaunchError(_difference({rank: _broadcast(comm, text, rank) for rank in sorted(first_ranks)}))
        raise shared_error(error, prints=own == 0)


def _differences(comm: MPI.Intracomm, facts: dict[str, str]) -> list[tuple[int, int, int]]:
    """Return the differing words of a digest: own, highest and lowest value (collective)."""
    digest = blake2b(_encoded(facts), digest_size=4 * _DIGEST_WORDS).digest()
    words = struct.unpack(f"<{_DIGEST_WORDS}I", digest)
    # The maximum of the negated words is the negated minimum.
    extremes = _reduced(comm, [*words, *(-word for word in words)], import_mpi().MAX)
    ranges = zip(words, extremes[:_DIGEST_WORDS], extremes[_DIGEST_WORDS:], strict=True)
    return [(word, highest, -lowest) for word, highest, lowest in ranges if highest != -lowest]


def _encoded(facts: dict[str, str]) -> bytes:
    return "\n".join(f"{name}={value}" for name, value in facts.items()).encode(errors="surrogateescape")


def _reduced(comm: MPI.Intracomm, words: list[int], op: MPI.Op) -> list[int]:
    integers = import_mpi().INT64_T
    mine, result = array("q", words), array("q", words)
    finish(comm.Iallreduce([mine, integers], [result, integers], op), comm, _DOING)
    return result.tolist()


def _broadcast(comm: MPI.Intracomm, text: bytes, root: int) -> dict[str, str]:
    """Return the facts of one rank (collective)."""
    buffer = bytearray(text[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"))
    finish(comm.Ibcast([buffer, import_mpi().BYTE], root), comm, _DOING)
    lines = bytes(buffer).rstrip(b"\0").decode(errors="replace").splitlines()
    return dict(line.partition("=")[::2] for line in lines)


def _difference(found: dict[int, dict[str, str]]) -> str:
    """Return the text of the error, given the facts of two different ranks."""
    (first, one), (second, other) = found.items()
    if one.get(_INSTALLATION) != other.get(_INSTALLATION):
        has = [
            f"rank {rank} on host {of.get(_HOST)} has {of.get(_INSTALLATION)}, in {of.get(_FOLDER)}"
            for rank, of in found.items()
        ]
        return f"Ranks run different builds of mpidist: {'; '.join(has)}. Install the same mpidist on every host."
    # None if the difference is cut off.
    name = next((name for name in SETTINGS if one.get(name) != other.get(name)), None)
    if name is None:
        names = [name for name, setting in SETTINGS.items() if setting.same_on_all]
        return f"Ranks {first} and {second} differ in {' or '.join(names)}. Set the same value on every rank."
    return (
        f"Ranks differ in {name}: it is {one.get(name)} on rank {first} and {other.get(name)} on rank {second}. "
        f"Set the same value on every rank: export it before the launcher, with Open MPI also pass mpirun -x {name}."
    )
