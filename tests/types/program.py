"""A small program as users write it; type checkers see the types that it asserts."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import mpidist

Floats = NDArray[np.float64]
Row = tuple[Floats, np.int64]
Batch = tuple[Floats, NDArray[np.int64]]


def row(number: np.int64) -> Row:
    return np.full(2, float(number)), number % 2


def count_by_name() -> dict[str, int]:
    return {"batches": 1}


class Model:
    """One layer, with its optimizer and a metric."""

    def __init__(self, strategy: mpidist.Strategy) -> None:
        with strategy.scope():
            self.weights = mpidist.Variable(np.zeros(2), name="weights")
            self.optimizer = mpidist.optimizers.SGD(learning_rate=0.01)
            self.optimizer.build([self.weights])
            self.loss = mpidist.metrics.Mean(name="loss")

    def step(self, inputs: Floats, labels: NDArray[np.int64]) -> np.float64:
        context = mpidist.get_replica_context()
        assert context is not None
        assert_type(context, mpidist.ReplicaContext)
        count = mpidist.global_count(inputs)
        assert_type(count, int)

        errors: Floats = inputs @ self.weights - labels
        gradient: Floats = inputs.T @ errors / count
        assert_type(context.all_reduce("SUM", gradient), Floats)
        nest: dict[str, Floats | list[Floats]] = {"gradient": gradient, "others": [errors, errors]}
        assert_type(context.all_reduce("MEAN", nest), dict[str, Floats | list[Floats]])
        work = context.all_reduce_async("SUM", errors)
        assert_type(work.done(), bool)
        total: Floats = work.wait()
        assert_type(float(total.sum()), float)
        assert_type(context.all_gather(errors, axis=0), Floats)
        assert_type(context.replica_id_in_sync_group, int)

        self.optimizer.apply_gradients([(gradient, self.weights)])
        losses: Floats = errors**2
        self.loss.update_state(losses)
        loss = mpidist.compute_average_loss(losses, global_batch_size=count)
        assert_type(loss, np.float64)
        return loss


def variables(model: Model) -> None:
    assert_type(model.weights, mpidist.Variable)
    assert_type(model.weights.assign_add([0.0, 0.0]).assign(np.zeros(2)), mpidist.Variable)
    assert_type(model.weights.shape, tuple[int, ...])
    assert_type(model.weights.name, str)
    weights: Floats = model.weights.numpy()
    assert_type(float(weights.sum()), float)
    assert_type(int(model.optimizer.iterations.numpy()), int)
    assert_type(model.optimizer.iterations, mpidist.Variable)
    assert_type(model.optimizer.learning_rate, float)
    assert_type(float(model.loss.result()), float)


def datasets() -> mpidist.Dataset[Batch]:
    assert_type(mpidist.Dataset.range(8), mpidist.Dataset[np.int64])
    rows = mpidist.Dataset.range(8).map(row)
    assert_type(rows, mpidist.Dataset[Row])
    assert_type(rows.shuffle(seed=1).filter(lambda inputs, label: True).take(4).repeat(2), mpidist.Dataset[Row])
    for inputs, label in rows:
        assert_type(inputs, Floats)
        assert_type(label, np.int64)
    for number, (inputs, _) in rows.enumerate():
        assert_type(number, np.int64)
        assert_type(inputs, Floats)
    batches: mpidist.Dataset[Batch] = rows.batch(4)
    return batches


def train(strategy: mpidist.Strategy, model: Model, folder: Path) -> None:
    checkpoint = mpidist.Checkpoint(weights=model.weights, optimizer=model.optimizer)
    manager = mpidist.CheckpointManager(checkpoint, folder, max_to_keep=2)
    assert_type(manager.restore_or_initialize(), str | None)
    distributed: mpidist.DistributedDataset[Batch] = strategy.experimental_distribute_dataset(datasets())
    for inputs, labels in distributed:
        assert_type(inputs, Floats)
        assert_type(labels, NDArray[np.int64])
        losses = strategy.run(model.step, args=(inputs, labels))
        assert_type(losses, np.float64)
        assert_type(strategy.reduce("SUM", losses, axis=None), np.float64)
        assert_type(strategy.experimental_local_results(losses), tuple[np.float64, ...])
    counts = strategy.run(count_by_name)
    assert_type(strategy.reduce(mpidist.ReduceOp.MEAN, counts, axis=None), dict[str, int])
    vectors: Floats = np.ones(2)
    assert_type(strategy.gather(vectors, axis=0), Floats)
    assert_type(manager.save(), str | None)
    assert_type(checkpoint.save(folder / "other"), str)
    path = manager.latest_checkpoint
    assert path is not None
    checkpoint.restore(path).assert_consumed()


def collectives() -> None:
    with mpidist.Communicator() as communicator:
        assert_type(communicator, mpidist.Communicator)
        assert_type((communicator.rank, communicator.size), tuple[int, int])
        total: Floats = communicator.all_reduce("SUM", np.ones(3))
        work = communicator.all_reduce_async("MEAN", total)
        assert_type(work.done(), bool)
        mean: Floats = work.wait()
        names: list[str] = communicator.all_gather_object("a name")
        communicator.barrier()
        print(mean.sum(), names)


def main() -> None:
    assert_type(mpidist.get_strategy(), mpidist.Strategy)
    with mpidist.MultiWorkerMirroredStrategy() as strategy, tempfile.TemporaryDirectory() as folder:
        model = Model(strategy)
        variables(model)
        train(strategy, model, Path(folder))
    collectives()
    assert_type(mpidist.launch(lambda: 1), int | None)
    print("done")


if __name__ == "__main__":
    main()
