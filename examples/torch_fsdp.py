"""Trains a small transformer of PyTorch on handwritten digits, its parameters in parts on all ranks (FSDP2).

    python examples/torch_fsdp.py --backend gloo         one process, without mpidist
    mpirun -n 4 python examples/torch_fsdp.py            four ranks, over mpidist
    srun -n 4 python examples/torch_fsdp.py              the same, in a job of Slurm

With --out FOLDER it writes a distributed checkpoint after each epoch; started again, on any number of ranks, it goes on
from the last one. An ordinary program of torch.distributed: the name of the backend is all that it has of mpidist. It
needs PyTorch: pip install torch.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# See examples/train.py for where they are from.
DIGITS = Path(__file__).with_name("digits.npz")
TEST_IMAGES = 360
WIDTH = 32


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return the digits to train with and those to test with."""
    with np.load(DIGITS) as digits:
        images = torch.from_numpy(digits["images"] / 16.0).float().reshape(-1, 8, 8)
        labels = torch.from_numpy(digits["labels"].astype(np.int64))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[TEST_IMAGES:], order[:TEST_IMAGES]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class Transformer(nn.Module):
    """Reads an image as a text of eight words, its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Linear(8, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(8, WIDTH))
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2))
        )
        self.digit = nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return ten numbers for each image, of which the largest is at its digit."""
        return self.digit(self.layers(self.words(images) + self.places).mean(1))


class Training:
    """What a checkpoint holds."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.epoch = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        """Return what is to be saved, each rank its parts."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what was saved."""
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.epoch = state["epoch"]


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Return the share of the images that are read right; each rank looks at some of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels = (tensor[rank::size] for tensor in data.tensors)
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).sum()
    dist.all_reduce(right)
    return float(right) / len(data)


def newest(folder: Path) -> Path | None:
    """Return the last checkpoint that was finished: its metadata are written last."""
    finished = sorted(folder.glob("epoch-*/.metadata"))
    return finished[-1].parent if finished else None


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--backend", default="mpidist")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=96, help="of all ranks together (default: 96)")
    parser.add_argument("--out", type=Path, help="folder of the checkpoints")
    arguments = parser.parse_args()
    if arguments.backend != "mpidist" and "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")

    dist.init_process_group(arguments.backend)
    torch.manual_seed(0)
    model = Transformer()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    training = Training(model, torch.optim.AdamW(model.parameters(), 3e-3))
    train, test = datasets()
    if arguments.out and (last := newest(arguments.out)):
        dcp.load({"training": training}, checkpoint_id=last)
        tell(f"goes on after epoch {training.epoch}: {100 * accuracy(model, test):.1f} % of the test images are right")

    sampler: DistributedSampler[TensorDataset] = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, arguments.batch_size // dist.get_world_size(), sampler=sampler)
    while training.epoch < arguments.epochs:
        sampler.set_epoch(training.epoch)
        model.train()
        for images, labels in loader:
            training.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            training.optimizer.step()
        training.epoch += 1
        share = accuracy(model, test)
        tell(f"epoch {training.epoch}: loss {loss.item():.4f}, {100 * share:.1f} % of the test images are right")
        if arguments.out:
            dcp.save({"training": training}, checkpoint_id=arguments.out / f"epoch-{training.epoch:03d}")
    dist.destroy_process_group()


def tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
