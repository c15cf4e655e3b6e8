"""Steps with their reductions, against cases worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.measuring.models import MODELS
from benchmarks.predicting.steps import Work, buckets_of, step_of

pytestmark = pytest.mark.one_rank


def test_a_reduction_that_ends_before_backward_is_hidden() -> None:
    # Ready after 2 and 3 s; the first takes until 2.9, the second until 3.9, 0.9 s after backward.
    step = step_of(Work([4, 4], 1.0, 2.0), [[4], [4]], lambda _: 0.9)
    assert step.seconds == pytest.approx(3.9)
    assert step.exposed == pytest.approx(0.9)
    assert step.efficiency == pytest.approx(3.0 / 3.9)


def test_a_reduction_waits_for_the_one_before() -> None:
    # Ready after 1, 2 and 3 s; they end after 6, 11 and 16 s.
    step = step_of(Work([1, 1, 1], 0.0, 3.0), [[1], [1], [1]], lambda _: 5.0)
    assert (step.seconds, step.communication, step.exposed) == pytest.approx((16.0, 15.0, 13.0))


def test_gradients_take_as_much_of_backward_as_they_have_bytes() -> None:
    # The last layer's 9 of 10 bytes are ready after 0.9 s, and reduced at 1.0; the others at 1.1.
    step = step_of(Work([1, 9], 0.0, 1.0), [[9], [1]], lambda _: 0.1)
    assert step.seconds == pytest.approx(1.1)


def test_buckets_are_the_librarys() -> None:
    gradients = [4 << 20] * 10
    assert [len(bucket) for bucket in buckets_of(gradients, 16 << 20)] == [4, 4, 2]
    # As mpidist.torch cuts them: a small one first, so that something is on its way soon.
    assert [len(bucket) for bucket in buckets_of(gradients, 25 << 20, 1 << 20)] == [1, 7, 2]
    for model in MODELS.values():
        sizes = [index for index, _ in enumerate(model(), 1)]
        assert [size for bucket in buckets_of(sizes, 100) for size in bucket] == sizes[::-1]
