"""CentralStorageStrategy: replicas of one node that share one copy of each variable.

The values that replicas assign are combined by the variable's aggregation and applied once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from mpidist.arrays.dtypes import Array
from mpidist.collectives import Communicator
from mpidist.collectives.single_writer import SingleWriter
from mpidist.core import context, nest
from mpidist.core.context import Args, Frame, Kwargs, ReplicaContextLike
from mpidist.core.options import VariableSynchronization
from mpidist.core.text import parse_device
from mpidist.strategies.base import Strategy
from mpidist.strategies.mirrored import ReplicatedExtended, open_ranks, ranks_of_node
from mpidist.strategies.replica_devices import check_device, check_devices
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
    """Replicas in sync that share one copy of each variable. A subclass creates the copy.

    All variables are ON_WRITE, because they have one copy.
    """

    is_central = True

    def create_variable(self, array: Array, **properties: Any) -> Variable:
        """See ``StrategyExtended``."""
        properties["synchronization"] = VariableSynchronization.ON_WRITE
        return variable_of(self.strategy, [self._make_component(array, properties)], **properties)

    def _make_component(self, array: Array, properties: dict[str, Any]) -> Component:
        """Create the copy of a variable; ``properties`` are the arguments of ``Variable``."""
        raise NotImplementedError

    def _update_device(self, component: Component) -> str:
        """Return the device that is current while ``component`` is updated."""
        return component.device

    def _call_updates(
        self, var: Variable | None, fn: Callable[..., object], args: Args, kwargs: Kwargs
    ) -> list[object]:
        device = self.parameter_devices[0] if var is None else self._update_device(var.values[0])
        with self.shared_errors("an update function"):
            args, kwargs = nest.map_structure(self._sole, (args, kwargs))
            with place_at(device).current(), context.entered(Frame(self.strategy, None, 0)):
                return [fn(*args, **kwargs) if var is None else fn(var.values[0], *args, **kwargs)]

    def update_in_replica(self, replica: ReplicaContextLike, var: Variable, fn: Callable[[Any], object]) -> None:
        """See ``StrategyExtended``: the replicas wait for each other, and the one component is updated once."""
        update = partial(self._update, self.own_variable(var, "update"), fn, (), {}, False)
        replica.meet(("update", var.label), lambda _: update(), (), {})

    def _sole(self, value: object) -> object:
        """Return an argument of an update as one value."""
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

    ``parameter_device`` None stands for the device of a lone replica, and otherwise for the host.
    """

    experimental_between_graph = True  # as in TensorFlow

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
        """The one device of all variables."""
        return (self._parameter_device,)

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
        # One block for all variables and their slots. One rank does the work.
        with self._writer.write_block(f"applying gradients by optimizer {optimizer.name!r}") as writes:
            if writes:
                optimizer.update_copies(summed)
            else:
                for _ in summed:  # each item is a collective
                    pass

    def copy_for(self, strategy: Strategy) -> StrategyExtended:
        """See ``StrategyExtended``."""
        if self.communicator is not None:
            return super().copy_for(strategy)
        return CentralStorageExtended(strategy, self.worker_devices, self._parameter_device, None)


class VariableWriter(SingleWriter):
    """The writer of shared variables. It first assigns the restored values that wait for variables."""

    @contextmanager
    def write_block(self, text: str) -> Iterator[bool]:
        """See ``SingleWriter``."""
        give_restored_values()
        with super().write_block(text) as writes:
            yield writes


class SharedComponent(ArrayComponent):
    """A copy in the shared memory of several ranks. Creating, assigning and copying it are collective.

    The first rank's value is assigned. The values of the other ranks are checked. ``kind`` is a text that the ranks
    compare.
    """

    def __init__(self, writer: SingleWriter, array: Array, name: str, kind: str) -> None:
        self._writer, self._kind = writer, kind
        # Several variables may have one name.
        shape = f"{array.dtype}{list(array.shape)}"
        self._label = f"variable {name!r}, {shape} {kind}, number {writer.next_number()} of its strategy"
        super().__init__(writer.shared_copy(array, f"creation of {self._label}"), name, HOST.device)

    def _write(self, name: str, check: Callable[[], Any], write: Callable[[Any], object]) -> SharedComponent:
        """Write what ``check`` returns, on the first rank alone (collective)."""
        doing = f"{name} of {self._label}"
        with self._writer.shared_errors(doing):
            checked = check()
        with self._writer.write_block(doing) as writes:
            if writes:
                write(checked)
        return self

    def assign_by(self, how: Assignment, value: object) -> SharedComponent:
        """See ``Assignable``."""
        return self._write(how.__name__, lambda: as_value_of(self, value), lambda array: how(self.array, array))

    def scatter_by(self, how: scatter.ScatterOp, slices: object) -> SharedComponent:
        """See ``Assignable``."""
        check = lambda: scatter.check_slices(slices, self)  # noqa: E731
        return self._write(how.name, check, lambda checked: how.apply(self.array, checked))

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

    Values that replicas assign are combined by the variable's aggregation and applied once. Rows that they scatter are
    applied as each replica passes them, whatever the aggregation, as in TensorFlow. ``synchronization`` is ignored.
    The numbers are otherwise those of MirroredStrategy, which needs one copy of variables and optimizer per replica.

    It has two uses. Several devices in one process: the copy is on ``parameter_device``. Or the ranks of one node:
    start with ``mpirun``, and the copy is in shared memory. Then creating, copying and assigning a variable is
    collective, also outside of ``run`` and in the function given to ``extended.update``: call it on every rank, in the
    same order, with the same value. The first rank writes while the others wait. Optimizers compute their updates on
    the first rank alone. State that a subclass of ``Optimizer`` or a ``constraint`` keeps outside of variables changes
    only there.

    Collective over the ranks that take part.

    Args:
        compute_devices: Device strings of this rank's replicas. By default its share of the node's GPUs, which is all
            of them in a job of one process, or the CPU if there are none.
        parameter_device: Device of the variables. By default the compute device of a single replica, or the host.
            Several ranks need the host.
        communicator: An mpi4py communicator of the ranks that take part, all on one node. By default all ranks of the
            node. Pass ``MPI.COMM_SELF`` for this process alone. Extension.

    Raises:
        ValueError: Wrong devices; a GPU as ``parameter_device`` of several ranks; ranks on several nodes. Use
            MultiWorkerMirroredStrategy or parameter servers for those.
        TypeError: Devices that are no strings.
        DeviceError: A GPU, and CuPy is missing or unusable.
        LaunchError: MPI cannot be started.

    Variables raise MemoryError, on all ranks, if /dev/shm has no room for them.

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
        ranks = communicator or ranks_of_node(self, _INSTEAD)
        size = ranks.Get_size()
        if size > 1 and parameters is not None and parse_device(parameters).kind != "cpu":
            raise ValueError(
                f"parameter_device is {parameter_device!r}, and the strategy has {size} ranks, which share memory of "
                "the host; expected parameter_device='cpu:0', or one process that has all GPUs"
            )
        comm = open_ranks(self, ranks)
        if comm is not None and not comm.shares_memory:
            comm.close()
            raise ValueError(
                f"CentralStorageStrategy is for ranks that share memory, and its {size} ranks do not: they are on "
                "several nodes, /dev/shm has no room (docker run --shm-size=8g), or there is no native core "
                "(docs/install.md); use " + _INSTEAD
            )
        super().__init__(CentralStorageExtended(self, devices, parameters, comm))
