"""The default strategy: what is current where no other strategy is; purely local, also in an MPI job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpidist.arrays.convert import Array
from mpidist.core.context import entered, outside, register_default_strategy
from mpidist.cross_device_ops.destinations import device_of
from mpidist.input import InputContext, InputReplicationMode, ValueContext
from mpidist.input.distribute import per_replica_refused, replication_mode
from mpidist.strategies.extended import StrategyExtended
from mpidist.strategies.replica_context import ReplicaContext
from mpidist.strategies.single_replica import SingleReplicaExtended, plain_call
from mpidist.strategies.strategy import Strategy
from mpidist.values import Variable


class DefaultExtended(SingleReplicaExtended):
    """Everything happens in this process, once."""

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        with entered(default_context._frame):
            return plain_call(fn, args, kwargs)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Not defined: the default strategy places nothing."""
        raise RuntimeError("worker_devices and parameter_devices are not defined for the default strategy")

    @property
    def worker_devices_by_replica(self) -> tuple[tuple[str, ...], ...]:
        """The CPU."""
        return ((self._device,),)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> tuple[str, ...]:
        """The CPU."""
        del var_list
        return (self._device,)

    def _device_for(self, array: Array) -> str:
        return device_of(array)

    def _update(self, var: Variable, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        result = fn(var, *args, **kwargs)
        return result if group else (result,)

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        return dataset

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any) -> Any:
        if replication_mode(options) is InputReplicationMode.PER_REPLICA:
            raise per_replica_refused(self._strategy)
        return dataset_fn(InputContext())

    def _experimental_distribute_values_from_function(self, value_fn: Callable[..., Any]) -> Any:
        with outside():
            return value_fn(ValueContext())

    def _copy_for(self, strategy: Strategy) -> StrategyExtended:
        raise RuntimeError("the default strategy cannot be copied; mpidist.get_strategy() returns it")


class DefaultStrategy(Strategy):
    """One replica, no communication; there is one object of this class, made when mpidist is imported."""

    _sole: DefaultStrategy | None = None

    def __init__(self) -> None:
        if DefaultStrategy._sole is not None:
            raise RuntimeError("there is one default strategy; mpidist.get_strategy() returns it outside any scope")
        super().__init__(DefaultExtended(self))
        DefaultStrategy._sole = self


default_strategy = DefaultStrategy()
default_context = ReplicaContext(default_strategy, 0)
register_default_strategy(default_strategy, default_context)
