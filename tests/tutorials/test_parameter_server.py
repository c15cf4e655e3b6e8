"""The tutorial "Parameter server training", block by block, without its parts about Model.fit.

https://www.tensorflow.org/tutorials/distribute/parameter_server_training, retold with its names and in its order, with
NumPy in the place of the Keras layers, on a chief, two servers and two workers that TF_CONFIG tells who they are.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.cluster_resolver import TFConfigClusterResolver
from mpidist.coordinator import ClusterCoordinator
from tests.parameter_server.coordinated import error_of, wait_until
from tests.support.ranks.pool import run

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

# The page has three workers, and an embedding and shards that are sixteen times as large.
NUM_WORKERS = 2
NUM_PS = 2
# Rank by rank.
TASKS = [("chief", 0), *(("ps", i) for i in range(NUM_PS)), *(("worker", i) for i in range(NUM_WORKERS))]


def test_the_tutorial(tmp_path: Any) -> None:
    done = run(on_a_rank, len(TASKS), str(tmp_path / "checkpoints"), timeout=90)
    assert done == [f"{job} {index}" for job, index in TASKS]


# Clusters in the real world: the one program of all tasks ----------------------------------------------------------


def on_a_rank(checkpoint_dir: str) -> str:
    from mpi4py import MPI

    job, index = TASKS[MPI.COMM_WORLD.rank]
    before = os.environ.get("TF_CONFIG")
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {
                "worker": [f"host{i}:1" for i in range(NUM_WORKERS)],
                "ps": [f"host{i}:2" for i in range(NUM_PS)],
                "chief": ["host:3"],
            },
            "task": {"type": job, "index": index},
        }
    )
    try:
        main(checkpoint_dir)
    finally:
        # The rank goes on to other tests.
        os.environ.pop("TF_CONFIG")
        if before is not None:
            os.environ["TF_CONFIG"] = before
    return f"{job} {index}"


def main(checkpoint_dir: str) -> None:
    cluster_resolver = TFConfigClusterResolver()
    if cluster_resolver.task_type in ("worker", "ps"):
        server = mpidist.Server(
            cluster_resolver.cluster_spec(),
            job_name=cluster_resolver.task_type,
            task_index=cluster_resolver.task_id,
            protocol=cluster_resolver.rpc_layer or "grpc",
            start=True,
        )
        server.join()
        return
    variable_partitioner = mpidist.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes=(16 << 10), max_shards=NUM_PS
    )
    strategy = mpidist.experimental.ParameterServerStrategy(cluster_resolver, variable_partitioner=variable_partitioner)
    with strategy:
        coordinate(strategy, checkpoint_dir)


# Preprocessing and model, in the place of Keras layers ------------------------------------------------------------

feature_vocab = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman"]
label_vocab = ["yes", "no"]


def feature_preprocess_stage(words: Any) -> Any:
    """Number words from 1, as StringLookup does; 0 is for words that are not in the vocabulary."""
    return np.array([feature_vocab.index(word) + 1 if word in feature_vocab else 0 for word in words])


def label_preprocess_stage(words: Any) -> Any:
    return np.array([label_vocab.index(word) for word in words])


def feature_and_label_gen(num_examples: int = 200) -> dict[str, list[Any]]:
    examples: dict[str, list[Any]] = {"features": [], "label": []}
    for _ in range(num_examples):
        features = random.sample(feature_vocab, 3)
        label = ["yes"] if "avenger" in features else ["no"]
        examples["features"].append(features)
        examples["label"].append(label)
    return examples


def preprocessed(examples: Any) -> mpidist.Dataset:
    return mpidist.Dataset.from_tensor_slices(examples).map(
        lambda x: ({"features": feature_preprocess_stage(x["features"])}, label_preprocess_stage(x["label"]))
    )


class Model:
    """An embedding, the mean over the words of an example, and a dense layer with a sigmoid."""

    def __init__(self) -> None:
        rng = np.random.default_rng()
        uniform = rng.uniform(-0.05, 0.05, (1 + len(feature_vocab), 1024)).astype(np.float32)
        self.embedding: Any = mpidist.Variable(uniform, name="embedding")
        self.kernel = mpidist.Variable(rng.normal(0, 0.01, (1024, 1)).astype(np.float32), name="kernel")
        self.bias = mpidist.Variable(np.zeros(1, np.float32), name="bias")

    @property
    def trainable_variables(self) -> list[Any]:
        return [self.embedding, self.kernel, self.bias]

    def __call__(self, batch_data: Any, training: bool = False) -> Any:
        return self.forward(batch_data)[0]

    def forward(self, batch_data: Any) -> tuple[Any, Any, Any]:
        kernel = self.kernel.numpy()
        means = self.embedding.sparse_read(batch_data["features"]).mean(axis=1)
        return 1 / (1 + np.exp(-np.clip(means @ kernel + self.bias.numpy(), -30, 30))), means, kernel

    def loss_and_gradients(self, batch_data: Any, labels: Any) -> tuple[Any, Any, list[Any]]:
        pred, means, kernel = self.forward(batch_data)
        chance = np.clip(np.where(labels == 1, pred, 1 - pred), 1e-7, 1)
        loss = mpidist.compute_average_loss(-np.log(chance)[:, 0])
        error = ((pred - labels) / len(labels)).astype(np.float32)
        features = batch_data["features"]
        rows = np.repeat(error @ kernel.T / features.shape[1], features.shape[1], axis=0)
        slices = mpidist.IndexedSlices(rows, features.reshape(-1), (1 + len(feature_vocab), 1024))
        return loss, pred, [slices, means.T @ error, error.sum(axis=0)]


# The program of the coordinator -----------------------------------------------------------------------------------


def coordinate(strategy: Any, checkpoint_dir: str) -> None:
    examples = feature_and_label_gen()

    def dataset_fn(_: Any) -> mpidist.Dataset:
        return preprocessed(examples).shuffle(200).batch(32).repeat()

    with strategy.scope():
        model = Model()
        optimizer = mpidist.optimizers.RMSprop(learning_rate=0.1)
        optimizer.build(model.trainable_variables)
        accuracy = mpidist.metrics.Accuracy()

    weights = model.embedding.variables
    assert len(weights) == 2
    assert weights[0].shape == (4, 1024)
    assert weights[1].shape == (4, 1024)
    assert weights[0].device == "/job:ps/replica:0/task:0/device:CPU:0"
    assert weights[1].device == "/job:ps/replica:0/task:1/device:CPU:0"
    assert np.asarray(model.embedding).shape == (8, 1024)
    assert isinstance(model.kernel, mpidist.Variable)

    def step_fn(iterator: Any) -> Any:
        def replica_fn(batch_data: Any, labels: Any) -> Any:
            loss, pred, gradients = model.loss_and_gradients(batch_data, labels)

            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

            actual_pred = np.greater(pred, 0.5).astype(np.int64)
            accuracy.update_state(labels, actual_pred)
            return loss

        batch_data, labels = next(iterator)
        losses = strategy.run(replica_fn, args=(batch_data, labels))
        return strategy.reduce(mpidist.ReduceOp.SUM, losses, axis=None)

    coordinator = ClusterCoordinator(strategy)

    def per_worker_dataset_fn() -> Any:
        return strategy.distribute_datasets_from_function(dataset_fn)

    per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
    per_worker_iterator = iter(per_worker_dataset)

    num_epoches = 4
    steps_per_epoch = 5
    accuracies = []
    for _ in range(num_epoches):
        accuracy.reset_states()
        for _ in range(steps_per_epoch):
            coordinator.schedule(step_fn, args=(per_worker_iterator,))
        coordinator.join()
        accuracies.append(float(accuracy.result()))
    assert int(optimizer.iterations.numpy()) == num_epoches * steps_per_epoch
    assert accuracies[-1] > 0.9, accuracies

    loss = coordinator.schedule(step_fn, args=(per_worker_iterator,))
    assert float(f"{loss.fetch():f}") < 0.5

    for _ in range(steps_per_epoch):
        coordinator.schedule(step_fn, args=(per_worker_iterator,))
    wait_until(coordinator.done, "the end of all steps")
    assert int(optimizer.iterations.numpy()) == num_epoches * steps_per_epoch + 1 + steps_per_epoch

    evaluate_inline(strategy, coordinator, model)
    restart(coordinator, model, optimizer, (step_fn, (per_worker_iterator,)), checkpoint_dir)
    evaluate_beside(model, checkpoint_dir)
    report_errors(coordinator)
    pack_steps(strategy, coordinator, per_worker_iterator)


def evaluate_inline(strategy: Any, coordinator: Any, model: Model) -> None:
    """By the coordinator itself, then by the workers."""
    eval_dataset = preprocessed(feature_and_label_gen(num_examples=16)).batch(8)
    eval_accuracy = mpidist.metrics.Accuracy()
    for batch_data, labels in eval_dataset:
        pred = model(batch_data, training=False)
        actual_pred = np.greater(pred, 0.5).astype(np.int64)
        eval_accuracy.update_state(labels, actual_pred)
    assert eval_accuracy.result() > 0.9

    with strategy.scope():
        eval_accuracy = mpidist.metrics.Accuracy()

    def eval_step(iterator: Any) -> None:
        def replica_fn(batch_data: Any, labels: Any) -> None:
            pred = model(batch_data, training=False)
            actual_pred = np.greater(pred, 0.5).astype(np.int64)
            eval_accuracy.update_state(labels, actual_pred)

        batch_data, labels = next(iterator)
        strategy.run(replica_fn, args=(batch_data, labels))

    def eval_dataset_fn() -> mpidist.Dataset:
        return preprocessed(feature_and_label_gen(num_examples=16)).shuffle(16).repeat().batch(8)

    per_worker_eval_dataset = coordinator.create_per_worker_dataset(eval_dataset_fn)
    per_worker_eval_iterator = iter(per_worker_eval_dataset)
    eval_steps_per_epoch = 2
    for _ in range(eval_steps_per_epoch):
        coordinator.schedule(eval_step, args=(per_worker_eval_iterator,))
    coordinator.join()
    assert eval_accuracy.result() > 0.9
    assert [float(total.numpy()) for total in eval_accuracy.variables][1] == 16


def restart(coordinator: Any, model: Model, optimizer: Any, step: Any, checkpoint_dir: str) -> None:
    """The loop that goes on where a lost coordinator was: it is gone through as at the first and at a second start."""
    steps_per_epoch = 5
    global_steps = int(optimizer.iterations.numpy())
    first_epoch = global_steps // steps_per_epoch
    for start in range(2):
        checkpoint_manager = mpidist.CheckpointManager(
            mpidist.Checkpoint(model=model, optimizer=optimizer), checkpoint_dir, max_to_keep=3
        )
        assert (checkpoint_manager.latest_checkpoint is None) == (start == 0)
        if checkpoint_manager.latest_checkpoint:
            optimizer.iterations.assign(0)
            model.bias.assign([np.nan])
            checkpoint = checkpoint_manager.checkpoint
            checkpoint.restore(checkpoint_manager.latest_checkpoint).assert_existing_objects_matched()
            assert np.isfinite(model.bias.numpy()).all()

        global_steps = int(optimizer.iterations.numpy())
        starting_epoch = global_steps // steps_per_epoch
        assert starting_epoch == first_epoch + 4 * start
        num_epoches = first_epoch + 4 * (start + 1)

        for _ in range(starting_epoch, num_epoches):
            for _ in range(steps_per_epoch):
                coordinator.schedule(*step)
            coordinator.join()
            checkpoint_manager.save()
        assert len(checkpoint_manager.checkpoints) == 3


def evaluate_beside(model: Model, checkpoint_dir: str) -> None:
    """One round of the side-car loop: a model of its own, without strategy, of the newest checkpoint."""
    eval_model = Model()
    checkpoint = mpidist.Checkpoint(model=eval_model)
    latest_checkpoint = mpidist.latest_checkpoint(checkpoint_dir)
    assert latest_checkpoint is not None
    assert latest_checkpoint.endswith("-8")
    checkpoint.restore(latest_checkpoint).expect_partial()
    for restored, trained in zip(eval_model.trainable_variables, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(restored.numpy(), trained.numpy())


def report_errors(coordinator: Any) -> None:
    """An error of a function is raised once; then scheduling goes on."""

    def check_numerics(x: float) -> float:
        if not np.isfinite(x):
            raise ValueError("x is not finite")
        return x

    value = coordinator.schedule(check_numerics, args=(np.nan,))
    error = error_of(coordinator.join)
    assert isinstance(error, ValueError)
    assert error_of(value.fetch) is error
    coordinator.join()
    assert coordinator.schedule(check_numerics, args=(1.0,)).fetch() == 1.0


def pack_steps(strategy: Any, coordinator: Any, per_worker_iterator: Any) -> None:
    with strategy.scope():
        seen = mpidist.Variable(0, aggregation=mpidist.VariableAggregation.SUM, name="seen")
    steps_per_invocation = 10

    def step_fn(iterator: Any) -> None:
        for _ in range(steps_per_invocation):
            features, _ = next(iterator)

            def replica_fn(features: Any) -> None:
                seen.assign_add(len(features["features"]))

            strategy.run(replica_fn, args=(features,))

    coordinator.schedule(step_fn, args=(per_worker_iterator,))
    coordinator.join()
    assert 10 * 8 <= int(seen.numpy()) <= 10 * 32
