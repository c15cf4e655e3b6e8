"""CentralStorageStrategy: replicas of one node that share one copy of each variable.

A replica that assigns hands its value over; the values of the replicas become one by the variable's aggregation and are
applied once. Other strategies of one copy, such as those of parameter servers, differ in where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from mpidist.arrays.dtypes import Array
from mpidist.collectives import Communicator
from mpidist.collectives.single_writer import SingleWriter
from mpidist.core import context, nest
from mpidist.core.context import Args, Frame, Kwargs, ReplicaContextLike
from mpidist.core.options import VariableSynchronization
from mpidist.core.text import parse_device
from mpidist.strategies.base import Strategy
from mpidist.strategies.mirrored import FOR_STRATEGIES, ranks_of_node
from mpidist.strategies.replica_devices import check_device, check_devices
from mpidist.strategies.replicated import ReplicatedExtended
from mpidist.strategies.strategy_extended import StrategyExtended
from mpidist.values import ReplicaValues, Variable, scatter
from mpidist.values.component import ArrayComponent, Assignment, Component, as_value_of, assign
from mpidist.values.placement import HOST, on_host, place_at, placed
from mpidist.values.synchronization import variable_of
from mpidist.values.variable import give_restored_values

if TYPE_CHECKING:
    from mpi4py import MPI

_INSTEAD = "mpidist.MultiWorkerMirroredStrategy(), or parameter servers: mpidist.experimental.ParameterServerStrategy()"


class CentralExtended(ReplicatedExtended):
    """Replicas in sync that share one copy of each variable.

    A subclass says where it is.

    A variable's synchronization means nothing here: there is one copy, and each is ON_WRITE.
    """

    is_central = True

    def create_variable(self, array: Array, **properties: Any) -> Variable:
        """See ``StrategyExtended``."""
        properties["synchronization"] = VariableSynchronization.ON_WRITE
        return variable_of(self.strategy, [self._make_component(array, properties)], **properties)

    def _make_component(self, array: Array, properties: dict[str, Any]) -> Component:
        """Return the copy of a new variable; ``properties`` are those that ``Variable`` was given."""
        raise NotImplementedError

    def _update_device(self, component: Component) -> str:
        """Return the device of this process that is current while ``component`` is updated."""
        return component.device

    def _update(self, var: Variable, fn: Callable[..., object], args: Args, kwargs: Kwargs, group: bool) -> object:
        (component,) = var.values
        result = self._call_once(self._update_device(component), fn, (component, *args), kwargs)
        return nest.map_structure(self.value_container, result) if group else (result,)

    def _update_non_slot(self, fn: Callable[..., object], args: Args, kwargs: Kwargs, group: bool) -> object:
        result = self._call_once(self.parameter_devices[0], fn, args, kwargs)
        return result if group else (result,)

    def _call_once(self, device: str, fn: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        """Call an update function in update context."""
        with self.shared_errors("an update function"):
            args, kwargs = nest.map_structure(self._sole, (args, kwargs))
            with place_at(device).current(), context.entered(Frame(self.strategy, None, 0)):
                return fn(*args, **kwargs)

    def update_in_replica(
        self,
        replica: ReplicaContextLike,
        var: Variable,
        fn: Callable[..., object],
        args: Args,
        kwargs: Kwargs,
        group: bool,
    ) -> object:
        """See ``StrategyExtended``: there is one component for all replicas, which meet."""

        def merged(_: object, *args: object, **kwargs: object) -> object:
            return self._update(self.own_variable(var, "update"), fn, args, kwargs, group)

        return replica.meet(("update", var.label), merged, args, kwargs)

    def _sole(self, value: object) -> object:
        """Return an argument of an update as one value, since there is one copy."""
        if not isinstance(value, ReplicaValues):
            return value
        if len(value.values) > 1:
            raise ValueError(
                f"a {type(value).__name__} of {len(value.values)} replicas was given to update() of a variable of "
                f"{type(self.strategy).__name__}, which has one copy; expected one value: reduce it first with "
                "strategy.extended.reduce_to(op, value, variable)"
            )
        return value.values[0]


class CentralStorageExtended(CentralExtended):
    """Replicas in sync, and one copy of each variable in memory of all.

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
        self._parameter_device = parameter_device or (
            self.worker_devices[0] if self.num_replicas_in_sync == 1 else HOST.device
        )

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
            with self.shared_errors(f"creating variable {name!r}"):
                array = on_host(array)
            return SharedComponent(self._writer, array, name, properties["aggregation"].name)
        (device,) = placed(self.parameter_devices)
        return ArrayComponent(place_at(device).copies(array), name, device)

    def apply_gradients(self, optimizer: Any, summed: Iterable[tuple[list[object], list[Variable]]]) -> None:
        """See ``StrategyExtended``."""
        if self._writer is None:
            optimizer.update_copies(summed)
            return
        # One block for all variables and their slots, and the work is done once.
        with self._writer.write_block(f"applying gradients by optimizer {optimizer.name!r}") as writes:
            if writes:
                optimizer.update_copies(summed)
            else:
                for _ in summed:  # each comes by a collective
                    pass

    def copy_for(self, strategy: Strategy) -> StrategyExtended:
        """See ``StrategyExtended``."""
        if self.communicator is not None:
            return super().copy_for(strategy)
        return CentralStorageExtended(strategy, self.worker_devices, self._parameter_device, None)


class VariableWriter(SingleWriter):
    """The writer of shared variables.

    Before it writes, each rank gives variables the restored values that wait for them.
    """

    @contextmanager
    def write_block(self, text: str) -> Iterator[bool]:
        """See ``SingleWriter``."""
        give_restored_values()
        with super().write_block(text) as writes:
            yield writes


class SharedComponent(ArrayComponent):
    """A copy that several ranks read where it lies. Making, assigning and copying it are collective.

    The first rank's value is assigned; those of the others are checked.

    Args:
        writer: Of the ranks that share it.
        array: Its value, in host memory, of the same shape and dtype on every rank; that of the first rank counts.
        name: Of the copy.
        kind: Further properties of the variable on which the ranks must agree.
    """

    def __init__(self, writer: SingleWriter, array: Array, name: str, kind: str) -> None:
        self._writer, self._kind = writer, kind
        # Names need not differ.
        shape = f"{array.dtype}{list(array.shape)}"
        self._label = f"variable {name!r}, {shape} {kind}, number {writer.next_number()} of its strategy"
        super().__init__(writer.shared_copy(array, f"creation of {self._label}"), name, HOST.device)

    def assign_by(self, how: Assignment, value: object) -> SharedComponent:
        """See ``Assignable``."""
        doing = f"{how.__name__} of {self._label}"
        with self._writer.shared_errors(doing):
            array = as_value_of(self, value)
        with self._writer.write_block(doing) as writes:
            if writes:
                how(self.array, array)
        return self

    def scatter_by(self, how: scatter.ScatterOp, slices: object) -> SharedComponent:
        """See ``Assignable``."""
        doing = f"{how.name} of {self._label}"
        with self._writer.shared_errors(doing):
            checked = scatter.check_slices(slices, self)
        with self._writer.write_block(doing) as writes:
            if writes:
                how.apply(self.array, checked)
        return self

    def start_from(self, value: Array) -> None:
        """See ``Component``."""
        # Each rank writes the same bytes before it reads any, and before the next block, in which they may change.
        super().assign_by(assign, value)

    def copied(self) -> SharedComponent:
        """See ``Component``."""
        return SharedComponent(self._writer, self.array, self.name, self._kind)

    def shared_errors(self, doing: str) -> AbstractContextManager[None]:
        """See ``Component``."""
        return self._writer.shared_errors(doing)


class CentralStorageStrategy(Strategy):
    """Synchronous training on one node with one copy of each variable (tf.distribute.experimental's strategy).

    Values that replicas assign are combined by the variable's aggregation and applied once; rows that they scatter are
    applied as each gives them, whatever the aggregation (as TensorFlow does); ``synchronization`` means nothing. The
    numbers are
    otherwise those of MirroredStrategy, which takes as much memory for variables and optimizer as there are replicas.

    Two ways to use it. Several devices in one process: the copy is on ``parameter_device``. Or the ranks of one node:
    start with ``mpirun``, and the copy is in memory that they share. Then making, copying and assigning a variable is
    collective wherever it is done, also outside ``run`` and in the function given to ``extended.update``: call it on
    every rank, in the same order, with the same value. All meet, the first rank writes, and all meet again, so that
    nobody reads half of an update. Optimizers compute their updates on the first rank alone: state that a subclass of
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
        comm = Communicator(ranks, owner=type(self).__name__, advice=FOR_STRATEGIES) if size > 1 else None
        if comm is not None and not comm.shares_memory:
            comm.close()
            raise ValueError(
                f"CentralStorageStrategy is for ranks that share memory, and its {size} ranks do not: they are on "
                "several nodes, /dev/shm has no room (docker run --shm-size=8g), or there is no native core "
                "(docs/install.md); use " + _INSTEAD
            )
        super().__init__(CentralStorageExtended(self, devices, parameters, comm))
