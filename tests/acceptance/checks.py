"""Short ways to say what every replica of a strategy must hold, in any layout; used by the acceptance tests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

import mpidist
from mpidist.strategies.central_storage import CentralExtended

AUTO = mpidist.VariableSynchronization.AUTO
ON_WRITE = mpidist.VariableSynchronization.ON_WRITE
ON_READ = mpidist.VariableSynchronization.ON_READ
NONE = mpidist.VariableAggregation.NONE
SUM = mpidist.VariableAggregation.SUM
MEAN = mpidist.VariableAggregation.MEAN
FIRST = mpidist.VariableAggregation.ONLY_FIRST_REPLICA


def replica_id() -> int:
    """Return the global id of the replica that calls."""
    context = mpidist.get_replica_context()
    assert context is not None
    return int(context.replica_id_in_sync_group)


def local_ids(strategy: Any) -> tuple[int, ...]:
    """Return the global ids of this rank's replicas."""
    return tuple(strategy.extended.local_replica_ids)


def num_workers(strategy: Any) -> int:
    """Return how many ranks share the strategy; all layouts of the tests have equal ranks."""
    return int(strategy.num_replicas_in_sync) // len(local_ids(strategy))


def is_default(strategy: Any) -> bool:
    """Tell the default strategy; call it outside any scope."""
    return mpidist.get_strategy() is strategy


def is_single(strategy: Any) -> bool:
    """Tell the two strategies that keep plain variables; call it outside any scope."""
    return is_default(strategy) or isinstance(strategy, mpidist.OneDeviceStrategy)


def is_central(strategy: Any) -> bool:
    """Tell strategies that keep one copy of a variable for all replicas."""
    return isinstance(strategy.extended, CentralExtended)


def same(actual: Any, expected: Any) -> None:
    """Compare nests of arrays and numbers exactly, NaN equal to NaN."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict)
        assert set(actual) == set(expected)
        for key in expected:
            same(actual[key], expected[key])
    elif isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            same(one, other)
    else:
        assert not isinstance(actual, mpidist.DistributedValues), actual
        found = np.asarray(actual)
        assert found.shape == np.shape(expected)
        np.testing.assert_array_equal(found, expected)


def check_each(strategy: Any, value: Any, expected: Callable[[int], Any]) -> None:
    """Check that the component of every replica of this rank is ``expected(global id)``."""
    ids = local_ids(strategy)
    results = strategy.experimental_local_results(value)
    assert len(results) == len(ids)
    for identifier, result in zip(ids, results, strict=True):
        same(result, expected(identifier))


def check_components(strategy: Any, variable: Any, expected: Callable[[int], Any]) -> None:
    """Check what this rank's copies of a variable hold; where there is one for all, it stands for replica 0."""
    ids = (0,) if is_central(strategy) else local_ids(strategy)
    assert len(variable.values) == len(ids)
    for identifier, component in zip(ids, variable.values, strict=True):
        same(component.numpy(), expected(identifier))


def make_variable(strategy: Any, value: Any, synchronization: Any = AUTO, aggregation: Any = NONE, **rest: Any) -> Any:
    """Create a variable under a strategy."""
    with strategy.scope():
        return mpidist.Variable(value, synchronization=synchronization, aggregation=aggregation, **rest)


def fill(strategy: Any, variable: Any, of_replica: Callable[[int], Any]) -> None:
    """Write a value of its own into each copy of an ON_READ variable."""

    def write() -> None:
        variable.assign(of_replica(replica_id()))

    strategy.run(write)


def scope_or_nothing(strategy: Any, inside: bool) -> AbstractContextManager[Any]:
    """Return the strategy's scope, or no context at all: cross-replica methods work in both."""
    return strategy.scope() if inside else nullcontext()
