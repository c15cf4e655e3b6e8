"""Store: the variables, optimizers and agreements of a server. Service: performs the clients' requests on it.

One thread does everything, and never waits for one client alone. It polls all messages in flight, so that a client that
stops in the middle of a message delays no other client.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.collectives.mpi.waiting import Naps, Steps
from mpidist.core import message_tags
from mpidist.core.context import get_strategy
from mpidist.core.errors import PeerError, RankLostError
from mpidist.core.options import VariableAggregation, VariableSynchronization
from mpidist.core.text import tell_user
from mpidist.parameter_server.transport import GIVE_UP, INDEX, INLINE_BYTES, MessagePipe, PackedMessage
from mpidist.topology import import_mpi
from mpidist.topology.exit import lost_ranks, says_rank_is_lost
from mpidist.training.optimizer import Optimizer
from mpidist.values import IndexedSlices, Variable, scatter
from mpidist.values.component import ArrayComponent, Assignment, assign_add, assign_sub
from mpidist.values.synchronization import variable_of

if TYPE_CHECKING:
    from mpi4py import MPI

_ADDING = {"assign_add": assign_add, "assign_sub": assign_sub}
_OPS = (scatter.ADD, scatter.SUB, scatter.MUL, scatter.DIV, scatter.MIN, scatter.MAX, scatter.UPDATE)
_SCATTERING = {op.name: op for op in _OPS}
Ready = Callable[[], bool]
"""A request waits until this is True."""


def _nothing() -> None:
    return None


class ServedComponent(ArrayComponent):
    """A server's copy of a variable. An array that is being sent is never written."""

    def __init__(self, array: Array, name: str) -> None:
        super().__init__(array, name, "cpu:0")
        self._lent: Callable[[], Array | None] = _nothing

    def lend(self) -> Array:
        """Return a view to be sent. The value is copied before a write while the view exists."""
        view = self._lent()
        if view is None:
            view = self.array[...]
            self._lent = weakref.ref(view)
        return view

    def take(self, array: Array) -> None:
        """Use ``array`` itself as the new value."""
        self._hold(array)
        self._lent = _nothing

    def change(self, how: Assignment, array: Array) -> None:
        """Combine the value with an array of the same shape and dtype."""
        how(self.writable(), array)

    def writable(self) -> Array:
        """See ``ArrayComponent``. Copies the value first if it is being sent."""
        if self._lent() is not None:
            self.take(self.array.copy())
        return self.array


class Store:
    """The variables of one server. Clients call the public methods, which get arrays as bytes."""

    def __init__(self, clients: Sequence[int]) -> None:
        self._first_client = clients[0] if clients else None
        # Workers that have neither left nor failed.
        self._clients = set(clients)
        self._variables: list[Variable] = []
        self._components: list[ServedComponent] = []
        self._ids: dict[tuple[int, int], int] = {}
        self._strategy_of: list[int] = []
        self._initialized: set[int] = set()
        self._optimizers: list[Optimizer] = []
        self._optimizer_ids: dict[tuple[int, int], int] = {}
        # Step of the last update, by optimizer and variable.
        self._updates: dict[tuple[int, int], int] = {}
        self._agreed: dict[object, object] = {}
        # Steps of each worker by strategy, for those with a limit of the lead.
        self._steps: dict[int, dict[int, int]] = {}
        # Strategies with workers that wait in a barrier, and with those that have closed the strategy.
        self._paused: set[tuple[int, int]] = set()
        self._closed: set[tuple[int, int]] = set()
        self._arrived: dict[tuple[int, int], set[int]] = {}

    # Variables ------------------------------------------------------------------------------------------------

    def read(self, variable: int) -> Array:
        """Return the value."""
        return self._components[variable].lend()

    def gather(self, variable: int, indices: Array) -> Array:
        """Return rows."""
        return self._components[variable].sparse_read(indices.view(INDEX))

    def assign(self, variable: int, array: Array) -> None:
        """Replace the value."""
        self._components[variable].take(self._shaped(variable, array))
        self._initialized.add(variable)

    def add(self, variable: int, how: str, array: Array) -> None:
        """Add to the value, or subtract."""
        self._components[variable].change(_ADDING[how], self._shaped(variable, array))

    def scatter(self, variable: int, how: str, indices: Array, rows: Array) -> None:
        """Change rows."""
        self._components[variable].scatter_by(_SCATTERING[how], self._slices(variable, indices, rows))

    def update(self, variable: int, optimizer: int, step: int, rate: float, *gradient: Array) -> None:
        """Apply an optimizer. The gradient is one array, or indices and rows."""
        target = self._variables[variable]
        value = self._shaped(variable, *gradient) if len(gradient) == 1 else self._slices(variable, *gradient)
        # A worker knows the number of updates as of its last one. Other workers may have sent more since then.
        step = self._updates[optimizer, variable] = max(step, self._updates.get((optimizer, variable), -1) + 1)
        self._optimizers[optimizer].update_one(target, value, rate, step)

    def count(self, variable: int) -> int:
        """Add one to a number, and return it."""
        component = self._components[variable]
        component.assign_by(assign_add, 1)
        return int(component.value())

    def _shaped(self, variable: int, array: Array) -> Array:
        component = self._components[variable]
        shaped: Array = np.ndarray(component.shape, component.dtype, array)
        return shaped

    def _slices(self, variable: int, indices: Array, rows: Array) -> IndexedSlices:
        component, positions = self._components[variable], indices.view(INDEX)
        values = rows.view(component.dtype).reshape(len(positions), *component.shape[1:])
        return IndexedSlices(values, positions, component.shape)

    # Rare requests --------------------------------------------------------------------------------------------

    def control(self, name: str, packed: bytes) -> object:
        """Call another method with pickled arguments, and pickle its result."""
        result = getattr(self, name)(*pickle.loads(packed))
        return result if callable(result) else pickle.dumps(result)

    def agree(self, key: object, value: object) -> object:
        """Return the first value that a worker has sent for ``key``."""
        return self._agreed.setdefault(key, value)

    def create(self, key: tuple[int, int], name: str, shape: tuple[int, ...], dtype: DType, constraint: object) -> int:
        """Return the number of a variable, created at the first request. All workers agreed on its properties."""
        if key not in self._ids:
            component = ServedComponent(np.zeros(shape, dtype), name)
            self._ids[key] = len(self._variables)
            self._strategy_of.append(key[0])
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

    def initial_value(self, variable: int) -> Ready:
        """Wait until the first worker has sent the initial value."""
        strategy = self._strategy_of[variable]

        def is_ready() -> bool:
            if variable in self._initialized:
                return True
            if self._is_through(strategy, self._first_client):
                raise PeerError(
                    "worker 0 ended, or closed its strategy, before it created this variable, and its initial values "
                    "count. Create the same variables on every worker"
                )
            return False

        return is_ready

    def optimizer(self, key: tuple[int, int], optimizer: Optimizer, slots: dict[int, dict[str, int]]) -> int:
        """Add an optimizer, or change its settings, and add slots. Return its number."""
        if key not in self._optimizer_ids:
            self._optimizer_ids[key] = len(self._optimizers)
            self._optimizers.append(optimizer)
        number = self._optimizer_ids[key]
        self._optimizers[number].take_settings(optimizer)
        for variable, names in slots.items():
            variables = {name: self._variables[slot] for name, slot in names.items()}
            self._optimizers[number].keep_slots(self._variables[variable], variables)
        return number

    def rewind(self, optimizer: int, count: int) -> None:
        """Continue from ``count`` updates, if a restored checkpoint has set back the number."""
        # Each other worker may have sent an update that was not counted yet when the number was read.
        most = count + len(self._clients) - 1
        for key, step in self._updates.items():
            if key[0] == optimizer and step >= most:
                self._updates[key] = count - 1

    # Steps of workers -----------------------------------------------------------------------------------------

    def start_clock(self, strategy: int) -> None:
        """Count the steps of a strategy. Workers that have not created it yet also delay the others."""
        self._steps.setdefault(strategy, dict.fromkeys(self._clients, 0))

    def tick(self, strategy: int, client: int, most_ahead: int) -> Ready:
        """Count a step of a worker, and wait while it is too far ahead."""
        steps = self._steps[strategy]
        steps[client] = mine = steps[client] + 1

        def is_ready() -> bool:
            others = (count for other, count in steps.items() if (strategy, other) not in self._paused)
            return mine - min(others, default=mine) <= most_ahead

        return is_ready

    def barrier(self, strategy: int, number: int, client: int) -> Ready:
        """Wait until all workers that use the strategy are in the barrier."""
        arrived = self._arrived.setdefault((strategy, number), set())
        arrived.add(client)
        # It waits for the others, so they must not wait for its steps.
        self._paused.add((strategy, client))

        def is_ready() -> bool:
            if not all(self._is_through(strategy, other) for other in self._clients - arrived):
                return False
            self._arrived.pop((strategy, number), None)
            # No worker is ahead of another.
            self._paused = {paused for paused in self._paused if paused[0] != strategy}
            steps = self._steps.get(strategy, {})
            steps.update(dict.fromkeys(steps, max(steps.values(), default=0)))
            return True

        return is_ready

    def close(self, strategy: int, client: int) -> None:
        """Stop waiting for a worker that has closed a strategy."""
        self._closed.add((strategy, client))
        self._steps.get(strategy, {}).pop(client, None)

    def leave(self, client: int) -> None:
        """Stop waiting for a worker that has left or failed."""
        self._clients.discard(client)
        for steps in self._steps.values():
            steps.pop(client, None)

    def _is_through(self, strategy: int, client: int | None) -> bool:
        return client not in self._clients or (strategy, client) in self._closed


# Requests -----------------------------------------------------------------------------------------------------------


class _Client:
    """A client, which has at most one request in flight."""

    def __init__(self, comm: MPI.Intracomm, rank: int, name: str) -> None:
        self.rank = rank
        self.name = name
        self.pipe = MessagePipe(comm, rank, message_tags.REPLY, message_tags.REQUEST)
        self.requests = 0


class Service:
    """The server's end of a link. ``clients``: rank and name. Without its ``coordinator`` the server ends."""

    def __init__(self, comm: MPI.Intracomm, clients: Sequence[tuple[int, str]], coordinator: int | None = None) -> None:
        self._comm = comm
        self._coordinator = coordinator
        self._clients = [_Client(comm, rank, name) for rank, name in clients]
        self._store = Store([rank for rank, _ in clients])
        self._moving: dict[_Client, Steps[None]] = {}

    def run(self) -> None:
        """Serve until every client has left.

        Raises:
            RankLostError: The coordinator failed.
        """
        naps = Naps()
        for client in self._clients:
            client.pipe.expect()
        firsts = [client.pipe.first for client in self._clients]
        test_any = import_mpi().Request.Testany
        while self._clients:
            index, has_come = -1, False
            try:
                index, has_come = test_any(firsts)
            except Exception as error:
                if not says_rank_is_lost(error):
                    raise
                gone = lost_ranks(self._comm)
                for client in [client for client in self._clients if client.rank in gone]:
                    self._lose(client)
            if has_come and index >= 0:
                client = self._clients[index]
                self._moving[client] = self._handle(client)
                naps.reset()
            if self._moving:
                self._move()
            if len(firsts) != len(self._clients):
                firsts = [client.pipe.first for client in self._clients]
            elif not has_come or index < 0:
                naps.take(bool(self._moving))

    def _move(self) -> None:
        """Advance all requests. Most of them end at once."""
        for client, steps in list(self._moving.items()):
            try:
                next(steps)
            except StopIteration:
                del self._moving[client]
            except Exception as error:
                if not says_rank_is_lost(error):
                    raise
                self._lose(client)

    def _handle(self, client: _Client) -> Steps[None]:
        pipe = client.pipe
        try:
            while not pipe.has_come():
                yield
        except MemoryError as error:
            # The client's message cannot be received, so the server ends, and with it the job.
            raise MemoryError(
                f"this server has {error} that a worker sends to a variable; expected: more servers, on more nodes, or "
                "variables in shards (mpidist.experimental.partitioners)"
            ) from error
        client.requests += 1
        arrays, pipe.arrays = iter(pipe.arrays), []
        results: list[object] = []
        found: list[Array] = []
        failure: bytes | None = None
        method = ""
        try:
            if pipe.is_split:
                self._check_given_up(client)
            for method, args, count in pipe.content:
                result = getattr(self._store, method)(*args, *[next(arrays) for _ in range(count)])
                while callable(result):
                    if result():
                        result = None
                    else:
                        yield
                if isinstance(result, np.ndarray):
                    found.append(result)
                    result = ...
                results.append(result)
        except Exception as error:
            if says_rank_is_lost(error):
                raise
            failure, found = _pickled(error), []
        while not pipe.is_sent():
            yield
        reply = PackedMessage((failure, results), found)
        pipe.send(reply)
        if method != "leave":
            pipe.expect()
        # Keep the views in `found` until they are sent, so that nothing writes to their arrays.
        while (reply.following or method == "leave") and not pipe.is_sent():
            yield
        if method == "leave":
            pipe.close()
            self._clients.remove(client)

    def _check_given_up(self, client: _Client) -> None:
        """Raise PeerError if the client no longer waits for this request."""
        number = bytearray(GIVE_UP.size)
        # Open MPI receives what has arrived after it has searched, so the first call may miss the message.
        self._comm.Iprobe(client.rank, message_tags.GIVE_UP)
        while self._comm.Iprobe(client.rank, message_tags.GIVE_UP):
            # It was sent before the arrays could change. It may also be late, for an earlier request.
            self._comm.Recv([number, import_mpi().BYTE], client.rank, message_tags.GIVE_UP)
            if GIVE_UP.unpack(number) == (client.requests,):
                raise PeerError("the request was given up before all of it had come; nothing was done")

    def _lose(self, client: _Client) -> None:
        """Remove a failed client."""
        tell_user(f"{client.name} was lost; this server serves it no more")
        self._clients.remove(client)
        self._moving.pop(client, None)
        self._store.leave(client.rank)
        _kept.append(client)
        if client.rank == self._coordinator:
            raise RankLostError(
                f"{client.name} was lost, which coordinates; start the job again and restore the newest checkpoint"
            )


# Failed clients, because MPI may still write to their buffers.
_kept: list[_Client] = []


def _pickled(error: Exception) -> bytes:
    """Pickle an error, or its text if the error cannot be restored or is large."""
    with suppress(Exception):  # pickling calls methods of the program's objects
        data = pickle.dumps(error)
        pickle.loads(data)
        if len(data) <= INLINE_BYTES // 2:
            return data
    return pickle.dumps(PeerError(f"{type(error).__name__}: {error}"[: INLINE_BYTES // 8]))
