"""The tutorial "Custom training with tf.distribute.Strategy", block by block, with a model of PyTorch.

https://www.tensorflow.org/tutorials/distribute/custom_training, retold with its names and in its order. Its
GradientTape is ``loss.backward()``, its optimizer one of torch.optim. A tf.function has no counterpart: the step is a
plain function (torch.compile takes it where a rank has one replica).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.checkpoint.shared_folder import of_all_ranks
from tests.support.ranks.layouts import layouts
from tests.tutorials.test_custom_training import BATCH_SIZE_PER_REPLICA, CLASSES, EPOCHS, load_data

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install 'mpidist[torch]'")
nn = torch.nn

pytestmark = [
    pytest.mark.torch,
    pytest.mark.counts,
    pytest.mark.parametrize("strategy", layouts("mirrored-2local", "multi_worker*"), indirect=True),
]


def create_model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(72, 16),
        nn.ReLU(),
        nn.Linear(16, CLASSES),
    )


class Tutorial:
    """The blocks up to the training loop."""

    def __init__(self, strategy: Any) -> None:
        # Download the dataset: PyTorch has channels first.
        train_images, train_labels = load_data(1, 180)
        test_images, test_labels = load_data(2, 70)
        train_images, test_images = (images[:, None] / np.float32(255) for images in (train_images, test_images))
        self.test_images, self.test_labels = torch.from_numpy(test_images), test_labels

        # Create a strategy to distribute the variables and the graph; set up the input pipeline.
        self.strategy = strategy
        self.GLOBAL_BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
        train_dataset = (
            mpidist.Dataset.from_tensor_slices((train_images, train_labels))
            .shuffle(len(train_images), seed=1)
            .batch(self.GLOBAL_BATCH_SIZE)
        )
        test_dataset = mpidist.Dataset.from_tensor_slices((test_images, test_labels)).batch(self.GLOBAL_BATCH_SIZE)
        self.train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
        self.test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)

        # Define the loss function, the metrics, the model, the optimizer and the checkpoint.
        with strategy.scope():
            self.loss_object = nn.CrossEntropyLoss(reduction="none")
            self.test_loss = mpidist.metrics.Mean(name="test_loss")
            self.train_accuracy = mpidist.metrics.SparseCategoricalAccuracy(name="train_accuracy")
            self.test_accuracy = mpidist.metrics.SparseCategoricalAccuracy(name="test_accuracy")
        with strategy.scope():
            self.model = mpidist.torch.adopt(create_model)
            self.optimizer = mpidist.torch.Optimizer(self.model, torch.optim.Adam, lr=0.01)
            self.checkpoint = mpidist.Checkpoint(optimizer=self.optimizer, model=self.model)

    def compute_loss(self, labels: Any, predictions: Any, model_losses: list[Any]) -> Any:
        per_example_loss = self.loss_object(predictions, labels)
        loss = mpidist.compute_average_loss(per_example_loss, global_batch_size=self.GLOBAL_BATCH_SIZE)
        return loss + mpidist.scale_regularization_loss(sum(model_losses))

    def train_step(self, inputs: Any) -> Any:
        images, labels = map(torch.as_tensor, inputs)
        self.optimizer.zero_grad()
        predictions = self.model(images)
        model_losses = [1e-4 * parameter.square().sum() for parameter in self.model.parameters()]
        loss = self.compute_loss(labels, predictions, model_losses)
        loss.backward()
        self.optimizer.step()
        self.train_accuracy.update_state(labels, predictions.detach())
        return loss.detach()

    def test_step(self, inputs: Any) -> None:
        images, labels = map(torch.as_tensor, inputs)
        with torch.no_grad():
            predictions = self.model(images)
        self.test_loss.update_state(self.loss_object(predictions, labels))
        self.test_accuracy.update_state(labels, predictions)

    def distributed_train_step(self, dataset_inputs: Any) -> float:
        per_replica_losses = self.strategy.run(self.train_step, args=(dataset_inputs,))
        return float(self.strategy.reduce(mpidist.ReduceOp.SUM, per_replica_losses, axis=None))

    def distributed_test_step(self, dataset_inputs: Any) -> None:
        self.strategy.run(self.test_step, args=(dataset_inputs,))


def test_training_and_restoring_without_strategy(strategy: Any, tmp_path: Any) -> None:
    with of_all_ranks(tmp_path) as folder:
        train_and_restore(Tutorial(strategy), str(folder / "training_checkpoints"))


def train_and_restore(tutorial: Tutorial, checkpoint_dir: str) -> None:
    train_losses, saved_accuracy = [], np.nan
    for epoch in range(EPOCHS):
        losses = [tutorial.distributed_train_step(x) for x in tutorial.train_dist_dataset]
        train_losses.append(sum(losses) / len(losses))
        for x in tutorial.test_dist_dataset:
            tutorial.distributed_test_step(x)
        if epoch % 2 == 0:
            tutorial.checkpoint.save(os.path.join(checkpoint_dir, "ckpt"))
            saved_accuracy = tutorial.test_accuracy.result() * 100
        # The metrics are over all replicas: those of the whole set in one piece.
        with torch.no_grad():
            predictions = tutorial.model(tutorial.test_images)
        share = np.mean(predictions.argmax(1).numpy() == tutorial.test_labels)
        assert tutorial.test_accuracy.result() == pytest.approx(share)
        for metric in (tutorial.test_loss, tutorial.train_accuracy, tutorial.test_accuracy):
            metric.reset_states()
    assert train_losses[-1] < train_losses[0]
    assert saved_accuracy > 90

    # A checkpoint that a strategy wrote is restored without one, into a model that was never adopted.
    new_model = create_model()
    latest = mpidist.latest_checkpoint(checkpoint_dir)
    mpidist.Checkpoint(model=new_model).restore(latest).expect_partial()
    eval_accuracy = mpidist.metrics.SparseCategoricalAccuracy(name="eval_accuracy")
    with torch.no_grad():
        eval_accuracy(tutorial.test_labels, new_model(tutorial.test_images))
    assert eval_accuracy.result() * 100 == pytest.approx(saved_accuracy)


def test_other_ways_of_iterating(strategy: Any) -> None:
    tutorial = Tutorial(strategy)
    losses = []
    for _ in range(EPOCHS):
        train_iter = iter(tutorial.train_dist_dataset)
        losses.append(sum(tutorial.distributed_train_step(next(train_iter)) for _ in range(3)) / 3)
    assert losses[-1] < losses[0]
