"""CentralStorageStrategy: replicas of one node that share one copy of each variable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mpidist.arrays.convert import Array
from mpidist.collectives import Communicator
from mpidist.core.devices import parse_device
from mpidist.strategies.central import CentralExtended
from mpidist.strategies.devices import check_device, check_devices
from mpidist.strategies.extended import StrategyExtended
from mpidist.strategies.one_node import ranks_of_node
from mpidist.strategies.strategy import Strategy
from mpidist.values import Variable
from mpidist.values.component import ArrayComponent, Component
from mpidist.values.placement import HOST, on_host, place_at, placed
from mpidist.values.shared_component import SharedComponent, VariableWriter

if TYPE_CHECKING:
    from mpi4py import MPI

_INSTEAD = "mpidist.MultiWorkerMirroredStrategy(), or parameter servers: mpidist.experimental.ParameterServerStrategy()"


class CentralStorageExtended(CentralExtended):
    """Replicas in sync, and a copy of each variable in memory that all of them see.

    Args:
        strategy: The strategy it belongs to.
        devices: Devices of this rank's replicas; None for its share of the GPUs, or the CPU.
        parameter_device: Where variables are; None for the device of a lone replica, and otherwise the host.
        comm: The ranks that take part, which share memory; None for this process alone. Closed with the strategy.
    """

    def __init__(
        self,
        strategy: Strategy,
        devices: tuple[str, ...] | None,
        parameter_device: str | None,
        comm: Communicator | None,
    ) -> None:
        super().__init__(strategy, devices, comm)
        self._writer = None if comm is None else VariableWriter(comm)
        self._parameter_device = parameter_device or (self._devices[0] if self._total == 1 else HOST.device)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The one device that has all variables."""
        return (self._parameter_device,)

    @property
    def experimental_between_graph(self) -> bool:
        """True, as in TensorFlow."""
        return True

    def _make_component(self, array: Array, properties: dict[str, Any]) -> Component:
        name = properties["name"]
        if self._writer is not None:
            with self._shared_errors(f"creating variable {name!r}"):
                array = on_host(array)
            return SharedComponent(self._writer, array, name, properties["aggregation"].name)
        (device,) = placed(self.parameter_devices)
        return ArrayComponent(place_at(device).copies(array), name, device)

    def _apply_gradients(self, optimizer: Any, summed: Iterable[tuple[list[Any], list[Variable]]]) -> None:
        if self._writer is None:
            optimizer.update_copies(summed)
            return
        # One turn for all variables and their slots, and the work is done once.
        with self._writer.turn(f"applying gradients by optimizer {optimizer.name!r}") as writes:
            if writes:
                optimizer.update_copies(summed)
            else:
                for _ in summed:  # each comes by a collective
                    pass

    def _copy_for(self, strategy: Strategy) -> StrategyExtended:
        if self._comm is not None:
            return super()._copy_for(strategy)
        return CentralStorageExtended(strategy, self._devices, self._parameter_device, None)


class CentralStorageStrategy(Strategy):
    """Synchronous training on one node with one copy of each variable (tf.distribute.experimental's strategy).

    What replicas assign is combined by the variable's aggregation and applied once; what they scatter is applied as
    each gives it, whatever the aggregation (as TensorFlow does); ``synchronization`` means nothing. The numbers are
    otherwise those of MirroredStrategy, which takes as much memory for variables and optimizer as there are replicas.

    Two ways to use it. Several devices in one process: the copy is on ``parameter_device``. Or the ranks of one node:
    start with ``mpirun``, and the copy is in memory that they share. Then making, copying and assigning a variable is
    collective wherever it is done, also outside ``run`` and in the function given to ``extended.update``: call it on
    every rank, in the same order, with the same value. All meet, the first rank writes, and all meet again, so that
    nobody reads what is half written. Optimizers compute their updates on the first rank alone: what a subclass of
    ``Optimizer`` or a variable's ``constraint`` keeps elsewhere than in variables changes there only.

    Collective over the ranks that take part.

    Args:
        compute_devices: Device strings of this rank's replicas; by default its share of the node's GPUs, which is all
            of them in a job of one process, or the CPU where there are none.
        parameter_device: Where variables are. By default the host, or the compute device if there is but one replica.
            With several ranks it is the host.
        communicator: An mpi4py communicator of the ranks that take part, which are on one node. By default all ranks
            of the node; ``MPI.COMM_SELF`` for this process alone. Extension.

    Raises:
        ValueError: Wrong devices; a GPU as ``parameter_device`` of several ranks; ranks on several nodes, for which
            there are MultiWorkerMirroredStrategy and parameter servers.
        TypeError: Devices that are no strings.
        DeviceError: A GPU, and there is no usable CuPy.
        LaunchError: MPI cannot be started.

    Variables raise MemoryError, on all ranks, where /dev/shm has no room for them.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/CentralStorageStrategy

    >>> import mpidist
    >>> strategy = CentralStorageStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     v = mpidist.Variable(1.0, aggregation=mpidist.VariableAggregation.SUM)
    >>> strategy.run(lambda: v.assign_add(10.0)).numpy()
    array(21.)
    >>> v.devices, len(v.values)
    (('cpu:0',), 1)
    >>> strategy.close()
    """

    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
        communicator: MPI.Intracomm | None = None,
    ) -> None:
        devices = check_devices(compute_devices)
        parameters = None if parameter_device is None else check_device(parameter_device)
        ranks = ranks_of_node("CentralStorageStrategy", _INSTEAD) if communicator is None else communicator
        size = ranks.Get_size()
        if size > 1 and parameters is not None and parse_device(parameters).kind != "cpu":
            raise ValueError(
                f"parameter_device is {parameter_device!r}, and the strategy has {size} ranks, which share memory of "
                "the host; expected parameter_device='cpu:0', or one process that has all GPUs"
            )
        comm = Communicator(ranks, owner=type(self).__name__) if size > 1 else None
        if comm is not None and not comm.shares_memory:
            comm.close()
            raise ValueError(
                f"CentralStorageStrategy is for ranks that share memory, and its {size} ranks do not: they are on "
                "several nodes, or /dev/shm has no room (docker run --shm-size=8g); use " + _INSTEAD
            )
        super().__init__(CentralStorageExtended(self, devices, parameters, comm))
