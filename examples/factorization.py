"""Factorizes a matrix of images asynchronously: one row of an embedding table for each image, the table in shards.

    mpirun -n 4 python examples/factorization.py                                     two servers, two workers
    MPIDIST_JOBS=ps:3,worker:5 mpirun -n 8 python examples/factorization.py          three servers, five workers

The 1,797 digits of 64 pixels are approximated by (1797 x rank) @ (rank x 64). Each server holds a part of the rows of
the table. A step touches the rows of its batch only: they are pulled, and their gradients pushed, as IndexedSlices.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from mpidist.experimental.partitioners import FixedShardsPartitioner

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def load_images() -> Floats:
    """Return the images of ``digits.npz`` (see examples/train.py), float64 rows of 64 pixels."""
    with np.load(Path(__file__).with_name("digits.npz")) as digits:
        images: Floats = digits["images"] / 16.0
    return images


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rank", type=int, default=16, help="of the factors (default: 16)")
    parser.add_argument("--epochs", type=int, default=60, help="over all workers together (default: 60)")
    parser.add_argument("--batch-size", type=int, default=64, help="images of a step (default: 64)")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    return parser.parse_args()


def make_resolver() -> MPIClusterResolver:
    """Return who is who: as MPIDIST_JOBS says, or half of the ranks as servers."""
    if "MPIDIST_JOBS" in os.environ:
        return MPIClusterResolver()
    ranks = MPIClusterResolver().size
    if ranks < 2:
        sys.exit(f"expected 2 ranks or more; type: mpirun -n 4 python {' '.join(sys.argv)}")
    return MPIClusterResolver(jobs={"ps": ranks // 2, "worker": ranks - ranks // 2})


class Factors:
    """The table of embeddings, one row per image, in as many shards as there are servers; and the basis."""

    def __init__(self, strategy: mpidist.Strategy, images: Floats, rank: int) -> None:
        rng = np.random.default_rng(0)
        servers = len(strategy.extended.parameter_devices)
        with strategy.scope():
            table = rng.normal(0, 0.1, (len(images), rank))
            shards = np.array_split(table, FixedShardsPartitioner(servers)(table.shape, table.dtype)[0])
            parts = [mpidist.Variable(part, name=f"table/part_{i}") for i, part in enumerate(shards)]
            self.table = mpidist.experimental.ShardedVariable(parts, name="table")
            self.basis = mpidist.Variable(rng.normal(0, 0.1, (rank, images.shape[1])), name="basis")

    def step(self, optimizer: mpidist.optimizers.Optimizer, rows: Ints, images: Floats) -> None:
        """Take one step for the images that stand in ``rows``."""
        embeddings, basis = self.table.sparse_read(rows), self.basis.value()
        residual = embeddings @ basis - images
        to_embeddings = mpidist.IndexedSlices(residual @ basis.T, rows, self.table.shape)
        to_basis = embeddings.T @ residual / len(rows)
        optimizer.apply_gradients([(to_embeddings, self.table), (to_basis, self.basis)])

    def error(self, images: Floats) -> float:
        """Return the root mean square of what the product is away from the images."""
        return float(np.sqrt(np.mean((self.table.numpy() @ self.basis.numpy() - images) ** 2)))


def best_error(images: Floats, rank: int) -> float:
    """Return the smallest error that factors of this rank can have: that of the singular value decomposition."""
    singular_values = np.linalg.svd(images, compute_uv=False)
    return float(np.sqrt((singular_values[rank:] ** 2).sum() / images.size))


def train(resolver: MPIClusterResolver, arguments: argparse.Namespace) -> None:
    """The program of each worker."""
    images = load_images()
    with mpidist.v1.experimental.ParameterServerStrategy(resolver) as strategy:
        factors = Factors(strategy, images, arguments.rank)
        with strategy.scope():
            optimizer = mpidist.optimizers.SGD(arguments.learning_rate)
        rows = mpidist.Dataset.range(len(images)).shuffle(seed=1).batch(arguments.batch_size).repeat(arguments.epochs)
        for batch in strategy.experimental_distribute_dataset(rows):
            strategy.run(factors.step, args=(optimizer, batch, images[batch]))
        strategy.barrier()
        if strategy.extended.should_checkpoint:
            sizes = [shard.shape[0] for shard in factors.table.variables]
            print(
                f"done after {int(optimizer.iterations.numpy())} updates of a table in shards of {sizes} rows: "
                f"error {factors.error(images):.4f}, best possible {best_error(images, arguments.rank):.4f}"
            )


def main() -> None:
    arguments = parse_arguments()
    resolver = make_resolver()
    # The ranks that are servers serve.
    mpidist.launch(lambda: train(resolver, arguments), cluster_resolver=resolver)


if __name__ == "__main__":
    main()
