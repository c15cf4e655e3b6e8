"""What communication costs a step of Keras and one of DDP over mpidist: `mpirun -n 2 python -m benchmarks keras`.

A step less the same one without communication, all four in turns; half a minute. KERAS_BACKEND says of which backend.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import mpidist
from mpidist.core.text import pip_install

# Widths of layers, rows on each rank, and how many rounds are timed.
_NETWORKS = {
    "3 layers of 60 units, batch 1": ([10, 60, 60, 1], 1, 100),
    "4 layers of 1000 units, batch 32": ([1000] * 5, 32, 30),
}
_STEPS_BEFORE = 6
Steps = dict[str, Callable[[], object]]


def main(arguments: list[str]) -> int:
    """Measure on every rank, print on rank 0 (collective).

    Returns:
        2 without Keras and PyTorch.
    """
    argparse.ArgumentParser(prog="python -m benchmarks keras", description=__doc__).parse_args(arguments)
    if any(importlib.util.find_spec(name) is None for name in ("keras", "torch")):
        print(
            f"python -m benchmarks keras: needs Keras and PyTorch; type: {pip_install('keras')} torch", file=sys.stderr
        )
        return 2
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("mpidist")
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        for name, (widths, rows, rounds) in _NETWORKS.items():
            inputs, targets = (np.random.rand(rows, width).astype("float32") for width in (widths[0], widths[-1]))
            steps = _ddp_steps(widths, inputs, targets) | _keras_steps(strategy, widths, inputs, targets)
            times = _timed(steps, rounds)
            if mpidist.rank() == 0:
                costs = {kind: np.median(times[kind] - times[f"{kind} alone"]) for kind in ("Keras", "DDP")}
                told = ", ".join(f"{kind} {1e3 * cost:.2f} ms" for kind, cost in costs.items())
                alone = f"{1e3 * np.median(times['Keras alone']):.2f} ms"
                print(f"{keras.backend.backend()}, {mpidist.size()} ranks, {name}: {told}; a step alone {alone}")
    torch.distributed.destroy_process_group()
    return 0


def _timed(steps: Steps, rounds: int) -> dict[str, Any]:
    """Return the seconds of each step in each round."""
    import torch.distributed as dist

    names, times = list(steps), {name: np.empty(rounds) for name in steps}
    for name in names:
        for _ in range(_STEPS_BEFORE):
            steps[name]()
    for number in range(rounds):
        first = number % len(names)
        order = [*names[first:], *names[:first]]
        for name in order if number % 2 else order[::-1]:
            dist.barrier()
            begin = time.perf_counter()
            steps[name]()
            times[name][number] = time.perf_counter() - begin
    return times


def _ddp_steps(widths: list[int], inputs: Any, targets: Any) -> Steps:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    layers = [
        layer
        for width, units in itertools.pairwise(widths)
        for layer in (torch.nn.Linear(width, units), torch.nn.Tanh())
    ]
    net = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    x, y = torch.tensor(inputs), torch.tensor(targets)

    def step() -> None:
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()

    def alone() -> None:
        with net.no_sync():
            step()

    return {"DDP": step, "DDP alone": alone}


def _keras_steps(strategy: mpidist.Strategy, widths: list[int], inputs: Any, targets: Any) -> Steps:
    """Return the steps of an adopted model, and of one of Keras alone."""
    import keras

    import mpidist.keras

    def network(batch_size: int, is_adopted: bool) -> Callable[[], object]:
        layers = [keras.layers.Dense(units, activation="tanh") for units in widths[1:]]
        model = keras.Sequential([keras.Input((widths[0],)), *layers])
        if is_adopted:
            with strategy.scope():
                mpidist.keras.adopt(model)
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        x, y = (np.resize(array, (batch_size, array.shape[1])) for array in (inputs, targets))
        model.fit(x, y, batch_size=batch_size, verbose=0)
        return _step_of(model, inputs, targets)

    rows = len(inputs)
    return {"Keras": network(rows * mpidist.size(), True), "Keras alone": network(rows, False)}


def _step_of(model: Any, inputs: Any, targets: Any) -> Callable[[], object]:
    """Return a step as fit() has made it."""
    import keras

    if keras.backend.backend() == "torch":
        data = (keras.ops.convert_to_tensor(inputs), keras.ops.convert_to_tensor(targets))
        return lambda: model.train_function([data])
    import jax

    kinds = (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)
    state = [tuple([variable.value for variable in kind] for kind in (*kinds, model.metrics_variables))]

    def step() -> None:
        _, state[0] = model.train_function(state[0], iter([(inputs, targets)]))
        jax.block_until_ready(state[0])

    return step
