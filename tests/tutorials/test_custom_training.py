"""The tutorial "Custom training with tf.distribute.Strategy", block by block.

https://www.tensorflow.org/tutorials/distribute/custom_training, retold with its names and in its order. A network of
NumPy stands for the Keras model, drawn images of four classes for Fashion MNIST.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.acceptance.checks import num_workers
from tests.checkpoint.shared_folder import of_all_ranks
from tests.support.ranks.layouts import layouts, per_replica

pytestmark = [
    pytest.mark.counts,
    pytest.mark.parametrize("strategy", layouts("mirrored-2local", "multi_worker*"), indirect=True),
]

CLASSES = 4
BATCH_SIZE_PER_REPLICA = 8
EPOCHS = 5


def load_data(seed: int, count: int) -> tuple[Any, Any]:
    """Return images of 8 x 8 with one bright quarter, which is the label, as bytes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    images = rng.integers(0, 160, (count, 8, 8))
    for image, label in zip(images, labels, strict=True):
        row, column = 4 * (label // 2), 4 * (label % 2)
        image[row : row + 4, column : column + 4] += 90
    return images.astype(np.uint8), labels


class Model:
    """Two dense layers; called as a Keras model."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.w1 = mpidist.Variable(rng.normal(0, 0.1, (64, 16)), name="w1")
        self.b1 = mpidist.Variable(np.zeros(16), name="b1")
        self.w2 = mpidist.Variable(rng.normal(0, 0.1, (16, CLASSES)), name="w2")
        self.b2 = mpidist.Variable(np.zeros(CLASSES), name="b2")

    @property
    def trainable_variables(self) -> list[mpidist.Variable]:
        return [self.w1, self.b1, self.w2, self.b2]

    def __call__(self, images: Any, training: bool = False) -> Any:
        x = images.reshape(len(images), 64)
        return np.maximum(x @ self.w1 + self.b1, 0) @ self.w2 + self.b2

    @property
    def losses(self) -> list[Any]:
        """Those of a regularizer of the kernels, L2(1e-4)."""
        return [1e-4 * np.sum(np.square(w)) for w in (self.w1, self.w2)]

    def gradients(self, images: Any, predictions: Any, labels: Any, count: int) -> list[Any]:
        """Return the gradients of the mean cross-entropy over ``count`` examples, and of the share of ``losses``."""
        n = mpidist.get_strategy().num_replicas_in_sync
        x = images.reshape(len(images), 64)
        hidden = np.maximum(x @ self.w1 + self.b1, 0)
        error = (softmax(predictions) - np.eye(CLASSES)[labels]) / count
        inner = (error @ np.asarray(self.w2).T) * (hidden > 0)
        w1, w2 = (2e-4 * np.asarray(w) / n for w in (self.w1, self.w2))
        return [x.T @ inner + w1, inner.sum(axis=0), hidden.T @ error + w2, error.sum(axis=0)]


def softmax(scores: Any) -> Any:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def create_model() -> Model:
    return Model()


def loss_object(labels: Any, predictions: Any) -> Any:
    """Return the loss of each example: the reduction is NONE."""
    return -np.log(np.take_along_axis(softmax(predictions), labels[:, None], axis=1)[:, 0])


class Tutorial:
    """The blocks up to the training loop."""

    def __init__(self, strategy: Any) -> None:
        train_images, train_labels = load_data(1, 180)
        test_images, test_labels = load_data(2, 70)
        train_images = train_images[..., None]
        test_images = test_images[..., None]
        train_images = train_images / np.float32(255)
        test_images = test_images / np.float32(255)
        self.test_images, self.test_labels = test_images, test_labels

        self.strategy = strategy
        BUFFER_SIZE = len(train_images)
        self.GLOBAL_BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync

        train_dataset = (
            mpidist.Dataset.from_tensor_slices((train_images, train_labels))
            .shuffle(BUFFER_SIZE, seed=1)
            .batch(self.GLOBAL_BATCH_SIZE)
        )
        test_dataset = mpidist.Dataset.from_tensor_slices((test_images, test_labels)).batch(self.GLOBAL_BATCH_SIZE)
        self.train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
        self.test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)

        with strategy.scope():
            self.test_loss = mpidist.metrics.Mean(name="test_loss")
            self.train_accuracy = mpidist.metrics.SparseCategoricalAccuracy(name="train_accuracy")
            self.test_accuracy = mpidist.metrics.SparseCategoricalAccuracy(name="test_accuracy")

        with strategy.scope():
            self.model = create_model()
            self.optimizer = mpidist.optimizers.Adam(learning_rate=0.01)
            self.checkpoint = mpidist.Checkpoint(optimizer=self.optimizer, model=self.model)

    def compute_loss(self, labels: Any, predictions: Any, model_losses: list[Any]) -> Any:
        per_example_loss = loss_object(labels, predictions)
        loss = mpidist.compute_average_loss(per_example_loss, global_batch_size=self.GLOBAL_BATCH_SIZE)
        if model_losses:
            loss += mpidist.scale_regularization_loss(sum(model_losses))
        return loss

    def train_step(self, inputs: Any) -> Any:
        images, labels = inputs
        model = self.model

        predictions = model(images, training=True)
        loss = self.compute_loss(labels, predictions, model.losses)

        gradients = model.gradients(images, predictions, labels, self.GLOBAL_BATCH_SIZE)
        self.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        self.train_accuracy.update_state(labels, predictions)
        return loss

    def test_step(self, inputs: Any) -> None:
        images, labels = inputs
        predictions = self.model(images, training=False)
        t_loss = loss_object(labels, predictions)
        self.test_loss.update_state(t_loss)
        self.test_accuracy.update_state(labels, predictions)

    def distributed_train_step(self, dataset_inputs: Any) -> Any:
        per_replica_losses = self.strategy.run(self.train_step, args=(dataset_inputs,))
        return self.strategy.reduce(mpidist.ReduceOp.SUM, per_replica_losses, axis=None)

    def distributed_test_step(self, dataset_inputs: Any) -> Any:
        return self.strategy.run(self.test_step, args=(dataset_inputs,))


def test_training_and_restoring_without_strategy(strategy: Any, tmp_path: Any) -> None:
    with of_all_ranks(tmp_path) as folder:
        train_and_restore(Tutorial(strategy), str(folder / "training_checkpoints"))


def train_and_restore(tutorial: Tutorial, checkpoint_dir: str) -> None:
    checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt")
    train_losses, saved_accuracy = [], np.nan
    test_loss, train_accuracy, test_accuracy = tutorial.test_loss, tutorial.train_accuracy, tutorial.test_accuracy
    for epoch in range(EPOCHS):
        total_loss = 0.0
        num_batches = 0
        for x in tutorial.train_dist_dataset:
            total_loss += tutorial.distributed_train_step(x)
            num_batches += 1
        train_loss = total_loss / num_batches

        for x in tutorial.test_dist_dataset:
            tutorial.distributed_test_step(x)

        if epoch % 2 == 0:
            tutorial.checkpoint.save(checkpoint_prefix)
            saved_accuracy = test_accuracy.result() * 100

        template = "Epoch {}, Loss: {}, Accuracy: {}, Test Loss: {}, Test Accuracy: {}"
        line = template.format(
            epoch + 1, train_loss, train_accuracy.result() * 100, test_loss.result(), test_accuracy.result() * 100
        )
        assert line.startswith(f"Epoch {epoch + 1}, Loss: {train_loss}")
        train_losses.append(train_loss)

        # The metrics are over all replicas: those of the whole set in one piece.
        predictions = tutorial.model(tutorial.test_images)
        assert np.isclose(test_loss.result(), np.mean(loss_object(tutorial.test_labels, predictions)))
        assert test_accuracy.result() == np.mean(predictions.argmax(axis=1) == tutorial.test_labels)
        if epoch < EPOCHS - 1:
            test_loss.reset_states()
            train_accuracy.reset_states()
            test_accuracy.reset_states()

    assert all(np.diff(train_losses) < 0)
    assert train_accuracy.result() > 0.9
    assert test_accuracy.result() > 0.9

    # A checkpoint that a strategy wrote is restored without one.
    eval_accuracy = mpidist.metrics.SparseCategoricalAccuracy(name="eval_accuracy")
    new_model = create_model()
    new_optimizer = mpidist.optimizers.Adam()
    test_dataset = mpidist.Dataset.from_tensor_slices((tutorial.test_images, tutorial.test_labels)).batch(
        tutorial.GLOBAL_BATCH_SIZE
    )

    def eval_step(images: Any, labels: Any) -> None:
        predictions = new_model(images, training=False)
        eval_accuracy(labels, predictions)

    checkpoint = mpidist.Checkpoint(optimizer=new_optimizer, model=new_model)
    latest = mpidist.latest_checkpoint(checkpoint_dir)
    assert os.path.basename(str(latest)) == "ckpt-3"
    checkpoint.restore(latest)
    for images, labels in test_dataset:
        eval_step(images, labels)
    assert eval_accuracy.result() * 100 == saved_accuracy


def test_other_ways_of_iterating(strategy: Any) -> None:
    tutorial = Tutorial(strategy)
    losses = []
    for _ in range(EPOCHS):
        total_loss = 0.0
        num_batches = 0
        train_iter = iter(tutorial.train_dist_dataset)
        for _ in range(3):
            total_loss += tutorial.distributed_train_step(next(train_iter))
            num_batches += 1
        losses.append(total_loss / num_batches)
        tutorial.train_accuracy.reset_states()
    assert losses[-1] < losses[0]
    assert int(tutorial.optimizer.iterations.numpy()) == 3 * EPOCHS

    def distributed_train_epoch(dataset: Any) -> Any:
        total_loss = 0.0
        num_batches = 0
        for x in dataset:
            per_replica_losses = strategy.run(tutorial.train_step, args=(x,))
            total_loss += strategy.reduce(mpidist.ReduceOp.SUM, per_replica_losses, axis=None)
            num_batches += 1
        return total_loss / np.float32(num_batches)

    for _ in range(EPOCHS):
        train_loss = distributed_train_epoch(tutorial.train_dist_dataset)
        accuracy = tutorial.train_accuracy.result() * 100
        tutorial.train_accuracy.reset_states()
    assert train_loss < losses[-1]
    assert accuracy > 90


# Losses, in numbers ----------------------------------------------------------------------------------------------


def test_the_loss_is_scaled_and_not_averaged(strategy: Any) -> None:
    """Two samples on each replica, [2, 3] on the first, [4, 5] on the second, and so on."""
    n = strategy.num_replicas_in_sync
    losses = per_replica(strategy, lambda i: np.array([2.0, 3.0]) + 2 * i)
    with strategy.scope():
        mean = mpidist.metrics.Mean()

    def step(per_example_loss: Any) -> Any:
        loss = mpidist.compute_average_loss(per_example_loss, global_batch_size=2 * n)
        assert loss == mpidist.compute_average_loss(per_example_loss)
        mean.update_state(loss)
        return loss

    scaled = strategy.run(step, args=(losses,))
    if (n, num_workers(strategy)) == (2, 1):
        assert strategy.experimental_local_results(scaled) == (1.25, 2.25)
    expected = np.mean(np.arange(2.0, 2 * n + 2))
    assert np.isclose(strategy.reduce(mpidist.ReduceOp.SUM, scaled, axis=None), expected)
    # Why a Mean is the wrong thing for it: it counts each replica's share as a loss of its own.
    assert np.isclose(mean.result(), expected / n)


def test_special_cases_of_losses(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync

    def short_batch(i: int) -> Any:
        # The last replica has but one of its two examples.
        return np.ones(1 if i == n - 1 else 2)

    def step(losses: Any) -> Any:
        given = mpidist.compute_average_loss(losses, global_batch_size=2 * n)
        counted = mpidist.compute_average_loss(losses, global_batch_size=mpidist.global_count(losses))
        return given, counted

    given, counted = strategy.run(step, args=(per_replica(strategy, short_batch),))
    total = strategy.reduce("SUM", given, axis=None), strategy.reduce("SUM", counted, axis=None)
    assert np.allclose(total, ((2 * n - 1) / (2 * n), 1.0))

    # A loss for each pixel is averaged over the pixels, and not over the examples; weights are for examples.
    def pixels() -> Any:
        per_pixel = np.arange(2.0 * 3 * 4).reshape(2, 3, 4)
        per_example = per_pixel.mean(axis=(1, 2))
        return mpidist.compute_average_loss(per_example, sample_weight=np.array([1.0, 0.0]))

    assert np.isclose(strategy.reduce("SUM", strategy.run(pixels), axis=None), 5.5 / 2)
    shares = strategy.run(lambda: mpidist.scale_regularization_loss(np.float64(3.0)))
    assert np.isclose(strategy.reduce("SUM", shares, axis=None), 3.0)
