"""The default strategy, current if no other is. It is local, also in MPI jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpidist.arrays.dtypes import Array
from mpidist.core.context import Args, Kwargs, outside, register_default_strategy
from mpidist.core.options import CallOptions, ReduceOp
from mpidist.cross_device_ops import Pairs
from mpidist.cross_device_ops.local_values import device_of
from mpidist.input import Dataset, InputContext, InputOptions, InputReplicationMode, InputWorkers, ValueContext
from mpidist.input.distribute import per_replica_refused, replication_mode
from mpidist.input.torch_loader import is_loader
from mpidist.strategies.base import ReplicaContext, Strategy
from mpidist.strategies.strategy_extended import Result, StrategyExtended
from mpidist.values import Variable
from mpidist.values.synchronization import make_variable


class DefaultExtended(StrategyExtended):
    """One replica in this process. Arrays and variables stay on their devices."""

    local_replica_ids = (0,)

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self.replica = ReplicaContext(strategy, 0)

    @property
    def worker_devices(self) -> tuple[str, ...]:  # type: ignore[override]
        """Not defined: the default strategy places nothing."""
        raise RuntimeError("worker_devices and parameter_devices are not defined for the default strategy")

    @property
    def worker_devices_by_replica(self) -> tuple[tuple[str, ...], ...]:
        """The CPU."""
        return (("cpu:0",),)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> tuple[str, ...]:
        """Return the CPU."""
        return ("cpu:0",)

    def input_workers(self) -> InputWorkers:
        """See ``StrategyExtended``."""
        return InputWorkers(1, 0, (1,), communicator=None, wrap=False)

    def create_variable(self, array: Array, **properties: Any) -> Variable:
        """See ``StrategyExtended``."""
        return make_variable(self.strategy, (device_of(array),), array, **properties)

    def run_replicas(self, fn: Callable[..., Result], args: Args, kwargs: Kwargs) -> list[Result]:
        """See ``StrategyExtended``."""
        return [self.replica.call(fn, args, kwargs)]

    def reduce(self, op: ReduceOp, pairs: Pairs, divisor: int, options: CallOptions, note: str) -> list[object]:
        """See ``StrategyExtended``."""
        return [value.values[0] for value, _ in pairs]

    def copy_to(self, value: object, destinations: object) -> Any:
        """Return ``value``: the default strategy places nothing."""
        return value

    def _call_updates(
        self, var: Variable | None, fn: Callable[..., object], args: Args, kwargs: Kwargs
    ) -> list[object]:
        return super()._call_updates(None, fn, args, kwargs) if var is None else [fn(var, *args, **kwargs)]

    def distribute_dataset(self, dataset: object, options: InputOptions | None) -> Any:
        """Return the dataset itself, or one of the batches of a DataLoader."""
        return Dataset.from_source(dataset) if is_loader(dataset) else dataset

    def distribute_from_function(self, dataset_fn: Callable[..., object], options: InputOptions | None) -> Any:
        """Return the result of the function."""
        if replication_mode(options) is InputReplicationMode.PER_REPLICA:
            raise per_replica_refused(self.strategy)
        return dataset_fn(InputContext())

    def distribute_values(self, value_fn: Callable[..., object]) -> Any:
        """Return the result of the function."""
        with outside():
            return value_fn(ValueContext())

    def copy_for(self, strategy: Strategy) -> StrategyExtended:
        """See ``StrategyExtended``."""
        raise RuntimeError("the default strategy cannot be copied; mpidist.get_strategy() returns it")

    def close(self) -> None:
        """Do nothing: the default strategy stays open."""


class DefaultStrategy(Strategy):
    """One replica, no communication. ``mpidist.get_strategy()`` returns the only object outside of any scope."""

    def __init__(self) -> None:
        extended = DefaultExtended(self)
        super().__init__(extended)
        register_default_strategy(self, extended.replica)


default_strategy = DefaultStrategy()
