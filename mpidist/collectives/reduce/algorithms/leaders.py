"""All-reduce of small data over nodes, in one exchange of their first ranks.

It goes with the meeting of the ranks. The node's core does it; see ``mpidist/native/leaders.c``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.core import SMALL_BETWEEN_NODES, Core
from mpidist.collectives.node.node import Node
from mpidist.collectives.node.packing import PackedReduction
from mpidist.collectives.reduce.cost_model import halved_from
from mpidist.collectives.reduce.registry import Algorithm, AlgorithmEntry, Site, host_algorithms
from mpidist.core.errors import AlgorithmError


class Leaders(Algorithm):
    """An all-reduce by recursive doubling or halving among the leaders of the nodes.

    Args:
        core: Of this rank's node.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    @classmethod
    def made(cls, site: Site) -> Steps[Leaders]:
        """Return a new one (collective).

        Raises:
            AlgorithmError: Shared memory has no room; on all ranks.
        """
        core = site.node.core
        assert core is not None, "where there is none another algorithm stands for this one"
        if not (yield from site.node.make_room(site.comm)):
            raise AlgorithmError(
                "algorithm 'leaders' found no room in /dev/shm on every node; make it larger (docker run "
                "--shm-size=1g) or leave algorithm out"
            )
        if site.node.rank == 0:
            core.halve_from(halved_from(len(site.node.ranks), site.between_nodes))
        return cls(core)

    def start(self, job: PackedReduction) -> Callable[[int], None] | None:
        """See ``Algorithm``: small data go with the meeting."""
        return partial(self._begin_whole, job) if job.nbytes <= SMALL_BETWEEN_NODES else None

    def all_reduce(self, job: PackedReduction) -> Steps[list[Array]]:
        """See ``Algorithm``."""
        targets = job.targets() if job.is_wanted else []
        if job.nbytes > SMALL_BETWEEN_NODES:
            per_part = SMALL_BETWEEN_NODES // job.dtype.itemsize
            for number, piece in enumerate(job.pieces):
                for start in range(0, piece.size, per_part):
                    part = slice(start, start + per_part)
                    self._begin(job, [piece[part]], [target[part] for target in targets[number : number + 1]], 0)
                    yield from self._core.go_on()
        elif not job.has_begun:
            self._begin_whole(job, 0)
            yield from self._core.go_on()
        return targets

    def _begin_whole(self, job: PackedReduction, identity: int) -> None:
        job.has_begun = True
        self._begin(job, job.pieces, job.targets() if job.is_wanted else [], identity)

    def _begin(self, job: PackedReduction, inputs: list[Array], outs: list[Array], identity: int) -> None:
        self._core.reduce(
            identity,
            job.op,
            job.dtype,
            [inputs],
            outs,
            divisor=job.divisor,
            is_wanted=job.is_wanted,
            over_nodes=True,
        )


def _standing_for(node: Node) -> str:
    """Return the algorithm that does its work on a node, if not itself."""
    if node.is_alone:
        return "hierarchical"
    return "mpi" if node.core is None else "leaders"


host_algorithms.register(
    AlgorithmEntry(
        "leaders",
        Leaders.made,
        ("several_nodes",),
        ("several_nodes",),
        tuned_to=SMALL_BETWEEN_NODES,
        stands_for=_standing_for,
    )
)
