"""The search for NaN and infinity in reductions, with ``MPIDIST_CHECK_NAN=1``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.exchange import agreed_minimum, as_common, gather_objects
from mpidist.collectives.mpi.waiting import Comm, Steps
from mpidist.core.errors import NonFiniteError
from mpidist.core.text import user_call_site

T = TypeVar("T")
Contexts = Sequence[AbstractContextManager[object]]
# A key of a flat dict of arrays, as structures show it.
_KEY = re.compile(r"'([^']*)': \*")


def checked(
    comm: Comm,
    text: str,
    structure: str,
    contributed: Sequence[Sequence[Array]],
    steps: Steps[T],
    on: Contexts = (),
) -> Steps[T]:
    """Return the steps of a reduction, with a check of its results.

    All ranks raise NonFiniteError if a result has NaN or infinity.

    ``structure`` describes the value, and ``contributed`` has its arrays by replica of this rank. ``on`` are contexts
    for work on the results.
    """
    # In the thread and on the stream of the program, and before the result replaces the contribution.
    mine = sorted({index for arrays in contributed for index in _non_finite(arrays)})
    names = _KEY.findall(structure)
    return _checked(comm, text, names if len(names) == len(contributed[0]) else (), (mine, user_call_site()), steps, on)


def _checked(
    comm: Comm, text: str, names: Sequence[str], mine: tuple[list[int], str], steps: Steps[T], on: Contexts
) -> Steps[T]:
    results = yield from steps
    with ExitStack() as stack:
        for context in on:
            stack.enter_context(context)
        # A rank may have another part of the result than others, or none.
        is_finite = not _non_finite(results if isinstance(results, (list, tuple)) else ())
    if (yield from agreed_minimum(comm, int(is_finite))):
        return results
    everyone = yield from gather_objects(comm, mine)
    contributions = {rank: tuple(indices) for rank, (indices, _) in enumerate(everyone) if indices}
    call_sites = {rank: everyone[rank][1] for rank in contributions}
    raise as_common(NonFiniteError(text, contributions, call_sites, names), comm.Get_rank() == 0)


def _non_finite(arrays: Iterable[Array]) -> list[int]:
    """Return the indices of arrays with NaN or infinity."""
    return [
        index for index, array in enumerate(arrays) if array.dtype.kind not in "biu" and not np.isfinite(array).all()
    ]
