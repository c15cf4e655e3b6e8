"""Trains a network on handwritten digits with JAX and optax, on one process or many.

    python examples/jax_optax.py                          one process
    mpirun -n 4 python examples/jax_optax.py              four ranks
    python examples/jax_optax.py --replicas 3             three replicas in one process
    mpirun -n 4 python examples/jax_optax.py --resume     from the newest checkpoint, whatever number of ranks wrote it

Two jitted functions, and a sum of the gradients over all replicas between them. The last batch of an epoch is smaller,
and may be dealt unevenly: each replica divides by the size of the whole batch. It needs JAX and optax:
pip install jax optax.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpidist
import mpidist.jax

# See examples/train.py for where they are from.
DIGITS = Path(__file__).with_name("digits.npz")
TEST_IMAGES = 360

Params = dict[str, jax.Array]


def load_data() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the digits to train with and those to test with."""
    with np.load(DIGITS) as digits:
        images, labels = (digits["images"] / 16.0).astype(np.float32), digits["labels"].astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[TEST_IMAGES:], order[:TEST_IMAGES]
    return {"image": images[train], "label": labels[train]}, {"image": images[test], "label": labels[test]}


def init(key: jax.Array) -> Params:
    first, second = jax.random.split(key)
    he = jax.nn.initializers.he_normal()
    return {"w1": he(first, (64, 128)), "b1": jnp.zeros(128), "w2": he(second, (128, 10)), "b2": jnp.zeros(10)}


def scores(params: Params, images: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(images @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def loss(params: Params, batch: dict[str, jax.Array], batch_size: int) -> jax.Array:
    """Return this replica's part of the mean over the batch of all."""
    losses = optax.softmax_cross_entropy_with_integer_labels(scores(params, batch["image"]), batch["label"])
    part: jax.Array = losses.sum() / batch_size
    return part


loss_and_gradient = jax.jit(jax.value_and_grad(loss))
optimizer = optax.adam(1e-3)


@jax.jit
def update(params: Params, opt_state: optax.OptState, gradient: Params) -> tuple[Params, optax.OptState]:
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


@jax.jit
def share_right(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
    return (scores(params, batch["image"]).argmax(1) == batch["label"]).mean()


def step(params: Params, batch: dict[str, Any]) -> tuple[jax.Array, Params]:
    """Return loss and gradient of the whole batch; runs on each replica with its part of it."""
    value, gradient = loss_and_gradient(params, batch, mpidist.global_count(batch["label"]))
    return mpidist.jax.all_reduce("SUM", (value, gradient))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1, help="of each rank (default: 1)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="of all replicas together (default: 32)")
    parser.add_argument("--steps-per-save", type=int, default=20)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument("--out", type=Path, default=Path("out/jax"), help="checkpoints (default: out/jax)")
    arguments = parser.parse_args()

    devices = [f"cpu:{i}" for i in range(arguments.replicas)]
    # In its scope the ranks save and restore together.
    with mpidist.MultiWorkerMirroredStrategy(devices=devices) as strategy, strategy.scope():
        train(strategy, arguments)


def train(strategy: mpidist.Strategy, arguments: argparse.Namespace) -> None:
    train_data, test_data = load_data()
    dataset = mpidist.Dataset.from_tensor_slices(train_data).shuffle(seed=1).batch(arguments.batch_size)
    batches = iter(strategy.experimental_distribute_dataset(dataset.repeat(arguments.epochs)))
    params = init(jax.random.key(0))
    # JAX's arrays never change: what a checkpoint restores takes their place in this dict.
    state: dict[str, Any] = {"params": params, "opt_state": optimizer.init(params), "step": 0}
    manager = mpidist.CheckpointManager(mpidist.Checkpoint(state=state, batches=batches), arguments.out, max_to_keep=2)
    if arguments.resume and manager.restore_or_initialize() and mpidist.rank() == 0:
        print(f"going on after step {state['step']}")
    steps_per_epoch = -(-len(train_data["label"]) // arguments.batch_size)
    for batch in batches:
        value, gradient = first_of(strategy, strategy.run(step, (state["params"], batch)))
        state["params"], state["opt_state"] = update(state["params"], state["opt_state"], gradient)
        state["step"] += 1
        if state["step"] % arguments.steps_per_save == 0:
            manager.save()
        if state["step"] % steps_per_epoch == 0 and mpidist.rank() == 0:
            right = 100 * float(share_right(state["params"], test_data))
            epoch = state["step"] // steps_per_epoch
            print(f"epoch {epoch}: loss {value:.4f}, {right:.1f} % of the test images are right")
    manager.save()


def first_of(strategy: mpidist.Strategy, value: Any) -> Any:
    """Return the first of the values that are the same on all replicas."""
    return jax.tree.map(lambda leaf: strategy.experimental_local_results(leaf)[0], value)


if __name__ == "__main__":
    main()
