"""The same losses and weights in every layout of replicas, and after a job was killed and resumed on other ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.ranks import jobs, pool
from tests.support.ranks.programs import run_program

for _module in ("jax", "optax"):
    pytest.importorskip(_module, reason=f"{_module} is missing: pip install '.[jax]' optax")

pytestmark = [pytest.mark.jax, pytest.mark.one_rank, pytest.mark.jobs, pytest.mark.timeout(300)]

EXAMPLE = jobs.ROOT / "examples" / "jax_optax.py"


def trained(replicas: tuple[int, ...] | None, optimizer_name: str, dtype: str, is_jitted: bool) -> list[Any]:
    """Return losses and weights after 20 steps.

    Args:
        replicas: How many each rank has; None for plain JAX on whole batches.
        optimizer_name: Of optax.
        dtype: To compute in.
        is_jitted: Whether the whole step is one jitted function, with the all-reduce in it.
    """
    import jax
    import numpy as np
    import optax

    import mpidist
    import mpidist.jax

    # The last batch of each pass has four rows, which no layout deals evenly over three replicas.
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(46, 5)).astype(dtype)
    targets = np.sin(rows.sum(1, keepdims=True))
    optimizer = getattr(optax, optimizer_name)(0.05)

    def loss(params: Any, batch: Any, count: Any) -> Any:
        hidden = jax.numpy.tanh(batch[0] @ params["w1"] + params["b1"])
        return ((hidden @ params["w2"] - batch[1]) ** 2).sum() / count

    def step(params: Any, state: Any, batch: Any, count: Any) -> Any:
        found = jax.value_and_grad(loss)(params, batch, count)
        value, gradient = found if replicas is None else mpidist.jax.all_reduce("SUM", found)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    def replica_step(params: Any, state: Any, batch: Any) -> Any:
        return fast(params, state, batch, mpidist.global_count(batch[0]))

    def first(value: Any) -> Any:
        return jax.tree.map(lambda leaf: strategy.experimental_local_results(leaf)[0], value)

    # A block with jax.enable_x64() would count in this thread alone, and not in those of several replicas.
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", dtype == "float64")
    try:
        fast = jax.jit(step) if is_jitted else step
        params = {
            "w1": jax.numpy.asarray(rng.normal(size=(5, 8)).astype(dtype)),
            "b1": jax.numpy.zeros(8, dtype),
            "w2": jax.numpy.asarray(rng.normal(size=(8, 1)).astype(dtype)),
        }
        state, losses = optimizer.init(params), []
        if replicas is None:
            for index in range(20):
                start = index % 7 * 7
                batch = (rows[start : start + 7], targets[start : start + 7])
                params, state, value = fast(params, state, batch, len(batch[0]))
                losses.append(float(value))
        else:
            devices = [f"cpu:{i}" for i in range(replicas[mpidist.rank()])]
            with mpidist.MultiWorkerMirroredStrategy(devices=devices) as strategy:
                dataset = mpidist.Dataset.from_tensor_slices((rows, targets)).batch(7).repeat().take(20)
                for batch in strategy.experimental_distribute_dataset(dataset):
                    params, state, value = first(strategy.run(replica_step, (params, state, batch)))
                    losses.append(float(value))
        return [losses, *map(np.asarray, jax.tree.leaves(params))]
    finally:
        jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "exactness"),
    [("sgd", "float32", 1e-5), ("sgd", "float64", 1e-12), ("adam", "float64", 1e-9)],
)
@pytest.mark.parametrize("replicas", [(1,), (2,), (1, 1), (3,), (1, 1, 1), (2, 1)], ids=str)
def test_layouts(replicas: tuple[int, ...], optimizer: str, dtype: str, exactness: float) -> None:
    (expected,) = pool.run(trained, 1, None, optimizer, dtype, True)
    for is_jitted in [False, True] if max(replicas) == 1 else [False]:
        for found in pool.run(trained, len(replicas), replicas, optimizer, dtype, is_jitted):
            for mine, alone in zip(found, expected, strict=True):
                scale = np.abs(alone).max()
                np.testing.assert_allclose(mine, alone, rtol=0, atol=exactness * scale)


def example(ranks: int, out: Path, *arguments: str) -> str:
    done = run_program(EXAMPLE, ranks, "--out", str(out), "--epochs", "3", *arguments, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def figures(output: str) -> list[list[float]]:
    """Epoch, loss, and how many percent of the images were read right, each time that it was said."""
    found = re.findall(r"epoch (\d+): loss ([\d.]+), ([\d.]+) %", output)
    return [list(map(float, each)) for each in found]


def weights_of(out: Path) -> dict[str, Any]:
    """The newest weights of a run of the example."""
    import jax

    import mpidist

    params = {"w1": (64, 128), "b1": 128, "w2": (128, 10), "b2": 10}
    state = {"params": {name: jax.numpy.zeros(shape) for name, shape in params.items()}}
    mpidist.Checkpoint(state=state).restore(mpidist.latest_checkpoint(out)).expect_partial()
    return {name: np.asarray(array) for name, array in state["params"].items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[float]], dict[str, Any]]:
    """What the example says and comes to in one process."""
    out = tmp_path_factory.mktemp("alone")
    return figures(example(1, out)), weights_of(out)


def test_the_example_learns_in_one_process(alone: Any) -> None:
    assert len(alone[0]) == 3
    assert alone[0][-1][2] > 90


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (3, 1), (1, 3)])
def test_the_example_comes_to_the_same(alone: Any, ranks: int, replicas: int, tmp_path: Path) -> None:
    found = figures(example(ranks, tmp_path, "--replicas", str(replicas)))
    np.testing.assert_allclose(found, alone[0], rtol=0.01)
    for name, weights in weights_of(tmp_path).items():
        np.testing.assert_allclose(weights, alone[1][name], rtol=0, atol=1e-5)


# The example up to where rank 1 is killed, in the middle of the second epoch.
KILLED = """
import os, runpy, signal, sys

import mpidist

save, before = mpidist.CheckpointManager.save, []

def save_and_die(manager, *arguments, **options):
    save(manager, *arguments, **options)
    before.append(manager)
    if len(before) == 3 and mpidist.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

mpidist.CheckpointManager.save = save_and_die
sys.argv[0] = {path!r}
runpy.run_path({path!r}, run_name="__main__")
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_example_that_is_resumed(alone: Any, ranks: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(path=str(EXAMPLE)))
    killed = jobs.run_script(script, 2, "--out", str(out), "--epochs", "3", timeout=120)
    assert killed.returncode not in (0, None), killed.stdout
    assert "epoch 3" not in killed.stdout
    printed = example(ranks, out, "--resume")
    assert "going on after step 60" in printed
    np.testing.assert_allclose(figures(printed)[-1], alone[0][-1], rtol=0.01)
    found = weights_of(out)
    if ranks == 2:
        whole = tmp_path / "whole"
        example(2, whole)
        assert all((found[name] == weights).all() for name, weights in weights_of(whole).items())
    for name, weights in found.items():
        np.testing.assert_allclose(weights, alone[1][name], rtol=0, atol=1e-5)
