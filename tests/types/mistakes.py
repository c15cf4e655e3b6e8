"""Mistakes that a type checker is to find, each in a line that says so, and in no other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import mpidist


def step(inputs: NDArray[np.float64]) -> np.float64:
    context = mpidist.get_replica_context()
    context.all_reduce("SUM", inputs)  # wrong: it is None in cross-replica context
    assert context is not None
    context.all_reduce_("SUM", inputs)  # wrong
    text: str = context.all_reduce("SUM", inputs)  # wrong
    print(text)
    return np.float64(inputs.sum())


def program(strategy: mpidist.Strategy) -> None:
    mpidist.Variable(1.0, nmae="weights")  # wrong
    variable = mpidist.Variable(1.0, name="weights")
    variable.assign_ad(1.0)  # wrong
    variable.assign_add(1.0).asign(2.0)  # wrong
    loss = strategy.run(step, args=(np.ones(2),))
    loss.append(1.0)  # wrong
    strategy.reduce("SUM", loss, axis="batch")  # wrong
    strategy.reduce("SUM", loss)  # wrong
    strategy.run(step, arguments=())  # wrong
    for number in mpidist.Dataset.range(3).map(str):
        number + 1  # wrong
    mpidist.Dataset.range("3")  # wrong
    mpidist.metrics.Mean().result().upper()  # wrong
    mpidist.MirroredStrategie()  # wrong
    print(mpidist.Checkpoint(variable=variable).save("out") + 1)  # wrong
