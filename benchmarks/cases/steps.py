"""Whole training steps, compared with the same steps written by hand with mpi4py, and their parts."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import numpy as np

import mpidist
from benchmarks.cases.collectives import bare_all_reduce
from benchmarks.measuring.inputs import Array, input_of, sum_of_inputs
from benchmarks.measuring.models import resnet50
from benchmarks.measuring.points import Point
from benchmarks.measuring.rows import ALONE, COPY, IN_CONTEXT, MPI, OURS, Figure
from benchmarks.measuring.session import Session, algorithm_in
from benchmarks.measuring.timing import Case

RUN = "run"
SMALL_COUNTS = (1, 16, 256)
PIXELS, HIDDEN, CLASSES, LOCAL_BATCH = 784, 128, 10, 64
RATE = 0.1
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: mpidist.optimizers.SGD(RATE),
    "Adam": lambda: mpidist.optimizers.Adam(RATE),
}
# Widths of ResNet-50 are divided by this number, so that a step takes milliseconds.
_NARROWER = 4
# Steps before Python calls are counted.
_WARM_UP = 10


def initial_weights() -> list[Array]:
    """Return the weights of a network with one hidden layer, the same on every rank."""
    rng = np.random.default_rng(0)
    shapes = ((PIXELS, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))
    return [(rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32) for shape in shapes]


def narrow_resnet50() -> list[Array]:
    """Return arrays of the shapes of ResNet-50 with a quarter of the widths: 161 arrays, 6 MiB."""
    shapes = [tuple(n // _NARROWER if n >= 64 else n for n in shape) for shape in resnet50()]
    return [np.full(shape, 0.01, np.float32) for shape in shapes]


def batch_of(rank: int) -> tuple[Array, Array]:
    """Return images of shape (batch, pixels) and labels of shape (batch,)."""
    rng = np.random.default_rng([1, rank])
    return rng.random((LOCAL_BATCH, PIXELS), np.float32), rng.integers(0, CLASSES, LOCAL_BATCH)


def loss_and_gradients(
    weights: Sequence[Array], images: Array, labels: Array, global_batch: int
) -> tuple[float, list[Array]]:
    """Return the loss and the gradients of this rank's share of the mean cross entropy."""
    w1, b1, w2, b2 = weights
    hidden = np.maximum(images @ w1 + b1, 0)
    logits = hidden @ w2 + b2
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    error = exponents / exponents.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -float(np.log(error[rows, labels] + 1e-7).sum()) / global_batch
    error[rows, labels] -= 1
    error /= np.float32(global_batch)
    back = (error @ w2.T) * (hidden > 0)
    return loss, [images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]


class _ByHand:
    """The step as a program with NumPy and mpi4py has it.

    Args:
        session: Has the bare communicator.
        weights: Weights, which the step changes.
        optimizer: SGD or Adam.
        communicates: Whether gradients and the loss are summed over ranks.
    """

    def __init__(self, session: Session, weights: list[Array], optimizer: str, communicates: bool = True) -> None:
        self._comm = session.bare if communicates else None
        self._data, self._global_batch = batch_of(session.rank), LOCAL_BATCH * session.ranks
        self.weights, self._optimizer, self._count = weights, optimizer, 0
        self._sums, self._means, self._squares = ([np.zeros_like(w) for w in weights] for _ in range(3))

    def reset(self) -> None:
        for weight, initial in zip(self.weights, initial_weights(), strict=True):
            np.copyto(weight, initial)

    def apply(self, gradients: Sequence[Array]) -> None:
        self._count += 1
        number, t = np.float32, self._count
        rate = number(RATE * math.sqrt(1 - 0.999**t) / (1 - 0.9**t))
        for i, (weight, gradient) in enumerate(zip(self.weights, gradients, strict=True)):
            if self._comm is not None:
                self._comm.Allreduce(gradient, self._sums[i])
                gradient = self._sums[i]
            if self._optimizer == "SGD":
                weight -= number(RATE) * gradient
                continue
            mean, square = self._means[i], self._squares[i]
            mean += number(1 - 0.9) * (gradient - mean)
            square += number(1 - 0.999) * (np.square(gradient) - square)
            weight -= rate * mean / (np.sqrt(square) + number(1e-7))

    def step(self) -> float:
        loss, gradients = loss_and_gradients(self.weights, *self._data, self._global_batch)
        self.apply(gradients)
        return loss if self._comm is None else self._comm.allreduce(loss)


def weights_after_one_step(ranks: int) -> list[Array]:
    """Return what the weights are after one step of SGD from the initial ones on ``ranks`` ranks."""
    weights = initial_weights()
    parts = [loss_and_gradients(weights, *batch_of(rank), LOCAL_BATCH * ranks)[1] for rank in range(ranks)]
    return [w - np.float32(RATE) * sum(part[i] for part in parts) for i, w in enumerate(weights)]


def count_far(results: Sequence[object], expected: Sequence[Array]) -> int:
    """Return how many elements differ by more than the order of a sum can make them differ."""
    return sum(
        int(np.count_nonzero(~np.isclose(np.asarray(result), right, rtol=1e-4, atol=1e-6)))
        for result, right in zip(results, expected, strict=True)
    )


def run_training(session: Session, advance: Callable[[str], None]) -> None:
    """Measure whole steps and their parts (collective)."""
    advance("step")
    strategy = mpidist.MultiWorkerMirroredStrategy(communication_options=session.options, communicator=session.bare)
    for name in OPTIMIZERS:
        _whole_step(session, strategy, name)
        _updates(session, strategy, name, "4 variables", initial_weights())
        _updates(session, strategy, name, "ResNet-50 / 4", narrow_resnet50())
    by_hand = Case(MPI, "a float", lambda: session.bare.allreduce(1.5))
    session.measure("strategy.reduce", [by_hand, Case(OURS, "a float", lambda: strategy.reduce("SUM", 1.5, axis=None))])
    with strategy.scope():
        variable = mpidist.Variable(initial_weights()[0])
    value = variable.numpy()
    target = value.copy()
    cases = [Case(COPY, "np.copyto", lambda: np.copyto(target, value)), Case(OURS, "", lambda: variable.assign(value))]
    session.measure("assign", cases, size=value.nbytes, count=value.size)
    strategy.close()


def _whole_step(session: Session, strategy: mpidist.Strategy, name: str) -> None:
    with strategy.scope():
        variables = [mpidist.Variable(weight) for weight in initial_weights()]
        optimizer = OPTIMIZERS[name]()
    global_batch = LOCAL_BATCH * strategy.num_replicas_in_sync

    def replica(images: Array, labels: Array) -> float:
        loss, gradients = loss_and_gradients([np.asarray(v) for v in variables], images, labels, global_batch)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    def step() -> float:
        return strategy.reduce("SUM", strategy.run(replica, args=data), axis=None)

    def reset() -> None:
        for variable, weight in zip(variables, initial_weights(), strict=True):
            variable.assign(weight)

    def check(weights: Sequence[object]) -> Callable[[object], int] | None:
        # The first step of Adam divides by numbers near 0, where the order of a sum shows.
        return (lambda _: count_far(weights, expected)) if name == "SGD" else None

    data, expected = batch_of(session.rank), weights_after_one_step(session.ranks)
    by_hand = _ByHand(session, initial_weights(), name)
    alone = _ByHand(session, initial_weights(), name, communicates=False)
    cases = [
        Case(MPI, name, by_hand.step, check(by_hand.weights), prepare=by_hand.reset),
        Case(ALONE, name, alone.step),
        Case(OURS, name, step, check(variables), lambda: algorithm_in(strategy), reset),
    ]
    session.measure("step", cases, count=sum(weight.size for weight in expected), op="sum")
    calls = python_calls(step, {replica, step, loss_and_gradients})
    session.figures.append(Figure("step", f"Python calls, {name}", calls, "", algorithm_in(strategy)))


def _updates(session: Session, strategy: mpidist.Strategy, name: str, of: str, weights: list[Array]) -> None:
    with strategy.scope():
        variables = [mpidist.Variable(weight) for weight in weights]
        optimizer = OPTIMIZERS[name]()
    gradients = [np.full_like(weight, 1e-4) for weight in weights]
    by_hand = _ByHand(session, weights, name)

    def update() -> None:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    cases = [
        Case(MPI, f"{name}, {of}", lambda: by_hand.apply(gradients)),
        Case(OURS, f"{name}, {of}", lambda: strategy.run(update), algorithm=lambda: algorithm_in(strategy)),
    ]
    count = sum(weight.size for weight in weights)
    session.measure("apply_gradients", cases, size=4 * count, count=count, op="sum")


def python_calls(step: Callable[[], object], without: set[Callable[..., object]]) -> int:
    """Return the number of Python functions that a step calls, except for those of the program."""
    codes, counts = {function.__code__ for function in without}, list[int]()

    def profile(frame: FrameType, event: str, _: object) -> None:
        counts[-1] += event == "call" and frame.f_code not in codes

    for _ in range(_WARM_UP):
        step()
    gc.disable()
    for _ in range(_WARM_UP):
        counts.append(0)
        sys.setprofile(profile)
        step()
        sys.setprofile(None)
    gc.enable()
    return min(counts)  # a rank that waits polls


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
