"""Reading several variables in one go: those on servers by one message for each server, all servers at once."""

from __future__ import annotations

from collections.abc import Sequence

from mpidist.arrays.convert import Array
from mpidist.parameter_server import messages, remote
from mpidist.parameter_server.connection import Connection, ask_all
from mpidist.parameter_server.messages import Part
from mpidist.values import Variable


def read_all(variables: Sequence[Variable]) -> list[Array]:
    """Return the values of ``variables`` of one strategy in the current context, not to be written.

    >>> [array.tolist() for array in read_all([Variable([1.0]), Variable([2.0])])]
    [[1.0], [2.0]]
    """
    return remote.pull_all(variables) if _are_remote(variables) else [variable.as_array() for variable in variables]


def read_rows(variables: Sequence[Variable], positions: Sequence[Array]) -> list[Array]:
    """Return the rows of each of ``variables`` at its ``positions``, of which nothing else is touched.

    Args:
        variables: Of one strategy.
        positions: For each variable whole numbers from 0 to below the number of its rows, of shape (k,).

    >>> import numpy as np
    >>> [array.tolist() for array in read_rows([Variable([1.0, 2.0])], [np.array([1, 0])])]
    [[2.0, 1.0]]
    """
    if not _are_remote(variables):
        return [variable.sparse_read(rows) for variable, rows in zip(variables, positions, strict=True)]
    requests: dict[Connection, list[Part]] = {}
    places = []
    for variable, rows in zip(variables, positions, strict=True):
        component = remote.component_of(variable)
        parts = requests.setdefault(component.connection, [])
        places.append((component.connection, len(parts)))
        parts.append(component.part(messages.GATHER, rows.astype(messages.INDEX, copy=False), length=len(rows)))
    answers = ask_all(requests)
    return [answers[connection][place] for connection, place in places]


def _are_remote(variables: Sequence[Variable]) -> bool:
    return bool(variables) and isinstance(variables[0].values[0], remote.RemoteComponent)
