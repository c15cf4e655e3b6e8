"""ParameterServerExtended: the base of both parameter server strategies.

Replicas of a worker are in sync, workers are not. Variables are on servers, which apply the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.cluster_resolver import ClusterResolver
from mpidist.core.errors import MismatchError
from mpidist.core.text import Device
from mpidist.parameter_server.link import Link
from mpidist.parameter_server.pickling import pack
from mpidist.parameter_server.remote import RemoteComponent, component_of, pull_all
from mpidist.parameter_server.sharded_variable import ShardedVariable, div_sizes, offsets_of
from mpidist.parameter_server.transport import Connection, Request, RequestPart, ask_all
from mpidist.strategies.base import Strategy
from mpidist.strategies.central_storage import CentralExtended
from mpidist.strategies.strategy_extended import StrategyExtended
from mpidist.training.optimizer import Optimizer
from mpidist.values import IndexedSlices, Variable
from mpidist.values.indexed_slices import check_indices
from mpidist.values.placement import on_host

# Settings of these types are compared. Others may be modified in place, so their pickles are compared.
_IMMUTABLE = (bool, int, float, str, tuple, np.generic, type(None))


class _OptimizerAtServers:
    """What the servers know of an optimizer: its number at each, and its variables."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.numbers: dict[Connection, int] = {}
        self.variables: set[Variable] = set()
        self.settings: dict[str, object] = {}
        # Updates by all workers as of this worker's last one, and ``writes`` of the counter at that time.
        self.count = 0
        self.writes: int | None = None


class ParameterServerExtended(CentralExtended):
    """Local replicas in sync; variables on the servers of a link.

    Only one process ``gives_initial_values``. The others wait for them. ``number`` is that of the strategy on the link.
    """

    def __init__(
        self,
        strategy: Strategy,
        link: Link,
        devices: tuple[str, ...] | None,
        cluster_resolver: ClusterResolver,
        gives_initial_values: bool,
        max_staleness: int | None = None,
        partitioner: Callable[..., Sequence[int]] | None = None,
        number: int | None = None,
    ) -> None:
        super().__init__(strategy, devices, None, cluster_resolver=cluster_resolver)
        self.link = link
        self._gives_initial_values = gives_initial_values
        self._max_staleness = max_staleness
        self._partitioner = partitioner
        self.number = link.open() if number is None else number
        if max_staleness is not None:
            link.connections[0].control("start_clock", self.number, doing="starting to count steps")
        self._created = 0
        self._assigned = 0
        self._colocated: list[int] = []
        self._optimizers: dict[Optimizer, _OptimizerAtServers] = {}

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The servers' devices, in the order in which they get variables."""
        return tuple(str(Device("cpu", 0, "ps", index)) for index in range(len(self.link.servers)))

    # Variables ------------------------------------------------------------------------------------------------

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Variable) -> Iterator[None]:
        """Create the variables of the block on the server of ``colocate_with_variable``; see ``StrategyExtended``."""
        with super().colocate_vars_with(colocate_with_variable):
            component = component_of(self.own_variable(colocate_with_variable, "colocate_vars_with()"))
            self._colocated.append(self.link.connections.index(component.connection))
            try:
                yield
            finally:
                self._colocated.pop()

    def create_variable(self, array: Array, **properties: Any) -> Any:
        """See ``StrategyExtended``. Several shards make a ShardedVariable."""
        create, name = super().create_variable, properties["name"]
        shards = 1
        if self._partitioner is not None and not self._colocated and array.ndim:
            counts = list(self._partitioner(array.shape, array.dtype))
            if len(counts) != array.ndim or any(count != 1 for count in counts[1:]) or counts[0] < 1:
                raise ValueError(
                    f"the partitioner returned {counts} for variable {name!r} of shape {array.shape}; expected one "
                    "number per axis, all 1 but the first: variables are cut along their first axis"
                )
            shards = counts[0]
        if shards == 1:
            return create(array, **properties)
        parts = np.split(array, offsets_of(div_sizes(len(array), shards))[1:-1])
        variables = [
            create(part, **{**properties, "initial_value": part, "name": f"{name}/part_{i}"})
            for i, part in enumerate(parts)
        ]
        return ShardedVariable(variables, name=name)

    def _make_component(self, array: Array, properties: dict[str, Any]) -> RemoteComponent:
        if self._colocated:
            server = self._colocated[-1]
        else:
            server = self._assigned % len(self.link.servers)
            self._assigned += 1
        name, array, connection = properties["name"], on_host(array), self.link.connections[server]
        key, doing = (self.number, self._created), f"creating variable {name!r}"
        self._created += 1
        described = f"variable {name!r} of shape {array.shape} and dtype {array.dtype} on ps {server}"
        others = self.link.agree(("variable", *key), described, doing)
        if others != described:
            raise MismatchError(
                f"this worker made {described} as number {key[1]} of its strategy, and another worker made {others}; "
                "expected: every worker creates the same variables in the same order"
            )
        arguments = key, name, array.shape, array.dtype, properties["constraint"]
        number = connection.control("create", *arguments, doing=doing)
        device = self.parameter_devices[server]
        component = RemoteComponent(connection, number, array.shape, array.dtype, name, device)
        if self._gives_initial_values:
            connection.ask(Request([component.part("assign", "assign() of", array)]))
        else:
            doing = f"waiting for the first worker's initial value of variable {name!r}"
            connection.control("initial_value", number, doing=doing)
        return component

    def _update_device(self, component: object) -> str:
        return self.worker_devices[0]

    def read_all(self, variables: Sequence[Variable]) -> list[Array]:
        """See ``StrategyExtended``: one message for each server."""
        return pull_all([self.own_variable(variable, "read_all()") for variable in variables])

    # Optimizers -----------------------------------------------------------------------------------------------

    def apply_gradients(self, optimizer: Optimizer, summed: Iterable[tuple[list[Any], list[Variable]]]) -> None:
        """Send gradients to the servers, which apply them; one message for each."""
        pairs = [pair for gradients, variables in summed for pair in zip(gradients, variables, strict=True)]
        for gradient, variable in pairs:
            if isinstance(gradient, IndexedSlices):
                check_indices(gradient.indices, variable.shape[0])
        known = self._introduce(optimizer, [variable for _, variable in pairs])
        counter = component_of(optimizer.iterations)
        if known.writes != counter.writes:
            self._recount(optimizer, known)
        rate = float(optimizer.rate_at(known.count))
        parts: list[tuple[Connection, RequestPart]] = []
        for gradient, variable in pairs:
            component = component_of(variable)
            number = known.numbers[component.connection]
            parts.append((component.connection, component.update(gradient, number, known.count, rate)))
        parts.append((counter.connection, counter.part("count", "counting a step in")))
        if self._max_staleness is not None:
            # The last part, so that the step is counted before this worker waits for slower ones.
            args = self.number, self.link.rank, int(self._max_staleness)
            parts.append((self.link.connections[0], RequestPart("tick", args, (), "waiting for slower workers")))
        known.count = ask_all(parts)[len(pairs)]

    def _recount(self, optimizer: Optimizer, known: _OptimizerAtServers) -> None:
        """Read the number of updates, which a restored checkpoint may have set."""
        counter = component_of(optimizer.iterations)
        is_first, known.writes = known.writes is None, counter.writes
        known.count = int(counter.value())
        # Servers continue from the last update, so they must learn of the new number too.
        for connection, number in () if is_first else known.numbers.items():
            doing = f"setting the iterations of {optimizer.name}"
            connection.control("rewind", number, known.count, doing=doing)

    def forget_counts(self) -> None:
        """Forget the numbers of updates of all optimizers, because another process may have set them."""
        for known in self._optimizers.values():
            known.writes = None if known.writes is None else -1

    def number_of(self, optimizer: Optimizer, number: int | None = None) -> int:
        """Return the number of an optimizer at the servers. A new optimizer gets the next one, or ``number``."""
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = _OptimizerAtServers(len(self._optimizers) if number is None else number)
        return self._optimizers[optimizer].ordinal

    def _introduce(self, optimizer: Optimizer, variables: Sequence[Variable]) -> _OptimizerAtServers:
        """Send a new or changed optimizer, and the slots of new variables, to the servers."""
        key = self.number, self.number_of(optimizer)
        known = self._optimizers[optimizer]
        settings: dict[str, object] = {
            name: value if isinstance(value, _IMMUTABLE) else pack(value, lambda _: None, f"{name} of {optimizer.name}")
            for name, value in optimizer.public_attributes().items()
        }
        new: dict[Connection, dict[int, dict[str, int]]] = {}
        if settings != known.settings:
            new = {connection: {} for connection in known.numbers}
        for variable in variables:
            if variable not in known.variables:
                component = component_of(variable)
                slots = {name: component_of(slot).number for name, slot in optimizer.slots_of(variable).items()}
                new.setdefault(component.connection, {})[component.number] = slots
        for connection, slots_of in new.items():
            doing = f"introducing optimizer {optimizer.name!r}"
            known.numbers[connection] = connection.control("optimizer", key, optimizer.rule(), slots_of, doing=doing)
        known.variables.update(variables)
        known.settings = settings
        return known

    # Life cycle -----------------------------------------------------------------------------------------------

    def copy_for(self, strategy: Strategy) -> StrategyExtended:
        """See ``StrategyExtended``."""
        raise ValueError(
            f"{type(self.strategy).__name__} cannot be copied, since its variables are on servers; build a new one"
        )

    def require_checkpoints(self, method: str) -> None:
        """See ``StrategyExtended``."""
        if not self.should_checkpoint:
            raise RuntimeError(
                f"{method} was called on {self.link.task}, and the chief alone saves and restores the variables of "
                f"{type(self.strategy).__name__}, for all; expected: `if strategy.extended.should_checkpoint:`"
            )

    def close(self) -> None:
        """See ``StrategyExtended``."""
        if not self.is_closed:
            self.link.close(self.number)
        super().close()
