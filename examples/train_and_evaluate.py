"""Trains the network of train.py on all ranks but one, which evaluates the newest checkpoint meanwhile.

    mpirun -n 4 python examples/train_and_evaluate.py                                  three ranks train, one evaluates
    MPIDIST_JOBS=chief:1,worker:6,evaluator:1 mpirun -n 8 python examples/train_and_evaluate.py
    MPIDIST_JOBS=worker:4 mpirun -n 4 python examples/train_and_evaluate.py            no evaluator: rank 0 evaluates

It goes on from the newest checkpoint in --out. Every evaluation is a line in eval/metrics.jsonl there.
"""

import argparse
import os
from pathlib import Path

from train import Floats, Ints, Network, check_out, load_data

import mpidist
from mpidist.cluster_resolver import MPIClusterResolver


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks that train together (default: 32)")
    parser.add_argument("--throttle", type=float, default=0.0, help="seconds between evaluations (default: 0)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out"), help="checkpoints and evaluations (default: out/)")
    return parser.parse_args()


def make_resolver() -> MPIClusterResolver:
    """Return who is who: as MPIDIST_JOBS says, or the last rank evaluates."""
    ranks = MPIClusterResolver().size
    if "MPIDIST_JOBS" in os.environ or ranks == 1:
        return MPIClusterResolver()
    return MPIClusterResolver(jobs={"worker": ranks - 1, "evaluator": 1})


class Training:
    """The network, its optimizer, and how far they are."""

    def __init__(self, strategy: mpidist.Strategy, seed: int) -> None:
        with strategy.scope():
            self.network = Network(seed)
            self.optimizer = mpidist.optimizers.SGD(learning_rate=0.1, momentum=0.9, nesterov=True)
            self.optimizer.build(self.network.variables.values())
        self.checkpoint = mpidist.Checkpoint(weights=self.network.variables, optimizer=self.optimizer, epoch=0)

    def step(self, images: Floats, labels: Ints) -> None:
        """Do a training step on this replica's part of a batch."""
        batch_size = mpidist.global_count(images)
        _, _, gradients = self.network.losses_and_gradients(images, labels, batch_size)
        self.optimizer.apply_gradients(zip(gradients, self.network.variables.values(), strict=True))


def train(context: mpidist.TrainContext, arguments: argparse.Namespace) -> None:
    """Train on the ranks that train, from the newest checkpoint; max_steps are epochs here."""
    data, _ = load_data()
    with mpidist.MultiWorkerMirroredStrategy(context.cluster_resolver) as strategy:
        if context.is_chief:
            print(f"{strategy.num_replicas_in_sync} replica(s) train")
        training = Training(strategy, arguments.seed)
        checkpoint = training.checkpoint
        manager = mpidist.CheckpointManager(checkpoint, context.checkpoint_dir, max_to_keep=5)
        manager.restore_or_initialize()
        while checkpoint.epoch < context.max_steps:
            batches = (
                mpidist.Dataset.from_tensor_slices(data)
                .shuffle(seed=arguments.seed * 1_000_000 + checkpoint.epoch)
                .batch(arguments.batch_size)
            )
            for images, labels in strategy.experimental_distribute_dataset(batches):
                strategy.run(training.step, args=(images, labels))
            checkpoint.epoch += 1
            manager.save()
            context.evaluate()  # does something where there is no evaluator


def evaluate(path: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Return loss and accuracy on the test data: on one rank, with the weights of a checkpoint."""
    _, (images, labels) = load_data()
    training = Training(mpidist.get_strategy(), arguments.seed)
    training.checkpoint.restore(path).assert_consumed()
    losses, predicted, _ = training.network.losses_and_gradients(images, labels, len(labels))
    return {"epoch": training.checkpoint.epoch, "loss": losses.mean(), "accuracy": (predicted == labels).mean()}


def report(result: mpidist.EvalResult) -> None:
    epoch, loss, accuracy = result.metrics.values()
    print(f"epoch {epoch:2d}  test loss {loss:.4f}  test acc {accuracy:.2%}", flush=True)


def main() -> None:
    arguments = parse_arguments()
    check_out(arguments.out)
    mpidist.train_and_evaluate(
        mpidist.TrainSpec(lambda context: train(context, arguments), arguments.out, max_steps=arguments.epochs),
        mpidist.EvalSpec(lambda path: evaluate(path, arguments), throttle_secs=arguments.throttle, on_result=report),
        make_resolver(),
    )


if __name__ == "__main__":
    main()
