"""Host copies: how arrays on a GPU take part in collectives that work in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpidist.arrays.convert import Array
from mpidist.arrays.device_ops import ops_of
from mpidist.collectives.channel.description import which_on_device

BringBack = Callable[[list[Array]], list[Array]]


def on_host(arrays: Sequence[Array]) -> tuple[Sequence[Array], BringBack]:
    """Return arrays in host memory, and what brings the results of a collective to where each array was.

    Blocks until the arrays are there.

    >>> import numpy as np
    >>> arrays, bring_back = on_host([np.ones(2)])
    >>> bring_back([2 * arrays[0]])
    [array([2., 2.])]
    """
    if not which_on_device(arrays):
        return arrays, _as_they_are
    homes = [(ops, ops.device_of(array)) for ops, array in ((ops_of(array), array) for array in arrays)]
    copies = list(arrays)
    for ops, device in {home for home in homes if home[0].kind != "cpu"}:
        there = [index for index, home in enumerate(homes) if home == (ops, device)]
        for index, copy in zip(there, ops.all_to_host([arrays[index] for index in there]), strict=True):
            copies[index] = copy

    def bring_back(results: list[Array]) -> list[Array]:
        return [
            ops.from_host(result, device) if ops.kind != "cpu" else result
            for (ops, device), result in zip(homes, results, strict=True)
        ]

    return copies, bring_back


def _as_they_are(results: list[Array]) -> list[Array]:
    return results
