"""Trains a convolutional network of PyTorch on handwritten digits, with DistributedDataParallel on every rank.

    python examples/torch_ddp.py --backend gloo          one process, without mpidist
    mpirun -n 4 python examples/torch_ddp.py             four ranks, over mpidist
    srun -n 4 python examples/torch_ddp.py               the same, in a job of Slurm

An ordinary program of torch.distributed: the name of the backend is all that it has of mpidist. It needs PyTorch:
pip install torch.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 9, 10),
    )


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Return the share of the images that are read right; each rank looks at some of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels = (tensor[rank::size] for tensor in data.tensors)
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).sum()
    dist.all_reduce(right)
    return float(right) / len(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--backend", default="mpidist")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank (default: 32)")
    arguments = parser.parse_args()
    if arguments.backend != "mpidist" and "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")

    dist.init_process_group(arguments.backend)
    torch.manual_seed(0)
    train, test = datasets()
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, arguments.batch_size, sampler=sampler)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        share = accuracy(model.module, test)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}, {100 * share:.1f} % of the test images are right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
