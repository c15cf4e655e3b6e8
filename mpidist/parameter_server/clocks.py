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
        self._paused: set[tuple[int, int]] = set()
        self._closed: set[tuple[int, int]] = set()

    def start(self, strategy: int) -> None:
        """Count the steps of a strategy; those that have not come to it yet hold the others back as well."""
        self._steps.setdefault(strategy, dict.fromkeys(self.clients, 0))

    def tick(self, strategy: int, client: int, most_ahead: int) -> Callable[[], Any]:
        """Count a step of a worker; the answer comes once it is at most so many ahead of the slowest."""
        steps = self._steps[strategy]
        steps[client] = mine = steps[client] + 1

        def answer() -> Any:
            others = (count for other, count in steps.items() if (strategy, other) not in self._paused)
            return None if mine - min(others, default=mine) <= most_ahead else NOT_YET

        return answer

    def pause(self, strategy: int, client: int) -> None:
        """Wait no more for a worker until its strategy's workers have met: it waits for the others itself."""
        self._paused.add((strategy, client))

    def even_out(self, strategy: int) -> None:
        """Note that the workers of a strategy have met: none is ahead of another."""
        for other in [paused for paused in self._paused if paused[0] == strategy]:
            self._paused.remove(other)
        steps = self._steps.get(strategy, {})
        steps.update(dict.fromkeys(steps, max(steps.values(), default=0)))

    def close(self, strategy: int, client: int) -> None:
        """Wait no more for a worker that has closed a strategy."""
        self._closed.add((strategy, client))
        self._steps.get(strategy, {}).pop(client, None)

    def workers_of(self, strategy: int) -> set[int]:
        """Return the workers that have neither closed a strategy nor left."""
        return {client for client in self.clients if (strategy, client) not in self._closed}

    def forget(self, client: int) -> None:
        """Wait no more for a worker that has left or was lost."""
        self.clients.discard(client)
        for steps in self._steps.values():
            steps.pop(client, None)
