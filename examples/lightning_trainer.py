"""Trains a convolutional network on handwritten digits with the Trainer of Lightning.

    python examples/lightning_trainer.py                 one process, without mpidist
    mpirun -n 4 python examples/lightning_trainer.py     four ranks, over mpidist

An ordinary program of Lightning, which sees by itself that mpirun has started it: the name of the backend is all that
it has of mpidist. It needs Lightning: pip install lightning.
"""

import argparse
import os
from pathlib import Path

import lightning
import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# See examples/train.py for where they are from.
DIGITS = Path(__file__).with_name("digits.npz")
TEST_IMAGES = 360


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return the digits to train with and those to test with."""
    with np.load(DIGITS) as digits:
        images = torch.from_numpy(digits["images"] / 16.0).float().reshape(-1, 1, 8, 8)
        labels = torch.from_numpy(digits["labels"].astype(np.int64))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[TEST_IMAGES:], order[:TEST_IMAGES]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class Reader(lightning.LightningModule):
    """Reads digits."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 9, 10),
        )

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss of some images."""
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        """Count those that are read right."""
        images, labels = batch
        right = (self.network(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return what changes the weights."""
        return torch.optim.AdamW(self.parameters(), 3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank (default: 32)")
    arguments = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    train, test = datasets()
    ranks, ranks_here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks_here,
        num_nodes=ranks // ranks_here,
        strategy=DDPStrategy(process_group_backend="mpidist") if ranks > 1 else "auto",
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Reader(), DataLoader(train, arguments.batch_size, shuffle=True), DataLoader(test, TEST_IMAGES))
    if trainer.is_global_zero:
        accuracy = float(trainer.callback_metrics["accuracy"])
        print(f"{trainer.world_size} ranks, {100 * accuracy:.1f} % of the test images are right")


if __name__ == "__main__":
    main()
