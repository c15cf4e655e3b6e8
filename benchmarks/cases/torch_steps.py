"""Steps with DistributedDataParallel over mpidist and over gloo, and of a module under a strategy.

Of DistributedDataParallel also how much of the communication backward hides.

A step is forward and backward. What its communication takes is the time of a step less that of the same step without
any, under ``no_sync``, which are timed in turn: it counts also what DDP, or mpidist.torch.Optimizer, copies into its
buckets and out of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mpidist
from benchmarks.cases.overlap import hidden_share
from benchmarks.measuring.gloo import GlooBeside
from benchmarks.measuring.inputs import Array
from benchmarks.measuring.rows import DDP, GLOO, OF_GLOO, OURS, OVER_DDP, STRATEGY, Figure
from benchmarks.measuring.session import Session
from benchmarks.measuring.timing import Case, Measured, measure
from benchmarks.measuring.torch_models import NETWORKS

LEAST_PAIRS = 30
# DDP makes its buckets anew after the first step, in the order in which gradients are there.
_STEPS_TO_BUCKETS = 3
_SYNC, _NO_SYNC, _ALONE = "with communication", "no_sync", "buckets alone"


class Step:
    """A network and its step over one process group; all ranks make it.

    Args:
        session: Whose ranks.
        name: Of the network.
        group: The process group; None for the default one.
    """

    def __init__(self, session: Session, name: str, group: Any) -> None:
        torch.manual_seed(0)
        module, inputs = NETWORKS[name]()
        self.net, self._inputs = DistributedDataParallel(module, process_group=group), inputs + 0.1 * session.rank
        self.alone()
        self._expected = np.empty_like(self._gradients())
        session.bare.Allreduce(self._gradients(), self._expected)
        self._expected /= session.ranks

    def prepare(self) -> None:
        """Drop the gradients, as optimizers do before a step."""
        self.net.zero_grad()

    def run(self) -> None:
        """Carry the step out."""
        self.net(self._inputs).square().mean().backward()

    def alone(self) -> None:
        """Carry the step out without communication."""
        with self.net.no_sync():
            self.run()

    def count_wrong(self, _: object) -> int:
        """Return how many gradients are not the mean of those of all ranks."""
        largest = np.abs(self._expected).max()
        return int(np.count_nonzero(np.abs(self._gradients() - self._expected) > 1e-3 * largest))

    def _gradients(self) -> Array:
        flat: Array = torch.cat([parameter.grad.view(-1) for parameter in self.net.parameters()]).numpy()
        return flat


class StrategyStep(Step):
    """The same step of an adopted module, whose gradients are summed; all ranks make it.

    Args:
        session: Whose ranks.
        name: Of the network.
    """

    def __init__(self, session: Session, name: str) -> None:
        torch.manual_seed(0)
        module, inputs = NETWORKS[name]()
        self._inputs = inputs + 0.1 * session.rank
        self.strategy = mpidist.MultiWorkerMirroredStrategy(devices=["cpu:0"], communicator=session.bare)
        with self.strategy.scope():
            self.net = mpidist.torch.adopt(module)
            self._optimizer = mpidist.torch.Optimizer(self.net, torch.optim.SGD, lr=1e-3)
        self.alone()
        self._expected = np.empty_like(self._gradients())
        session.bare.Allreduce(self._gradients(), self._expected)

    def prepare(self) -> None:
        """Drop the gradients, as programs do before a step."""
        self._optimizer.zero_grad()

    def run(self) -> None:
        """Carry the step out."""
        self.strategy.run(self._step)

    def _step(self) -> None:
        self._backward()
        self._optimizer.synchronize()

    def _backward(self) -> None:
        # Sums are not added to; how long a step takes is tried without prepare, too.
        self._optimizer.zero_grad()
        self.net(self._inputs).square().mean().backward()

    def alone(self) -> None:
        """Carry the step out without communication."""
        with self._optimizer.no_sync():
            self.strategy.run(self._backward)


def bucket_counts(session: Session, name: str) -> list[int]:
    """Return how many gradients DDP packs into each of its buckets, in the order in which these are reduced."""
    counts: list[int] = []
    step = Step(session, name, None)
    # Without annotations, of which torch accepts only its own.
    step.net.register_comm_hook(counts, lambda counts, bucket: _noted(counts, bucket.buffer()))
    for _ in range(_STEPS_TO_BUCKETS):
        counts.clear()
        step.prepare()
        step.run()
    return counts


def _noted(counts: list[int], buffer: Any) -> Any:
    """Note the size of a bucket, and return a future of it as it is."""
    counts.append(buffer.numel())
    future: Any = torch.futures.Future()
    future.set_result(buffer)
    return future


def cases_of(session: Session, name: str, by: str, group: Any, counts: list[int]) -> list[Case]:
    """Return the cases of one process group: the step with and without communication, and the buckets alone."""
    step = Step(session, name, group)
    for _ in range(_STEPS_TO_BUCKETS):
        step.prepare()
        step.run()
    buckets = [torch.ones(count) for count in counts]

    def reduce_all() -> None:
        for work in [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]:
            work.wait()

    def rewrite() -> None:
        for bucket in buckets:
            bucket.fill_(1)

    same = {"prepare": step.prepare, "rewrite": step.prepare}
    return [
        Case(by, f"{name}, {_SYNC}", step.run, step.count_wrong, **same),
        Case(by, f"{name}, {_NO_SYNC}", step.alone, **same),
        Case(by, f"{name}, {_ALONE}", reduce_all, rewrite=rewrite),
    ]


def cases_of_strategy(step: StrategyStep, name: str) -> list[Case]:
    """Return the cases of a module under a strategy: the step with and without communication."""
    same = {"prepare": step.prepare, "rewrite": step.prepare}
    return [
        Case(STRATEGY, f"{name}, {_SYNC}", step.run, step.count_wrong, **same),
        Case(STRATEGY, f"{name}, {_NO_SYNC}", step.alone, **same),
    ]


def run(session: Session, gloo: GlooBeside, name: str, advance: Callable[[str], None]) -> None:
    """Measure the step of a network over both libraries and under a strategy, in turn (collective)."""
    advance(name)
    counts = bucket_counts(session, name)
    under_strategy = StrategyStep(session, name)
    with gloo.connected(), under_strategy.strategy:
        ours, theirs = cases_of(session, name, OURS, None, counts), cases_of(session, name, GLOO, gloo.group, counts)
        cases = [*ours, *theirs, *cases_of_strategy(under_strategy, name)]
        measured = measure(session.bare, cases, session.seconds, LEAST_PAIRS)
    for one in measured:
        session.add_row(DDP, one.case.variant, one, size=4 * sum(counts), count=sum(counts), op="sum")
    session.figures += figures_of(name, measured[:3], measured[3:6])
    session.figures += figures_of_strategy(name, measured[:2], measured[6:])


def figures_of(name: str, ours: list[Measured], theirs: list[Measured]) -> list[Figure]:
    """Return what the communication of a step takes, how much of gloo's that is, and what backward hides of it.

    Args:
        name: Of the network.
        ours, theirs: Step, step without communication, and buckets alone.
    """
    found, medians = [], []
    for by, (step, without, alone) in ((OURS, ours), (GLOO, theirs)):
        medians.append(_communication(step, without))
        hidden = hidden_share(*(statistics.median(one.times) for one in (alone, without, step)))
        found += [
            Figure(DDP, f"{name}: communication of a step, {by}", medians[-1] * 1e6, "us"),
            Figure(DDP, f"{name}: share hidden behind backward, {by}", hidden, ""),
        ]
    return [*found, Figure(DDP, f"{name}: {OF_GLOO}", medians[0] / medians[1], "x")]


def figures_of_strategy(name: str, ddp: list[Measured], strategy: list[Measured]) -> list[Figure]:
    """Return what the communication of a step takes under a strategy, and how much more that is than DDP's.

    Args:
        name: Of the network.
        ddp, strategy: Step, and step without communication.
    """
    ours, theirs = _communication(*strategy), _communication(*ddp)
    return [
        Figure(DDP, f"{name}: communication of a step, {STRATEGY}", ours * 1e6, "us"),
        Figure(DDP, f"{name}: {OVER_DDP}", (ours - theirs) * 1e6, "us"),
    ]


def _communication(step: Measured, without: Measured) -> float:
    """Return the median seconds that a step takes more than the same one without communication."""
    return statistics.median([both - one for both, one in zip(step.times, without.times, strict=True)])
