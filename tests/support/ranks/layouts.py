"""Layouts that a test of strategies runs in: kind of strategy x local replicas, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

import pytest

import mpidist
from mpidist.core.settings import RANKS_PER_NODE

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Layout:
    """One way to lay replicas out.

    Attributes:
        kind: ``default``, ``one_device``, ``mirrored`` and ``central`` (this process alone), ``mirrored_node`` and
            ``central_node`` (the ranks of the node) or ``multi_worker`` (all ranks).
        local_replicas: Replicas per rank.
    """

    kind: str
    local_replicas: int = 1

    def __str__(self) -> str:
        if self.kind in ("default", "one_device"):
            return self.kind
        return f"{self.kind}-{self.local_replicas}local"

    @contextmanager
    def open(self) -> Iterator[Any]:
        """Build the strategy, close it afterwards.

        Collective: enter and leave it on every rank, in the same order.
        """
        strategy, release = _BUILDERS[self.kind](self)
        try:
            yield strategy
        finally:
            strategy.close()
            release()

    @property
    def devices(self) -> list[str]:
        """The virtual CPU devices of this rank."""
        return [f"cpu:{index}" for index in range(self.local_replicas)]


def _nothing() -> None:
    """Release nothing: the strategy owns all it has."""


def _default(layout: Layout) -> tuple[Any, Callable[[], None]]:
    return mpidist.get_strategy(), _nothing


def _one_device(layout: Layout) -> tuple[Any, Callable[[], None]]:
    return mpidist.OneDeviceStrategy("cpu:0"), _nothing


def _mirrored(layout: Layout) -> tuple[Any, Callable[[], None]]:
    from mpi4py import MPI

    return mpidist.MirroredStrategy(layout.devices, communicator=MPI.COMM_SELF), _nothing


def _mirrored_node(layout: Layout) -> tuple[Any, Callable[[], None]]:
    return _on_node(mpidist.MirroredStrategy, layout)


def _on_node(kind: Callable[..., Any], layout: Layout) -> tuple[Any, Callable[[], None]]:
    from mpi4py import MPI

    node = _node_communicator(MPI.COMM_WORLD)
    if node.size == MPI.COMM_WORLD.size:
        node.Free()
        return kind(layout.devices), _nothing
    # A job of several nodes must say which ranks it means.
    return kind(layout.devices, communicator=node), node.Free


def _central(layout: Layout) -> tuple[Any, Callable[[], None]]:
    from mpi4py import MPI

    return mpidist.experimental.CentralStorageStrategy(layout.devices, communicator=MPI.COMM_SELF), _nothing


def _central_node(layout: Layout) -> tuple[Any, Callable[[], None]]:
    return _on_node(mpidist.experimental.CentralStorageStrategy, layout)


def _multi_worker(layout: Layout) -> tuple[Any, Callable[[], None]]:
    return mpidist.MultiWorkerMirroredStrategy(devices=layout.devices), _nothing


_BUILDERS = {
    "default": _default,
    "one_device": _one_device,
    "mirrored": _mirrored,
    "mirrored_node": _mirrored_node,
    "multi_worker": _multi_worker,
    "central": _central,
    "central_node": _central_node,
}


def _node_communicator(world: MPI.Intracomm) -> MPI.Intracomm:
    """Return the ranks of this node, virtual nodes included; found without the code that is under test."""
    from mpi4py import MPI

    node = cast("MPI.Intracomm", world.Split_type(MPI.COMM_TYPE_SHARED))
    ranks_per_node = RANKS_PER_NODE.read()
    if ranks_per_node is None:
        return node
    virtual = cast("MPI.Intracomm", node.Split(node.rank // ranks_per_node))
    node.Free()
    return virtual


LAYOUTS = (
    Layout("default"),
    Layout("one_device"),
    *(Layout("mirrored", count) for count in (1, 2, 3, 4)),
    *(Layout("mirrored_node", count) for count in (1, 2)),
    *(Layout("multi_worker", count) for count in (1, 2)),
    Layout("central", 3),
    *(Layout("central_node", count) for count in (1, 2)),
)


WITH_COPIES = ("default", "one_device", "mirrored*", "multi_worker*")
"""Patterns of the layouts in which a variable has a copy for each replica, which ON_READ lets differ."""


def is_of_one_process(layout: Layout) -> bool:
    """Whether all replicas of ``layout`` are in this process, or those of other ranks are no news.

    On a job of one node, ``mirrored_node`` is ``multi_worker`` under another name.
    """
    one_node = RANKS_PER_NODE.read() is None
    return layout.kind in ("default", "one_device", "mirrored", "central") or (
        layout.kind == "mirrored_node" and one_node
    )


def layouts(*patterns: str) -> list[Any]:
    """Return the layouts whose ids match one of ``patterns`` (all without any), as pytest parameters.

    ``@pytest.mark.parametrize("strategy", layouts("multi_worker*", "mirrored-*"), indirect=True)`` runs a
    test in some of the layouts; a test that just takes the fixture ``strategy`` runs in all of them.

    Raises:
        ValueError: A pattern matches nothing.
    """
    for pattern in patterns:
        if not any(fnmatchcase(str(layout), pattern) for layout in LAYOUTS):
            raise ValueError(f"no layout matches {pattern!r}; expected one of {list(map(str, LAYOUTS))}")
    chosen = [
        layout for layout in LAYOUTS if not patterns or any(fnmatchcase(str(layout), pattern) for pattern in patterns)
    ]
    return [pytest.param(layout, id=str(layout)) for layout in chosen]


def per_replica(strategy: Any, values: Sequence[Any] | Callable[[int], Any]) -> Any:
    """Return the value whose component on replica i is ``values[i]``, or ``values(i)``, in any layout.

    Collective: call it on every rank, in the same order.

    Args:
        strategy: The strategy whose replicas it is for.
        values: At least ``num_replicas_in_sync`` values by global replica id, the same on every rank, or a
            function of the id.
    """
    if callable(values):
        of_replica = values
    else:
        count = strategy.num_replicas_in_sync
        if len(values) < count:
            raise ValueError(f"{len(values)} values were given; expected one for each of {count} replicas")
        of_replica = values.__getitem__
    return strategy.experimental_distribute_values_from_function(
        lambda context: of_replica(context.replica_id_in_sync_group)
    )
