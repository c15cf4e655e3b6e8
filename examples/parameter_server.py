"""Trains the network of train.py asynchronously: variables on parameter servers, every worker at its own pace.

    mpirun -n 4 python examples/parameter_server.py                                  one server, three workers
    MPIDIST_JOBS=ps:2,worker:6 mpirun -n 8 python examples/parameter_server.py       two servers, six workers
    mpirun -n 4 python examples/parameter_server.py --max-staleness 4                workers at most 4 steps apart
    mpirun -n 4 python examples/parameter_server.py --coordinator                    rank 0 schedules the steps

Without MPIDIST_JOBS the first rank that is no coordinator is the server. Each run ends with other weights: which
gradients are formed of which weights depends on who is faster.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator

from train import Data, Floats, Ints, Network, load_data

import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from mpidist.experimental import cache_variable_reads


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--coordinator", action="store_true", help="one program that schedules steps on the workers")
    parser.add_argument("--epochs", type=int, default=20, help="over all workers together (default: 20)")
    parser.add_argument("--batch-size", type=int, default=32, help="of one worker (default: 32)")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--max-staleness", type=int, help="steps a worker may be ahead of the slowest (default: any)")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def make_resolver(arguments: argparse.Namespace) -> MPIClusterResolver:
    """Return who is who: as MPIDIST_JOBS says, or one server and workers for all other ranks."""
    if "MPIDIST_JOBS" in os.environ:
        return MPIClusterResolver()
    ranks = MPIClusterResolver().size
    least = 3 if arguments.coordinator else 2
    if ranks < least:
        sys.exit(f"expected {least} ranks or more; type: mpirun -n {least + 1} python {' '.join(sys.argv)}")
    chief = {"chief": 1} if arguments.coordinator else {}
    return MPIClusterResolver(jobs={**chief, "ps": 1, "worker": ranks - 1 - len(chief)})


class Training:
    """The network and its optimizer, on the servers."""

    def __init__(self, strategy: mpidist.Strategy, arguments: argparse.Namespace) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.network = Network(arguments.seed)
            self.optimizer = mpidist.optimizers.SGD(arguments.learning_rate)
            self.optimizer.build(self.network.variables.values())

    def step(self, images: Floats, labels: Ints) -> float:
        """Pull the weights, form the gradients, push them; return the mean loss."""
        variables = list(self.network.variables.values())
        with cache_variable_reads():
            # One message; what follows finds the values here.
            self.strategy.extended.read_all([*variables, self.network.classes])
            losses, _, gradients = self.network.losses_and_gradients(images, labels, len(labels))
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return float(losses.mean())

    def accuracy(self, images: Floats, labels: Ints) -> float:
        """Return the share of hits."""
        _, scores = self.network.scores(images)
        return float((scores.argmax(axis=1) == labels).mean())


def batches(data: Data, arguments: argparse.Namespace, passes: int | None) -> mpidist.Dataset[Data]:
    """Return batches of one worker, without end if ``passes`` is None."""
    return (
        mpidist.Dataset.from_tensor_slices(data)
        .shuffle(seed=arguments.seed)
        .batch(arguments.batch_size, drop_remainder=True)
        .repeat(passes)
    )


def train_on_every_worker(resolver: MPIClusterResolver, arguments: argparse.Namespace) -> None:
    """The program of each worker: its share of the batches, at its own pace."""
    train_data, test_data = load_data()
    with mpidist.v1.experimental.ParameterServerStrategy(resolver, max_staleness=arguments.max_staleness) as strategy:
        training = Training(strategy, arguments)
        steps, loss, start = 0, float("nan"), time.perf_counter()
        data = batches(train_data, arguments, arguments.epochs)
        for images, labels in strategy.experimental_distribute_dataset(data):
            loss = strategy.run(training.step, args=(images, labels))
            steps += 1
        print(f"worker {resolver.task_id}: {steps} steps in {time.perf_counter() - start:.1f} s, last loss {loss:.4f}")
        strategy.barrier()
        if strategy.extended.should_checkpoint:
            report(training, test_data)


def train_by_coordinator(resolver: MPIClusterResolver, arguments: argparse.Namespace) -> None:
    """The program of the chief: it schedules steps, and workers carry them out."""
    train_data, test_data = load_data()
    with mpidist.ParameterServerStrategy(resolver) as strategy:
        coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
        training = Training(strategy, arguments)
        data = coordinator.create_per_worker_dataset(lambda: batches(train_data, arguments, None))
        iterators = iter(data)

        def step(iterator: Iterator[Data]) -> float:
            return training.step(*next(iterator))

        for epoch in range(arguments.epochs):
            steps = len(train_data[1]) // arguments.batch_size
            losses = [coordinator.schedule(step, args=(iterators,)) for _ in range(steps)]
            coordinator.join()
            mean = sum(coordinator.fetch(losses)) / steps
            print(f"epoch {epoch + 1:2d}  loss {mean:.4f}  test acc {training.accuracy(*test_data):.2%}")
        report(training, test_data)


def report(training: Training, test_data: Data) -> None:
    updates = int(training.optimizer.iterations.numpy())
    print(f"done after {updates} updates: test accuracy {training.accuracy(*test_data):.2%}")


def main() -> None:
    arguments = parse_arguments()
    resolver = make_resolver(arguments)
    # Ranks of other roles serve those that run the program.
    if arguments.coordinator:
        mpidist.launch(lambda: train_by_coordinator(resolver, arguments), ("chief",), resolver)
    else:
        mpidist.launch(lambda: train_on_every_worker(resolver, arguments), cluster_resolver=resolver)


if __name__ == "__main__":
    main()
