"""The gradient sets have as many arrays and numbers as the models are known to have."""

from __future__ import annotations

import math

import pytest

from benchmarks.measuring.models import MODELS, size_of

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
