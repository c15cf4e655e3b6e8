"""OneDeviceStrategy: everything on one named device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpidist.core.context import outside, pop, push
from mpidist.input import InputWorkers, ValueContext, distribute_dataset, distribute_from_function
from mpidist.strategies.devices import check_device
from mpidist.strategies.extended import StrategyExtended
from mpidist.strategies.replica_context import ReplicaContext
from mpidist.strategies.single_replica import SingleReplicaExtended, plain_call
from mpidist.strategies.strategy import Strategy
from mpidist.values.placement import place_at


class OneDeviceExtended(SingleReplicaExtended):
    """One replica on one device of this process."""

    def __init__(self, strategy: Strategy, device: str) -> None:
        super().__init__(strategy)
        self._device = check_device(device)
        self._place = place_at(self._device)
        self._place.settle()
        self._first_gpu = None if self._place.is_host else self._place
        self._context = ReplicaContext(strategy, 0)

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        frame = self._context._frame
        push(frame)
        try:
            if self._place.is_host:
                return plain_call(fn, args, kwargs)
            with self._place.current():
                return plain_call(fn, args, kwargs)
        finally:
            pop(frame)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device."""
        return (self._device,)

    def _input_workers(self) -> InputWorkers:
        return InputWorkers(
            num_workers=1, worker_id=0, replica_counts=(1,), communicator=None, wrap=False, devices=(self._device,)
        )

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        return distribute_dataset(dataset, self._input_workers(), self._strategy, options)

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any) -> Any:
        return distribute_from_function(dataset_fn, self._input_workers(), self._strategy, options)

    def _experimental_distribute_values_from_function(self, value_fn: Callable[..., Any]) -> Any:
        with outside(), self._place.current():
            return value_fn(ValueContext())

    def _copy_for(self, strategy: Strategy) -> StrategyExtended:
        return OneDeviceExtended(strategy, self._device)


class OneDeviceStrategy(Strategy):
    """Runs on one device (tf.distribute.OneDeviceStrategy); for testing code that is to be distributed later.

    Args:
        device: The device string, such as ``"cpu:0"`` or ``"gpu:1"``.

    Raises:
        ValueError: Not a device of this process.
        DeviceError: A GPU, and there is no usable CuPy.

    >>> OneDeviceStrategy("cpu:0").run(lambda x: 2 * x, args=(21,))
    42
    """

    def __init__(self, device: str) -> None:
        super().__init__(OneDeviceExtended(self, device))
