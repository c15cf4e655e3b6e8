"""Elements of a plain dataset that reach ``run`` on several ranks.

All ranks then do the same work. Looked at is the first element of a pass, so that no step after it costs anything; and
arrays are told by identity, so that whoever cuts an element by hand is left alone.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from itertools import chain

import numpy as np

from mpidist.core import nest
from mpidist.input.choosing import Shard
from mpidist.input.graph import GraphNode
from mpidist.input.input_workers import InputWorkers

_log = logging.getLogger("mpidist")


class FirstElementWatch:
    """The first element of the latest pass over a plain dataset.

    It is held until ``run`` has been called with it.

    Attributes:
        pending: Whether there is an element that no ``run`` has been compared with.
    """

    def __init__(self) -> None:
        self.pending = False
        self._has_warned = False
        self._text = ""
        self._arrays: list[weakref.ref[object]] = []

    def over(self, node: GraphNode, elements: Iterator[object]) -> Iterator[object]:
        """Return ``elements``, a pass over ``node``, and remember the first one.

        A graph with a shard in it is left alone.
        """
        if self._has_warned or any(isinstance(step, Shard) for step in node.graph()):
            return elements
        return chain(self._first(node, elements), elements)

    def _first(self, node: GraphNode, elements: Iterator[object]) -> Iterator[object]:
        for element in elements:
            self._arrays = [weakref.ref(leaf) for leaf in nest.flatten(element) if isinstance(leaf, np.ndarray)]
            self._text, self.pending = str(node), True
            yield element
            return

    def look_at(self, arguments: object, workers: InputWorkers) -> None:
        """Warn once if an array of the element is among ``arguments``.

        Only the first of several workers does.
        """
        self.pending = False
        whole = {id(array) for array in (ref() for ref in self._arrays) if array is not None}
        if self._has_warned or whole.isdisjoint(map(id, nest.flatten(arguments))):
            return
        self._has_warned = True
        if workers.worker_id == 0:
            _log.warning(
                "mpidist: run() was given an element of %s, which each of the %d ranks goes through by itself; if they "
                "all have the same data, every row counts %d times. Expected: strategy.experimental_distribute_dataset("
                "dataset), which gives each rank its part; where each rank has data of its own, or is meant to go "
                "through all of it, strategy.distribute_datasets_from_function(lambda context: dataset)",
                *(self._text, workers.num_workers, workers.num_workers),
            )


watch = FirstElementWatch()
