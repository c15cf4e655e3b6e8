"""Store: the variables, optimizers and agreements of a server; no messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.core.context import get_strategy
from mpidist.core.errors import PeerError
from mpidist.core.options import VariableAggregation, VariableSynchronization
from mpidist.parameter_server import messages
from mpidist.parameter_server.messages import Kind
from mpidist.training.optimizer import Optimizer
from mpidist.values import IndexedSlices, Variable
from mpidist.values.component import ArrayComponent, Assignment, assign_add, assign_sub
from mpidist.values.scatter import ScatterOp
from mpidist.values.synchronization import variable_of

_ADDING: dict[int, Assignment] = {messages.ASSIGN_ADD.code: assign_add, messages.ASSIGN_SUB.code: assign_sub}
_SCATTERING: dict[int, ScatterOp] = {messages.SCATTER[op.name].code: op for op in messages.SCATTERS}

# What an answer that is not there yet looks like.
NOT_YET = object()


class Clocks:
    """The steps of each worker by strategy, with a limit of its lead.

    Args:
        clients: The ranks of the workers.

    Attributes:
        clients: Those that have neither left nor been lost.
    """

    def __init__(self, clients: Sequence[int]) -> None:
        self.clients = set(clients)
        self._steps: dict[int, dict[int, int]] = {}
        self._paused: set[tuple[int, int]] = set()
        self._closed: set[tuple[int, int]] = set()
        self._meetings: dict[tuple[int, int], set[int]] = {}

    def start(self, strategy: int) -> None:
        """Count the steps of a strategy. Workers that have not come to it yet hold the others back as well."""
        self._steps.setdefault(strategy, dict.fromkeys(self.clients, 0))

    def tick(self, strategy: int, client: int, most_ahead: int) -> Callable[[], object]:
        """Count a step of a worker. The answer comes once its lead over the slowest is small enough."""
        steps = self._steps[strategy]
        steps[client] = mine = steps[client] + 1

        def answer() -> object:
            others = (count for other, count in steps.items() if (strategy, other) not in self._paused)
            return None if mine - min(others, default=mine) <= most_ahead else NOT_YET

        return answer

    def meet(self, meeting: tuple[int, int], client: int) -> Callable[[], object]:
        """Answer once all workers that have not left have come to a meeting."""
        strategy, _ = meeting
        came = self._meetings.setdefault(meeting, set())
        came.add(client)
        # It waits for the others itself, and does not hold them back until they have met.
        self._paused.add((strategy, client))

        def answer() -> object:
            if any((strategy, other) not in self._closed for other in self.clients - came):
                return NOT_YET
            self._meetings.pop(meeting, None)
            # None is ahead of another.
            self._paused = {paused for paused in self._paused if paused[0] != strategy}
            steps = self._steps.get(strategy, {})
            steps.update(dict.fromkeys(steps, max(steps.values(), default=0)))
            return None

        return answer

    def close(self, strategy: int, client: int) -> None:
        """Wait no more for a worker that has closed a strategy."""
        self._closed.add((strategy, client))
        self._steps.get(strategy, {}).pop(client, None)

    def is_through(self, strategy: int, client: int | None) -> bool:
        """Return whether a worker closed a strategy, ended or was lost."""
        return client not in self.clients or (strategy, client) in self._closed

    def forget(self, client: int) -> None:
        """Wait no more for a worker that has left or was lost."""
        self.clients.discard(client)
        for steps in self._steps.values():
            steps.pop(client, None)


class Loan:
    """An array that is being sent to clients: nobody writes it until all have it."""

    __slots__ = ("array", "count")

    def __init__(self, array: Array) -> None:
        self.array = array
        self.count = 0


class ServedComponent(ArrayComponent):
    """A server's copy of a variable. An array that is being sent is never written."""

    def __init__(self, array: Array, name: str) -> None:
        super().__init__(array, name, "cpu:0")
        self._loan = Loan(array)

    def lend(self) -> Loan:
        """Return the array to be sent; the caller gives it back."""
        self._loan.count += 1
        return self._loan

    def take(self, array: Array) -> None:
        """Take ``array``, which the caller does not use any more, as the value."""
        self._hold(array)
        self._loan = Loan(array)

    def change(self, how: Assignment, array: Array) -> None:
        """Change the value by ``how``, with an array of exactly the kind."""
        how(self.writable(), array)

    def writable(self) -> Array:
        """See ``ArrayComponent``."""
        if self._loan.count:
            self.take(self._loan.array.copy())
        return self.array


class Store:
    """The variables of one server.

    Args:
        clients: The ranks that it serves; the initial values of the first count.

    Attributes:
        clocks: Of their steps.
        kinds: Shape and dtype of each variable, by its number.
    """

    def __init__(self, clients: Sequence[int]) -> None:
        self._first_client = clients[0] if clients else None
        self.clocks = Clocks(clients)
        self._variables: list[Variable] = []
        self._components: list[ServedComponent] = []
        self.kinds: list[Kind] = []
        self._ids: dict[tuple[int, int], int] = {}
        self._strategy_of: list[int] = []
        self._initialized: set[int] = set()
        self._optimizers: list[Optimizer] = []
        self._optimizer_ids: dict[tuple[int, int], int] = {}
        # Of the last update of a variable by an optimizer.
        self._steps: dict[tuple[int, int], int] = {}
        self._agreed: dict[object, object] = {}
        self._controls: dict[str, Callable[..., object]] = {
            "agree": self._agreed.setdefault,
            "create": self._create,
            "await": self._await,
            "optimizer": self._add_optimizer,
            "meet": self.clocks.meet,
            "rewind": self._rewind,
            "start clock": self.clocks.start,
            "close": self.clocks.close,
        }

    # Operations -----------------------------------------------------------------------------------------------

    def carry_out(self, part: messages.PartNumbers, arrays: Sequence[Array]) -> Array | Loan | None:
        """Carry out one operation on a variable, and return its result."""
        code, variable, _, optimizer, step, setting = part
        operation = messages.OPERATIONS[code]
        component = self._components[variable]
        if operation is messages.READ:
            return component.lend()
        if operation is messages.GATHER:
            return component.sparse_read(arrays[0])
        if operation is messages.ASSIGN:
            component.take(arrays[0])
            self._initialized.add(variable)
        elif code in _ADDING:
            component.change(_ADDING[code], arrays[0])
        elif code in _SCATTERING:
            component.scatter_by(_SCATTERING[code], IndexedSlices(arrays[1], arrays[0]))
        elif operation is messages.COUNT:
            component.assign_by(assign_add, 1)
            return component.value()
        else:
            target = self._variables[variable]
            gradient = arrays[0] if len(arrays) == 1 else IndexedSlices(arrays[1], arrays[0], target.shape)
            # A worker knows the number of updates as of its last one; those of others since then count as well.
            step = self._steps[optimizer, variable] = max(step, self._steps.get((optimizer, variable), -1) + 1)
            self._optimizers[optimizer].update_one(target, gradient, setting, step)
        return None

    # Rarer things ---------------------------------------------------------------------------------------------

    def control(self, name: str, arguments: tuple[object, ...]) -> object:
        """Carry out a control request. A callable as the answer is asked again and again until it gives one."""
        return self._controls[name](*arguments)

    def _create(self, key: tuple[int, int], name: str, shape: tuple[int, ...], dtype: DType, constraint: object) -> int:
        """Make a variable when it is first asked for, and return its number.

        All workers have agreed on its properties.
        """
        if key not in self._ids:
            component = ServedComponent(np.zeros(shape, dtype), name)
            self._ids[key] = len(self._variables)
            self._strategy_of.append(key[0])
            self.kinds.append(Kind(shape, dtype))
            self._components.append(component)
            self._variables.append(
                variable_of(
                    get_strategy(),
                    [component],
                    initial_value=None,
                    name=name,
                    trainable=False,
                    constraint=constraint,
                    synchronization=VariableSynchronization.ON_WRITE,
                    aggregation=VariableAggregation.NONE,
                )
            )
        return self._ids[key]

    def _await(self, variable: int) -> Callable[[], object]:
        """Answer once the first client has given its initial value."""

        def answer() -> object:
            if variable in self._initialized:
                return None
            if self.clocks.is_through(self._strategy_of[variable], self._first_client):
                raise PeerError(
                    "worker 0 ended, or closed its strategy, before it created this variable, and its initial values "
                    "count. Create the same variables on every worker"
                )
            return NOT_YET

        return answer

    def _add_optimizer(self, key: tuple[int, int], optimizer: Optimizer, slots: dict[int, dict[str, int]]) -> int:
        """Take an optimizer, or its changes, and new slots; return its number."""
        if key not in self._optimizer_ids:
            self._optimizer_ids[key] = len(self._optimizers)
            self._optimizers.append(optimizer)
        number = self._optimizer_ids[key]
        self._optimizers[number].take_settings(optimizer)
        for variable, names in slots.items():
            those = {name: self._variables[slot] for name, slot in names.items()}
            self._optimizers[number].keep_slots(self._variables[variable], those)
        return number

    def _rewind(self, optimizer: int, count: int) -> None:
        """Go on from ``count`` updates if the number was set back.

        A restored checkpoint does that, for instance. Every other worker may have pushed an update that was not counted
        yet as the number was read.
        """
        most = count + len(self.clocks.clients) - 1
        for key, step in self._steps.items():
            if key[0] == optimizer and step >= most:
                self._steps[key] = count - 1
