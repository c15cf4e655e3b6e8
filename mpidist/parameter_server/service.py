"""Service: receives requests, has the store carry them out, and replies. It ends when all clients have left.

One thread does everything, and never waits for one client alone: a request or reply that does not fit into one message
is moved on a little each time around, so that a client that stops in the middle holds up nobody else.
"""

from __future__ import annotations

import pickle
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.waiting import Naps, Steps, all_done
from mpidist.collectives.node.memory import Pool
from mpidist.core import message_tags
from mpidist.core.errors import PeerError, RankLostError
from mpidist.core.text import tell_user
from mpidist.parameter_server import messages
from mpidist.parameter_server.messages import Kind
from mpidist.parameter_server.store import NOT_YET, Loan, Store
from mpidist.topology import import_mpi
from mpidist.topology.exit import lost_ranks, says_rank_is_lost

if TYPE_CHECKING:
    from mpi4py import MPI


class _Client:
    """One client, of which there is at most one request at a time."""

    def __init__(self, comm: MPI.Intracomm, rank: int, name: str) -> None:
        self.rank = rank
        self.name = name
        self.request = bytearray(messages.FIRST_MESSAGE_BYTES)
        self.receive = comm.Recv_init(self.request, rank, message_tags.REQUEST)
        self.sending: list[MPI.Request] = []
        self.requests = 0


class Service:
    """The server's end of a link, which serves the clients.

    Args:
        comm: The communicator of the link.
        clients: Rank and name of each client.
        store: The variables that it serves.
        coordinator: The client without whom there is nothing to do, if there is one.
    """

    def __init__(
        self, comm: MPI.Intracomm, clients: Sequence[tuple[int, str]], store: Store, coordinator: int | None = None
    ) -> None:
        self._comm = comm
        self._coordinator = coordinator
        self._clients = [_Client(comm, rank, name) for rank, name in clients]
        self._store = store
        self._pool = Pool()
        self._moving: dict[_Client, Steps[None]] = {}
        self._byte = import_mpi().BYTE

    def run(self) -> None:
        """Serve until every client has left.

        Raises:
            RankLostError: The coordinator was lost.
        """
        naps = Naps()
        for client in self._clients:
            client.receive.Start()
        receives = [client.receive for client in self._clients]
        test_any = import_mpi().Request.Testany
        while self._clients:
            index, has_come = -1, False
            try:
                index, has_come = test_any(receives)
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
            if len(receives) != len(self._clients):
                receives = [client.receive for client in self._clients]
            elif not has_come or index < 0:
                naps.take(bool(self._moving))

    # Requests -------------------------------------------------------------------------------------------------

    def _move(self) -> None:
        """Move all requests on, of which most end at once."""
        for client, moves in list(self._moving.items()):
            try:
                next(moves)
            except StopIteration:
                del self._moving[client]
            except Exception as error:
                if not says_rank_is_lost(error):
                    raise
                self._lose(client)

    def _handle(self, client: _Client) -> Steps[None]:
        client.requests += 1
        parts = yield from self._read(client)
        results: list[Array] = []
        loans: list[Loan] = []
        has_left = False
        try:
            self._check_given_up(client)
            for part, arrays in parts:
                operation = messages.OPERATIONS[part[0]]
                result: Array | Loan | None = None
                if operation is messages.CONTROL:
                    name, arguments = pickle.loads(arrays[0].tobytes())
                    answer = yield from _until_there(self._store.control(name, arguments))
                    result = np.frombuffer(pickle.dumps(answer), np.uint8)
                elif operation is messages.TICK:
                    yield from _until_there(self._store.clocks.tick(part[1], client.rank, int(part[5])))
                elif operation is messages.LEAVE:
                    has_left = True
                else:
                    result = self._store.carry_out(part, arrays)
                if isinstance(result, Loan):
                    loans.append(result)
                    result = result.array
                if result is not None:
                    results.append(result)
        except Exception as error:
            if says_rank_is_lost(error):
                raise
            yield from self._reply(client, messages.FAILED, [np.frombuffer(_pickled(error), np.uint8)])
        else:
            yield from self._reply(client, messages.DONE, results)
        finally:
            for loan in loans:
                loan.count -= 1
        if has_left:
            while not all_done(client.sending):
                yield
            self._dismiss(client)

    def _read(self, client: _Client) -> Generator[None, None, list[tuple[messages.PartNumbers, list[Array]]]]:
        """Return the parts of a request, as numbers, and the arrays that came with each."""
        number_of_parts, words_inline, data_inline = messages.PREAMBLE.unpack_from(client.request)
        words, begin = client.request, messages.PREAMBLE.size
        end = begin + number_of_parts * messages.PART.size
        if not words_inline:
            words, begin, end = bytearray(end - begin), 0, end - begin
            yield from self._receive(client, [np.frombuffer(words, np.uint8)])
        parts: list[messages.PartNumbers] = list(messages.PART.iter_unpack(memoryview(words)[begin:end]))
        kinds = [self._kinds_of(part) for part in parts]
        all_kinds = [kind for some in kinds for kind in some]
        if data_inline:
            arrays = messages.arrays_in(client.request, end, all_kinds)
        else:
            arrays = self._room(all_kinds)
            yield from self._receive(client, arrays)
        following = iter(arrays)
        return [(part, [next(following) for _ in some]) for part, some in zip(parts, kinds, strict=True)]

    def _check_given_up(self, client: _Client) -> None:
        """Raise PeerError if the client has given this request up meanwhile."""
        *_, data_inline = messages.PREAMBLE.unpack_from(client.request)
        number = bytearray(messages.GIVE_UP.size)
        while not data_inline and self._comm.Iprobe(client.rank, message_tags.GIVE_UP):
            # It was sent before the arrays could change, and says of which request; that of an earlier one is late.
            self._comm.Recv([number, self._byte], client.rank, message_tags.GIVE_UP)
            if messages.GIVE_UP.unpack(number) == (client.requests,):
                raise PeerError("the request was given up before all of it had come; nothing was done")

    def _kinds_of(self, part: messages.PartNumbers) -> list[Kind]:
        """Return the kinds of the arrays that come with a part."""
        operation, variable, count = messages.OPERATIONS[part[0]], part[1], part[2]
        if not operation.takes:
            return []
        of = self._store.kinds[variable] if operation.is_about_variable else messages.NO_VARIABLE
        return of.layouts(operation.takes, count)

    def _room(self, kinds: Sequence[Kind]) -> list[Array]:
        try:
            return [self._pool.take(kind.shape, kind.dtype) for kind in kinds]
        except MemoryError as error:
            # What the client has begun to send has nowhere to go, so this ends the server, and with it the job.
            nbytes = sum([kind.nbytes for kind in kinds])
            raise MemoryError(
                f"this server has no memory for {nbytes / 2**20:.1f} MiB that a worker sends to a variable; expected: "
                "more servers, on more nodes, or variables in shards (mpidist.experimental.partitioners)"
            ) from error

    def _receive(self, client: _Client, arrays: Sequence[Array]) -> Steps[None]:
        receives = messages.receives_of(self._comm, arrays, client.rank, message_tags.REQUEST_DATA)
        try:
            while not all_done(receives):
                yield
        finally:
            if receives:
                _kept.append((receives, arrays))

    # Replies --------------------------------------------------------------------------------------------------

    def _reply(self, client: _Client, status: int, arrays: Sequence[Array]) -> Steps[None]:
        data_bytes = sum([array.nbytes for array in arrays])
        is_inline = data_bytes <= messages.INLINE_BYTES
        preamble = messages.PREAMBLE.pack(data_bytes, is_inline, status)
        # The client has the reply to its last request, or it would not have sent this one.
        while not all_done(client.sending):
            yield
        if is_inline:
            whole: list[Any] = [preamble, *arrays]
            client.sending.append(self._comm.Isend([b"".join(whole), self._byte], client.rank, message_tags.REPLY))
            client.receive.Start()
            return
        # The client is ready for them, and need not wait for what says that they come.
        for array in arrays:
            for piece in messages.pieces_of(array):
                client.sending.append(self._comm.Isend([piece, self._byte], client.rank, message_tags.REPLY_DATA))
        client.sending.append(self._comm.Isend([preamble, self._byte], client.rank, message_tags.REPLY))
        client.receive.Start()
        while not all_done(client.sending):
            yield

    # Those who leave ------------------------------------------------------------------------------------------

    def _dismiss(self, client: _Client) -> None:
        client.receive.Cancel()
        client.receive.Wait()
        client.receive.Free()
        self._clients.remove(client)
        self._store.clocks.forget(client.rank)

    def _lose(self, client: _Client) -> None:
        """Remove a client that is gone; its buffers stay, as MPI may use them."""
        tell_user(f"{client.name} was lost; this server serves it no more")
        self._clients.remove(client)
        self._moving.pop(client, None)
        self._store.clocks.forget(client.rank)
        _kept.append(client)
        if client.rank == self._coordinator:
            raise RankLostError(
                f"{client.name} was lost, which coordinates; start the job again and restore the newest checkpoint"
            )


# What MPI may still write to, since it was on its way when a client was lost.
_kept: list[object] = []


def _until_there(answer: object) -> Generator[None, None, object]:
    """Return an answer; one that is a callable is called until it is there."""
    if not callable(answer):
        return answer
    while (result := answer()) is NOT_YET:
        yield
    return result


def _pickled(error: Exception) -> bytes:
    """Return an error as bytes of one message. One that cannot travel becomes another that says the same."""
    with suppress(Exception):  # whatever its pickling raises, the text is what matters
        data = pickle.dumps(error)
        pickle.loads(data)
        if len(data) <= messages.INLINE_BYTES:
            return data
    return pickle.dumps(PeerError(f"{type(error).__name__}: {error}"[: messages.INLINE_BYTES // 8]))
