"""Warning for elements of a plain dataset that reach ``run`` on several ranks.

All ranks then do the same work. Only the first element of a pass is compared, by identity, so that later steps cost
nothing.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from itertools import chain

import numpy as np

from mpidist.core import nest
from mpidist.input.input_options import InputWorkers
from mpidist.input.nodes import GraphNode
from mpidist.input.steps import Shard

_log = logging.getLogger("mpidist")


class FirstElementWatch:
    """The first element of the latest pass over a plain dataset.

    Attributes:
        pending: Whether the next ``run`` must be compared with it.
    """

    def __init__(self) -> None:
        self.pending = False
        self._has_warned = False
        self._text = ""
        self._arrays: list[weakref.ref[object]] = []

    def over(self, node: GraphNode, elements: Iterator[object]) -> Iterator[object]:
        """Return ``elements``, a pass over ``node``, and remember the first one. A graph with a shard is correct."""
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
        """Warn once, on the first worker, if an array of the element is among ``arguments``."""
        self.pending = False
        whole = {id(array) for array in (ref() for ref in self._arrays) if array is not None}
        if self._has_warned or whole.isdisjoint(map(id, nest.flatten(arguments))):
            return
        self._has_warned = True
        if workers.worker_id == 0:
            _log.warning(
                "mpidist: run() was given an element of %s, which each of the %d ranks reads by itself. If they "
                "all have the same data, every row counts %d times. Use strategy.experimental_distribute_dataset("
                "dataset), which gives each rank its part. If each rank has its own data, or must read all of it, use "
                "strategy.distribute_datasets_from_function(lambda context: dataset)",
                *(self._text, workers.num_workers, workers.num_workers),
            )


watch = FirstElementWatch()
