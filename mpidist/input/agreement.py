"""What workers agree on when a dataset is distributed: seeds, number of steps, what elements look like."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mpidist.core.errors import MismatchError
from mpidist.input.element_spec import with_rows
from mpidist.input.local_batches import LocalBatches, longest
from mpidist.input.reordering import Shuffle


@dataclass
class Agreement:
    """The result, equal on all workers.

    Args:
        steps: Number of steps of a pass, -1 without end, -2 where each step must ask who has data.
        seeds: What stands in for the seeds of shuffles that were given none.
        spec: What a local batch looks like, None until one has been seen.
    """

    steps: int
    seeds: dict[Shuffle, tuple[int, ...]] = field(default_factory=dict)
    spec: Any = None


def agree(batches: LocalBatches, same_everywhere: bool) -> Agreement:
    """Return what all workers agree on (collective where there are several: one small exchange, or two).

    Args:
        batches: What this worker reads.
        same_everywhere: The pipelines must be the same on all workers.

    Raises:
        MismatchError: They had to be the same and are not; on all workers.
    """
    communicator = batches.workers.communicator
    if communicator is None:
        return Agreement(batches.steps)
    text = " | ".join(f"{node}, {node.cardinality} batches" for node in batches.nodes)
    drawn = _drawn_seeds(batches)
    told: list[tuple[str, int, list[int]]] = communicator.all_gather_object((text, batches.steps, list(drawn.values())))
    if same_everywhere and len({text for text, _, _ in told}) > 1:
        plans = {rank: text for rank, (text, _, _) in enumerate(told)}
        lines = "".join(f"\n  rank {rank}: {text}" for rank, text in plans.items())
        raise MismatchError(
            "experimental_distribute_dataset() got different datasets on different ranks; expected the same "
            "one everywhere, of which each rank takes its part; for data that each rank has for itself use "
            f"distribute_datasets_from_function(dataset_fn):{lines}",
            plans,
        )
    steps = [count for _, count, _ in told]
    # All shuffle as the first worker does, which is also what a single process would do.
    seeds: dict[Shuffle, tuple[int, ...]] = {shuffle: (seed,) for shuffle, seed in zip(drawn, told[0][2], strict=False)}
    result = Agreement(longest(steps), seeds)
    if result.steps > 0 and 0 in steps:
        result.spec = gather_spec(batches, _first_spec(batches) if batches.steps else None)
    return result


def _drawn_seeds(batches: LocalBatches) -> dict[Shuffle, int]:
    """Return the seeds of the shuffles that were given none by the user."""
    return {shuffle: shuffle.seed for node in batches.nodes for shuffle in node.shuffles() if not shuffle.given}


def _first_spec(batches: LocalBatches) -> Any:
    with batches.workers.shared_errors("reading an element to tell what the elements look like"):
        specs = batches.local_specs()
        return None if specs is None else with_rows(specs[0], None)


def gather_spec(batches: LocalBatches, own: Any) -> Any:
    """Return ``own``, or the spec of the first worker that knows one (collective)."""
    assert batches.workers.communicator is not None
    told = batches.workers.communicator.all_gather_object(own)
    return own if own is not None else next((spec for spec in told if spec is not None), None)
