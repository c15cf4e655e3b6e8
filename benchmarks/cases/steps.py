"""What happens at every step, through a strategy: an empty ``run``, small sums, a step of a small network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

import mpidist
from benchmarks.cases.collectives import bare_all_reduce
from benchmarks.measuring.inputs import Array, input_of, sum_of_inputs
from benchmarks.measuring.points import Point
from benchmarks.measuring.rows import ALONE, IN_CONTEXT, MPI, OURS
from benchmarks.measuring.session import Session, algorithm_in
from benchmarks.measuring.timing import Case

RUN = "run"
SMALL_COUNTS = (1, 16, 256)
PIXELS, HIDDEN, CLASSES, LOCAL_BATCH = 784, 128, 10, 32
RATE = 0.1


def initial_weights() -> list[Array]:
    """Return the weights of a network with one hidden layer, the same on every rank."""
    rng = np.random.default_rng(0)
    shapes = ((PIXELS, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))
    return [(rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32) for shape in shapes]


def batch_of(rank: int) -> tuple[Array, Array]:
    """Return images of shape (batch, pixels) and labels of shape (batch,)."""
    rng = np.random.default_rng([1, rank])
    return rng.random((LOCAL_BATCH, PIXELS), np.float32), rng.integers(0, CLASSES, LOCAL_BATCH)


def gradients_of(weights: Sequence[Array], images: Array, labels: Array, global_batch: int) -> list[Array]:
    """Return the gradients of this rank's share of the mean cross entropy."""
    w1, b1, w2, b2 = weights
    hidden = np.maximum(images @ w1 + b1, 0)
    logits = hidden @ w2 + b2
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    error = exponents / exponents.sum(axis=1, keepdims=True)
    error[np.arange(len(labels)), labels] -= 1
    error /= np.float32(global_batch)
    back = (error @ w2.T) * (hidden > 0)
    return [images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]


class _ByHand:
    """The step as one would write it with NumPy and, where asked for, mpi4py.

    Args:
        session: Gives the bare communicator.
        communicates: Whether gradients are summed over ranks.
    """

    def __init__(self, session: Session, communicates: bool) -> None:
        self._comm = session.bare if communicates else None
        self._data = batch_of(session.rank)
        self._global_batch = LOCAL_BATCH * session.ranks
        self.weights = initial_weights()
        self._sums = [np.empty_like(weight) for weight in self.weights]

    def reset(self) -> None:
        for weight, initial in zip(self.weights, initial_weights(), strict=True):
            np.copyto(weight, initial)

    def step(self) -> None:
        gradients = gradients_of(self.weights, *self._data, self._global_batch)
        for weight, gradient, total in zip(self.weights, gradients, self._sums, strict=True):
            if self._comm is not None:
                self._comm.Allreduce(gradient, total)
                gradient = total
            weight -= np.float32(RATE) * gradient


def weights_after_one_step(ranks: int) -> list[Array]:
    """Return what the weights are after one step from the initial ones on ``ranks`` ranks."""
    weights = initial_weights()
    parts = [gradients_of(weights, *batch_of(rank), LOCAL_BATCH * ranks) for rank in range(ranks)]
    return [w - np.float32(RATE) * sum(part[i] for part in parts) for i, w in enumerate(weights)]


def count_far(results: Sequence[object], expected: Sequence[Array]) -> int:
    """Return how many elements differ by more than the order of a sum can make them differ."""
    return sum(
        int(np.count_nonzero(~np.isclose(np.asarray(result), right, rtol=1e-4, atol=1e-6)))
        for result, right in zip(results, expected, strict=True)
    )


def run_training(session: Session, advance: Callable[[str], None]) -> None:
    """Measure one step of SGD (collective)."""
    advance("step")
    strategy = mpidist.MultiWorkerMirroredStrategy(communication_options=session.options, communicator=session.bare)
    with strategy.scope():
        variables = [mpidist.Variable(weight) for weight in initial_weights()]
        optimizer = mpidist.optimizers.SGD(RATE)

    def step(images: Array, labels: Array) -> None:
        gradients = gradients_of(
            [np.asarray(v) for v in variables], images, labels, LOCAL_BATCH * strategy.num_replicas_in_sync
        )
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def reset() -> None:
        for variable, weight in zip(variables, initial_weights(), strict=True):
            variable.assign(weight)

    data = batch_of(session.rank)
    expected = weights_after_one_step(session.ranks)
    by_hand, alone = _ByHand(session, communicates=True), _ByHand(session, communicates=False)
    cases = [
        Case(MPI, "by hand", by_hand.step, lambda _: count_far(by_hand.weights, expected), prepare=by_hand.reset),
        Case(ALONE, "no communication", alone.step),
        Case(
            OURS,
            "SGD",
            lambda: strategy.run(step, args=data),
            lambda _: count_far(variables, expected),
            lambda: algorithm_in(strategy),
            reset,
        ),
    ]
    count = sum(weight.size for weight in expected)
    session.measure("step", cases, count=count, op="sum")
    strategy.close()


def run_latency(session: Session, advance: Callable[[str], None]) -> None:
    """Measure an empty ``run`` and small sums in a replica context (collective)."""
    strategy = mpidist.MultiWorkerMirroredStrategy(communication_options=session.options, communicator=session.bare)

    def nothing() -> None:
        return None

    def small_sum(count: int) -> None:
        context = mpidist.get_replica_context()
        assert context is not None
        point = Point(input_of(session.rank, count), sum_of_inputs(session.ranks, count))
        cases = [
            bare_all_reduce(point, "private", session.bare),
            point.case(
                OURS,
                "new",
                partial(partial, context.all_reduce, "SUM"),
                point.check,
                lambda: algorithm_in(strategy),
            ),
        ]
        session.measure(IN_CONTEXT, cases, size=point.out.nbytes, count=count, op="sum")

    advance(RUN)
    session.measure(RUN, [Case(OURS, "empty function", lambda: strategy.run(nothing))])
    for count in SMALL_COUNTS:
        advance(f"{IN_CONTEXT} of {count}")
        strategy.run(small_sum, args=(count,))
    strategy.close()
