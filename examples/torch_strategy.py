"""Trains a convolutional network of PyTorch on handwritten digits under a strategy, on any ranks and replicas.

    python examples/torch_strategy.py                                one process
    mpirun -n 3 python examples/torch_strategy.py                    three ranks
    python examples/torch_strategy.py --replicas 3                   three replicas in one process
    mpirun -n 2 python examples/torch_strategy.py --resume folder    goes on where an earlier run stopped, of any layout

The model and its optimizer are PyTorch's own, the loop is that of tf.distribute: every batch is dealt to the replicas,
and all replicas take the same step, as one process would with the whole batch. It needs PyTorch:
pip install torch.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import mpidist

# See examples/train.py for where they are from.
DIGITS = Path(__file__).with_name("digits.npz")
TEST_IMAGES = 360


class Net(nn.Module):
    """Reads 8x8 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 32, 3, stride=2)
        self.last = nn.Linear(32 * 9, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return a number for each digit, the largest for the likeliest."""
        hidden = functional.relu(self.norm(self.first(images)))
        hidden = functional.relu(self.second(hidden))
        logits: Tensor = self.last(hidden.flatten(1))
        return logits


def datasets(batch_size: int) -> tuple[mpidist.Dataset, mpidist.Dataset]:
    """Return batches of the digits to train with and of those to test with."""
    with np.load(DIGITS) as digits:
        images = (digits["images"] / 16.0).astype(np.float32).reshape(-1, 1, 8, 8)
        labels = digits["labels"].astype(np.int64)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[TEST_IMAGES:], order[:TEST_IMAGES]
    shuffled = mpidist.Dataset.from_tensor_slices((images[train], labels[train])).shuffle(seed=1)
    return shuffled.batch(batch_size), mpidist.Dataset.from_tensor_slices((images[test], labels[test])).batch(
        batch_size
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1, help="of each rank (default: 1)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="of all replicas together (default: 64)")
    parser.add_argument("--resume", metavar="FOLDER", help="save there, and go on from what is there")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    strategy = mpidist.MultiWorkerMirroredStrategy(devices=[f"cpu:{number}" for number in range(arguments.replicas)])
    with strategy.scope():
        model = mpidist.torch.adopt(lambda: mpidist.torch.SyncBatchNorm.convert_sync_batchnorm(Net()))
        optimizer = mpidist.torch.Optimizer(model, torch.optim.AdamW, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    train, test = datasets(arguments.batch_size)
    steps_per_epoch = len(train)
    batches = iter(strategy.experimental_distribute_dataset(train.repeat()))
    test_batches = strategy.experimental_distribute_dataset(test)

    def train_step(images: np.ndarray, labels: np.ndarray) -> Tensor:
        optimizer.zero_grad()
        losses = functional.cross_entropy(model(torch.as_tensor(images)), torch.as_tensor(labels), reduction="none")
        # The last batch of an epoch is smaller, and not all replicas have the same number of rows.
        loss = mpidist.compute_average_loss(losses, global_batch_size=mpidist.global_count(images))
        loss.backward()
        optimizer.step()
        return loss.detach()

    def count_right(images: np.ndarray, labels: np.ndarray) -> int:
        with torch.no_grad():
            return int((model(torch.as_tensor(images)).argmax(1) == torch.as_tensor(labels)).sum())

    checkpoint = mpidist.Checkpoint(model=model, optimizer=optimizer, scheduler=scheduler, batches=batches, step=0)
    manager, step = None, 0
    if arguments.resume:
        manager = mpidist.CheckpointManager(
            checkpoint, arguments.resume, max_to_keep=2, step_counter=lambda: step, checkpoint_interval=10
        )
        manager.restore_or_initialize()
    step = int(checkpoint.step)
    while step < arguments.epochs * steps_per_epoch:
        model.train()
        loss = strategy.reduce("SUM", strategy.run(train_step, args=next(batches)), axis=None)
        step += 1
        checkpoint.step = step
        epoch, step_of_epoch = divmod(step, steps_per_epoch)
        if step_of_epoch == 0:
            scheduler.step()
            model.eval()
            counts = [strategy.run(count_right, args=batch) for batch in test_batches]
            right = sum(int(strategy.reduce("SUM", count, axis=None)) for count in counts)
            if strategy.extended.should_checkpoint:
                share = 100 * right / TEST_IMAGES
                print(f"epoch {epoch}: loss {float(loss):.4f}, {share:.1f} % of the test images are right")
        if manager is not None:
            manager.save()  # does something every 10 steps
    strategy.close()


if __name__ == "__main__":
    main()
