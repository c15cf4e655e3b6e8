"""ParameterServerExtended: one copy of each variable, on a server.

The base of both parameter server strategies. Replicas of a worker are in sync, workers are not. Variables are on
servers, and gradients are applied there.
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
from mpidist.parameter_server import messages
from mpidist.parameter_server.connection import Connection, ask_all
from mpidist.parameter_server.link import Link
from mpidist.parameter_server.messages import Kind, Request, RequestPart
from mpidist.parameter_server.pickling import pack
from mpidist.parameter_server.remote import RemoteComponent, component_of, pull_all
from mpidist.parameter_server.sharded_variable import ShardedVariable, div_sizes, offsets_of
from mpidist.strategies.base import Strategy
from mpidist.strategies.central_storage import CentralExtended
from mpidist.strategies.strategy_extended import StrategyExtended
from mpidist.training.optimizer import Optimizer
from mpidist.values import IndexedSlices, Variable
from mpidist.values.indexed_slices import check_indices
from mpidist.values.placement import on_host

# Their values say all, and stay; of what may be changed in place its bytes are compared.
_UNCHANGING = (bool, int, float, str, tuple, np.generic, type(None))


def _number_of_shards(partitioner: Callable[..., Sequence[int]], array: Array, name: str) -> int:
    """Return into how many parts along the first axis a variable is cut."""
    if array.ndim == 0:
        return 1
    shards = list(partitioner(array.shape, array.dtype))
    if len(shards) != array.ndim or any(count != 1 for count in shards[1:]) or shards[0] < 1:
        raise ValueError(
            f"the partitioner returned {shards} for variable {name!r} of shape {array.shape}; expected one number per "
            "axis, all 1 but the first: variables are cut along their first axis"
        )
    return shards[0]


def _hyperparameters(optimizer: Optimizer) -> dict[str, object]:
    """Return an optimizer's public settings, to be compared with later ones."""
    return {
        name: value if isinstance(value, _UNCHANGING) else pack(value, lambda _: None, f"{name} of {optimizer.name}")
        for name, value in optimizer.public_attributes().items()
    }


class _OptimizerAtServers:
    """The servers' knowledge of an optimizer: its number at each, variables with slots."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.numbers: dict[Connection, int] = {}
        self.variables: set[Variable] = set()
        self.parameters: dict[str, object] = {}
        # Updates by all workers, as of the last one of this worker, and what its counter had been assigned until then.
        self.count = 0
        self.writes: int | None = None


class ParameterServerExtended(CentralExtended):
    """Local replicas in sync; variables on the servers of a link.

    Args:
        strategy: The strategy it belongs to.
        link: Connects this process with the servers.
        devices: Of this process's replicas; its share of the GPUs, or the CPU, by default.
        cluster_resolver: The resolver of ``strategy.cluster_resolver``.
        gives_initial_values: Whether this process's initial values count; others wait for them.
        max_staleness: How many steps this worker may be ahead of the slowest; None for any number.
        partitioner: Says into how many shards a new variable is cut; None cuts none.
        number: The number of the strategy on the link; the next one by default.
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
        self._link = link
        self._gives_initial_values = gives_initial_values
        self._max_staleness = max_staleness
        self._partitioner = partitioner
        self.number = link.open() if number is None else number
        if max_staleness is not None:
            link.connections[0].control("start clock", self.number, doing="starting to count steps")
        self._created = 0
        self._dealt = 0
        self._beside: list[int] = []
        self._optimizers: dict[Optimizer, _OptimizerAtServers] = {}

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The servers' devices, in the order in which variables are dealt to them."""
        return tuple(str(Device("cpu", 0, "ps", index)) for index in range(len(self._link.servers)))

    # Variables ------------------------------------------------------------------------------------------------

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Variable) -> Iterator[None]:
        """Create the variables of the block on the server of ``colocate_with_variable``; see ``StrategyExtended``."""
        with super().colocate_vars_with(colocate_with_variable):
            component = component_of(self.own_variable(colocate_with_variable, "colocate_vars_with()"))
            self._beside.append(self._link.connections.index(component.connection))
            try:
                yield
            finally:
                self._beside.pop()

    def create_variable(self, array: Array, **properties: Any) -> Any:
        """See ``StrategyExtended``: a ShardedVariable where the partitioner says so."""
        create, name = super().create_variable, properties["name"]
        shards = 1
        if self._partitioner is not None and not self._beside:
            shards = _number_of_shards(self._partitioner, array, name)
        if shards == 1:
            return create(array, **properties)
        parts = np.split(array, offsets_of(div_sizes(len(array), shards))[1:-1])
        variables = [
            create(part, **{**properties, "initial_value": part, "name": f"{name}/part_{i}"})
            for i, part in enumerate(parts)
        ]
        return ShardedVariable(variables, name=name)

    def _next_server(self) -> int:
        """Return the server of the next variable: round-robin, unless it is colocated."""
        if self._beside:
            return self._beside[-1]
        self._dealt += 1
        return (self._dealt - 1) % len(self._link.servers)

    def _make_component(self, array: Array, properties: dict[str, Any]) -> RemoteComponent:
        server, name, array = self._next_server(), properties["name"], on_host(array)
        connection, kind = self._link.connections[server], Kind(array.shape, array.dtype)
        key, doing = (self.number, self._created), f"creating variable {name!r}"
        self._created += 1
        described = f"variable {name!r} of shape {kind.shape} and dtype {kind.dtype} on ps {server}"
        others = self._link.agree(("variable", *key), described, doing)
        if others != described:
            raise MismatchError(
                f"this worker made {described} as number {key[1]} of its strategy, and another worker made {others}; "
                "expected: every worker creates the same variables in the same order"
            )
        number = connection.control("create", key, name, kind.shape, kind.dtype, properties["constraint"], doing=doing)
        component = RemoteComponent(connection, number, kind, name, self.parameter_devices[server])
        if self._gives_initial_values:
            connection.ask(Request([component.part(messages.ASSIGN, array)]))
        else:
            doing = f"waiting for the first worker's initial value of variable {name!r}"
            connection.control("await", number, doing=doing)
        return component

    def _update_device(self, component: object) -> str:
        return self.worker_devices[0]

    def read_all(self, variables: Sequence[Variable]) -> list[Array]:
        """See ``StrategyExtended``: one message for each server."""
        return pull_all([self.own_variable(variable, "read_all()") for variable in variables])

    # Optimizers -----------------------------------------------------------------------------------------------

    def apply_gradients(self, optimizer: Optimizer, summed: Iterable[tuple[list[Any], list[Variable]]]) -> None:
        """Push gradients to the servers, which apply them; one message for each."""
        pairs = [pair for gradients, variables in summed for pair in zip(gradients, variables, strict=True)]
        for gradient, variable in pairs:
            if isinstance(gradient, IndexedSlices):
                check_indices(gradient.indices, variable.shape[0])
        known = self._introduce(optimizer, [variable for _, variable in pairs])
        counter = component_of(optimizer.iterations)
        if known.writes != counter.writes:
            self._recount(optimizer, known)
        rate = optimizer.rate_at(known.count)
        parts: list[tuple[Connection, RequestPart]] = []
        for gradient, variable in pairs:
            component = component_of(variable)
            extra: dict[str, Any] = {"step": known.count, "setting": rate}
            extra["optimizer"] = known.numbers[component.connection]
            if isinstance(gradient, IndexedSlices):
                part = component.rows_part(messages.UPDATE_ROWS, gradient, **extra)
            else:
                part = component.part(messages.UPDATE, on_host(gradient), **extra)
            parts.append((component.connection, part))
        parts.append((counter.connection, counter.part(messages.COUNT)))
        if self._max_staleness is not None:
            # Last, so that the step is counted before this worker waits for slower ones.
            tick = RequestPart(messages.TICK, self.number, setting=self._max_staleness)
            parts.append((self._link.connections[0], tick))
        known.count = int(ask_all(parts)[len(pairs)])

    def _recount(self, optimizer: Optimizer, known: _OptimizerAtServers) -> None:
        """Read the number of updates: at first, and where it may have been set.

        A restored checkpoint sets it, for instance. The servers, which go on from the last update, begin at it as well.
        """
        counter = component_of(optimizer.iterations)
        is_first, known.writes = known.writes is None, counter.writes
        known.count = int(counter.value())
        for connection, number in () if is_first else known.numbers.items():
            doing = f"setting the iterations of {optimizer.name}"
            connection.control("rewind", number, known.count, doing=doing)

    def forget_counts(self) -> None:
        """Forget the numbers of updates of all optimizers: another process may have set them."""
        for known in self._optimizers.values():
            known.writes = None if known.writes is None else -1

    def number_of(self, optimizer: Optimizer, number: int | None = None) -> int:
        """Return the number by which the servers know an optimizer.

        One without a number gets the next, or ``number``.
        """
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = _OptimizerAtServers(len(self._optimizers) if number is None else number)
        return self._optimizers[optimizer].ordinal

    def _introduce(self, optimizer: Optimizer, variables: Sequence[Variable]) -> _OptimizerAtServers:
        """Tell the servers of a new or changed optimizer, and of new variables' slots."""
        self.number_of(optimizer)
        known = self._optimizers[optimizer]
        parameters = _hyperparameters(optimizer)
        new: dict[Connection, dict[int, dict[str, int]]] = {}
        if parameters != known.parameters:
            new = {connection: {} for connection in known.numbers}
        for variable in variables:
            if variable in known.variables:
                continue
            component = component_of(variable)
            slots = {name: component_of(slot).number for name, slot in optimizer.slots_of(variable).items()}
            new.setdefault(component.connection, {})[component.number] = slots
        for connection, slots_of in new.items():
            key, doing = (self.number, known.ordinal), f"introducing optimizer {optimizer.name!r}"
            known.numbers[connection] = connection.control("optimizer", key, optimizer.rule(), slots_of, doing=doing)
        known.variables.update(variables)
        known.parameters = parameters
        return known

    # Housekeeping ---------------------------------------------------------------------------------------------

    def copy_for(self, strategy: Strategy) -> StrategyExtended:
        """See ``StrategyExtended``."""
        raise ValueError(
            f"{type(self.strategy).__name__} cannot be copied, since its variables are on servers; build a new one"
        )

    def require_checkpoints(self, method: str) -> None:
        """See ``StrategyExtended``."""
        if not self.should_checkpoint:
            raise RuntimeError(
                f"{method} was called on {self._link.task}, and the chief alone saves and restores the variables of "
                f"{type(self.strategy).__name__}, for all; expected: `if strategy.extended.should_checkpoint:`"
            )

    def close(self) -> None:
        """See ``StrategyExtended``."""
        if not self.is_closed:
            self._link.close(self.number)
        super().close()
