"""Networks for steps with DistributedDataParallel: a small one, ResNet-50, and a transformer of 6 layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

# Images of this width, as one core has to do.
_WIDTH = 64


class _Bottleneck(nn.Module):
    """A block of ResNet-50: three convolutions, beside what came in."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *(*_convolution(inputs, width, 1, 1), nn.ReLU()),
            *(*_convolution(width, width, 3, stride), nn.ReLU()),
            *_convolution(width, outputs, 1, 1),
        )
        self.beside = nn.Sequential(*([] if inputs == outputs else _convolution(inputs, outputs, 1, stride)))

    def forward(self, given: Tensor) -> Tensor:
        """Return the output of a batch."""
        return torch.relu(self.body(given) + self.beside(given))


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)]


def small() -> tuple[nn.Module, Tensor]:
    """Return a network for handwritten digits, two convolutions and two dense layers, and one image."""
    layers = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)), torch.rand(1, 1, 8, 8)


def resnet50() -> tuple[nn.Module, Tensor]:
    """Return ResNet-50 for 1000 classes (He et al. 2015, table 1), 25.6 M numbers, and a small image."""
    layers = [*_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            layers.append(_Bottleneck(inputs, width, 2 if stage and not block else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)), torch.rand(
        1, 3, _WIDTH, _WIDTH
    )


def transformer() -> tuple[nn.Module, Tensor]:
    """Return an encoder of 6 layers with a width of 256, 4.7 M numbers, and 4 sequences of 64."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.rand(4, 64, 256)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "small": small,
    "resnet50": resnet50,
    "transformer": transformer,
}
