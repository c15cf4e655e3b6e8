"""A distributed dataset and the agreement of its workers on seeds, steps and spec."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import cached_property

from mpidist.core.context import StrategyLike
from mpidist.core.errors import MismatchError
from mpidist.core.text import said_lines
from mpidist.input.device_feed import fetch_places
from mpidist.input.element_spec import PerReplicaSpec, flatten_spec, map_spec, with_rows
from mpidist.input.graph import UNKNOWN, array_samples, combined
from mpidist.input.input_options import InputOptions
from mpidist.input.input_workers import InputWorkers
from mpidist.input.local_batches import LocalBatches
from mpidist.input.position import (
    Pipeline,
    Position,
    first_position,
    last_batch_size,
    next_beginning,
    pipelines_of,
    seeded_as,
)
from mpidist.input.resuming import Dealing, Remainder

_log = logging.getLogger("mpidist")


@dataclass(eq=False, repr=False)
class Distribution:
    """The common state of all passes over a distributed dataset.

    Args:
        batches: The batches that this worker reads.
        workers: The workers that share the input.
        dealing: The division of the dataset.
        strategy: The strategy of the replicas; None for a dataset of this process alone.
        options: An InputOptions or None.

    Attributes:
        steps: Number of steps of a pass, -1 without end, -2 where each step must ask who has data; this worker's own
            until the workers agree, and equal on all of them from then on.
        spec: That of a local batch, None until one has been seen.
        passes: The number of passes begun.
        places: The targets of the batches of the local replicas; None where they stay.
        buffer_size: Batches that are held ready on each device.
    """

    batches: LocalBatches
    workers: InputWorkers
    dealing: Dealing
    strategy: StrategyLike | None = None
    options: InputOptions | None = None
    spec: object = field(init=False, default=None)
    passes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.steps = self.batches.steps
        self.places = fetch_places(self.workers, self.options)
        self.buffer_size = (self.options or InputOptions()).experimental_per_replica_buffer_size

    @cached_property
    def beginning(self) -> Position:
        """The beginning of the next pass, but for its number.

        It is this worker's own until the workers agree.
        """
        return first_position(self.batches, pipelines_of(self.batches))

    def agree(self, same_everywhere: bool, own_orders: bool = False) -> None:
        """Let all workers agree.

        Collective where several workers meet: one small exchange, or two.

        Args:
            same_everywhere: The graphs must be the same on all workers.
            own_orders: Where they are the same, each worker goes through all of it, in an order of its own.

        Raises:
            MismatchError: They had to be the same and are not; on all workers.
        """
        batches, workers = self.batches, self.workers
        mine = pipelines_of(batches)
        if workers.communicator is None:
            if workers.first_given is not None and not own_orders and any(seeds for _, seeds in mine):
                mine = seeded_as(workers.first_given([seeds for _, seeds in mine]), mine)
                self.beginning = first_position(batches, mine)
            return
        text = " | ".join(f"{node}, {node.cardinality} batches" for node in batches.nodes)
        samples = [sample for node in batches.nodes for sample in array_samples(node)]
        told: list[tuple[str, int, list[Pipeline], int | None, list[int]]] = workers.communicator.all_gather_object(
            (text, batches.steps, mine, last_batch_size(batches), samples)
        )
        same = len({text for text, *_ in told}) == 1
        if same_everywhere and not same:
            plans = {rank: text for rank, (text, *_) in enumerate(told)}
            lines = "\n".join(["", *said_lines(plans.items(), "  ")])
            raise MismatchError(
                "experimental_distribute_dataset() got different datasets on different ranks; expected the same "
                "one everywhere, of which each rank takes its part; for data that each rank has for itself use "
                f"distribute_datasets_from_function(dataset_fn):{lines}",
                plans,
            )
        if same_everywhere and workers.worker_id == 0 and any(samples != told[0][-1] for *_, samples in told):
            _log.warning(
                "mpidist: experimental_distribute_dataset() was given arrays of the same shape with other rows on "
                "other ranks; each rank takes its part of its own, so some rows may be seen twice and others never. "
                "Give the same arrays on all ranks (seed what shuffles or splits them), or use "
                "distribute_datasets_from_function()"
            )
        steps = [count for _, count, *_ in told]
        # Workers that all go through the same elements would do the same work in every step; different graphs may each
        # take a part of one order.
        every = [pipeline for _, _, pipelines, *_ in told for pipeline in pipelines]
        self.beginning = replace(first_position(batches, every, own_orders and same), batch_size=told[0][3])
        self.steps = combined(max, steps)
        if self.steps not in (0, UNKNOWN) and 0 in steps:
            self.learn_spec()

    def learn_spec(self) -> None:
        """Tell every worker the spec of a local batch (collective).

        It comes from the first worker that can tell.
        """
        with self.workers.shared_errors("reading an element to tell what the elements look like"):
            specs = self.batches.local_specs() if self.batches.steps else None
            self.spec = None if specs is None else with_rows(specs[0], None)
        self.gather_spec()

    def gather_spec(self) -> None:
        """Take the spec of the first worker that knows one (collective).

        A spec that is known here already stays.
        """
        assert self.workers.communicator is not None
        told = self.workers.communicator.all_gather_object(self.spec)
        if self.spec is None:
            self.spec = next((spec for spec in told if spec is not None), None)

    def element_spec(self) -> object:
        """Return the nest of PerReplicaSpec of an element.

        It is one of ArraySpec where elements come bare.

        Raises:
            ValueError: This rank's dataset has no element to tell from.
        """
        specs = self.batches.local_specs()
        if specs is None:
            raise ValueError(
                f"{self.batches.nodes[0]} gives no element on this rank, so nothing tells what they look like"
            )
        if not self.workers.wrap:
            return specs[0]
        leaves = zip(*map(flatten_spec, specs), strict=True)
        return map_spec(lambda _: PerReplicaSpec(tuple(next(leaves))), specs[0])

    def next_pass(self) -> Remainder:
        """Return the next pass from its beginning."""
        self.passes += 1
        return Remainder(self.batches, 0, replace(self.beginning, pass_number=self.passes - 1))

    def rest_from(self, state: object) -> Remainder:
        """Return the rest of a pass from a ``state()`` of an iterator on; see ``Dealing.remainder``."""
        return self.dealing.remainder(Position.from_json(state), self.batches, self.steps)

    def continue_from(self, position: Position) -> None:
        """Make ``position``'s pass the one that the next passes follow."""
        self.passes = position.pass_number + 1
        self.beginning = next_beginning(self.beginning, position)

    def __str__(self) -> str:
        first, *more = self.batches.nodes
        return f"{first} and {len(more)} more" if more else str(first)
