"""The gradient sets have as many arrays and numbers as the models are known to have."""

from __future__ import annotations

import math

import pytest

from benchmarks.measuring.models import MODELS, bert_base, resnet50, size_of

pytestmark = pytest.mark.one_rank


@pytest.mark.parametrize(
    ("model", "arrays", "numbers"),
    [
        ("resnet50", 161, 25_557_032),
        ("bert_base", 199, 109_482_240),
        ("small_cnn", 8, 220_234),
    ],
)
def test_totals(model: str, arrays: int, numbers: int) -> None:
    shapes = MODELS[model]()
    assert len(shapes) == arrays
    assert sum(math.prod(shape) for shape in shapes) == numbers
    assert size_of(shapes) == 4 * numbers


def test_the_layers_of_resnet50() -> None:
    shapes = resnet50()
    kernels = [shape for shape in shapes if len(shape) == 4]
    assert len(kernels) == 1 + 3 * (3 + 4 + 6 + 3) + 4
    assert shapes[0] == (7, 7, 3, 64)
    assert kernels[-1] == (1, 1, 512, 2048)
    assert shapes[-2:] == [(2048, 1000), (1000,)]


def test_the_layers_of_bert_base() -> None:
    shapes = bert_base()
    assert shapes[:3] == [(30522, 768), (512, 768), (2, 768)]
    assert shapes.count((768, 768)) == 12 * 4 + 1
    assert shapes.count((768, 3072)) == shapes.count((3072, 768)) == 12
