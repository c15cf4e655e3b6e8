"""The names of TensorFlow that mpidist does not offer, and what the v1 forms add."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import v1
from tests.support.ranks.layouts import layouts

pytestmark = pytest.mark.one_rank


@pytest.mark.parametrize("make", [mpidist.TPUStrategy, mpidist.experimental.TPUStrategy, v1.experimental.TPUStrategy])
def test_tpus_say_what_to_use(make: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"mpidist\.MultiWorkerMirroredStrategy\(\)"):
        make(object())


def test_the_default_strategy_has_v1s_methods_in_v1() -> None:
    default = v1.get_strategy()
    assert isinstance(default, v1.Strategy)
    assert not isinstance(mpidist.get_strategy(), v1.Strategy)
    with pytest.raises(TypeError, match="axis"):
        mpidist.get_strategy().reduce("SUM", 2.0)
    assert default.reduce("SUM", 2.0) == 2.0
    with default.scope() as entered:
        assert entered is default
        assert not v1.has_strategy()
        assert v1.get_strategy() is default
    assert default.run(lambda: v1.get_strategy()) is default
    other = v1.OneDeviceStrategy("cpu:0")
    with other.scope():
        assert v1.get_strategy() is other
        with pytest.raises(RuntimeError, match="OneDeviceStrategy"):
            default.run(int)


def test_v1s_iterators_of_the_default_strategy() -> None:
    default = v1.get_strategy()
    dataset = default.experimental_make_numpy_dataset(np.arange(4)).batch(2)
    for iterator in (default.make_dataset_iterator(dataset), default.make_input_fn_iterator(lambda context: dataset)):
        iterator.initialize()
        np.testing.assert_array_equal(default.experimental_run(lambda x: 10 * x, iterator), [0, 10])
        np.testing.assert_array_equal(iterator.get_next(), [2, 3])
        with pytest.raises(mpidist.OutOfRangeError):
            iterator.get_next()


@pytest.mark.parametrize("strategy", layouts("default", "one_device", "mirrored-2local"), indirect=True)
def test_a_numpy_dataset_is_a_copy(strategy: Any) -> None:
    given = {"x": np.arange(3), "y": [np.zeros(1), np.ones(1), np.ones(1)]}
    dataset = strategy.experimental_make_numpy_dataset(given)
    given["x"][:] = 7
    given["y"][1][:] = 7
    assert [(int(row["x"]), float(row["y"][0])) for row in dataset] == [(0, 0.0), (1, 1.0), (2, 1.0)]
