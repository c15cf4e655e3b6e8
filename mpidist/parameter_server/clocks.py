"""Clocks: how many steps each worker has done, for strategies that bound how far one may be ahead of the slowest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

# What an answer that is not there yet looks like.
NOT_YET = object()


class Clocks:
    """Counts steps, by strategy and worker.

    Args:
        clients: The ranks of the workers.

    Attributes:
        clients: Those that have neither left nor been lost.
    """

    def __init__(self, clients: Sequence[int]) -> None:
        self.clients = set(clients)
        self._steps: dict[int, dict[int, int]] = {}

    def start(self, strategy: int) -> None:
        """Count the steps of a strategy; those that have not come to it yet hold the others back as well."""
        self._steps.setdefault(strategy, dict.fromkeys(self.clients, 0))

    def tick(self, strategy: int, client: int, most_ahead: int) -> Callable[[], Any]:
        """Count a step of a worker; the answer comes once it is at most so many ahead of the slowest."""
        steps = self._steps[strategy]
        steps[client] = mine = steps[client] + 1
        return lambda: None if mine - min(steps.values(), default=mine) <= most_ahead else NOT_YET

    def stop(self, strategy: int, client: int) -> None:
        """Wait no more for a worker that has closed a strategy."""
        self._steps[strategy].pop(client, None)

    def forget(self, client: int) -> None:
        """Wait no more for a worker that has left or was lost."""
        self.clients.discard(client)
        for steps in self._steps.values():
            steps.pop(client, None)
