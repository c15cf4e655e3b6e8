"""Shapes of all trainable arrays of ResNet-50, BERT-base and a small CNN, derived from their architectures."""

from __future__ import annotations

import math
from collections.abc import Callable

Shape = tuple[int, ...]


def _convolution(size: int, inputs: int, outputs: int) -> list[Shape]:
    """A convolution without bias, and the scale and shift of the batch normalization that follows it."""
    return [(size, size, inputs, outputs), (outputs,), (outputs,)]


def _dense(inputs: int, outputs: int) -> list[Shape]:
    return [(inputs, outputs), (outputs,)]


def resnet50() -> list[Shape]:
    """Return the shapes of ResNet-50 for 1000 classes (He et al. 2015, table 1): 161 arrays, 25.6 M numbers."""
    shapes = _convolution(7, 3, 64)
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            shapes += _convolution(1, inputs, width) + _convolution(3, width, width)
            shapes += _convolution(1, width, 4 * width)
            if block == 0:
                shapes += _convolution(1, inputs, 4 * width)
            inputs = 4 * width
    return shapes + _dense(inputs, 1000)


def bert_base() -> list[Shape]:
    """Return the shapes of BERT-base, uncased, with its pooler (Devlin et al. 2018): 199 arrays, 109.5 M numbers."""
    width, inner = 768, 3072
    shapes: list[Shape] = [(30522, width), (512, width), (2, width), (width,), (width,)]
    for _ in range(12):
        shapes += 4 * _dense(width, width) + [(width,), (width,)]
        shapes += _dense(width, inner) + _dense(inner, width) + [(width,), (width,)]
    return shapes + _dense(width, width)


def small_cnn() -> list[Shape]:
    """Return the shapes of a CNN for handwritten digits, two convolutions and two dense layers: 0.2 M numbers."""
    return [(3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,), *_dense(7 * 7 * 64, 64), *_dense(64, 10)]


MODELS: dict[str, Callable[[], list[Shape]]] = {"resnet50": resnet50, "bert_base": bert_base, "small_cnn": small_cnn}


def name_of(size: int) -> str:
    """Return the model whose gradients have ``size`` bytes in float32."""
    return next(name for name, shapes in MODELS.items() if size_of(shapes()) == size)


def size_of(shapes: list[Shape]) -> int:
    """Return how many bytes arrays of ``shapes`` have in float32.

    >>> size_of([(2, 3), ()])
    28
    """
    return 4 * sum(math.prod(shape) for shape in shapes)
