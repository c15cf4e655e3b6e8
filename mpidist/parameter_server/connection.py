"""Connection: this process's requests to one server, one at a time, each with a deadline."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.collectives.channel.shutdown import EXIT_SECONDS
from mpidist.collectives.mpi.waiting import all_done, drive, until_all_done, until_done
from mpidist.collectives.node.memory import Pool
from mpidist.core import message_tags, settings
from mpidist.core.concurrency import Deadline
from mpidist.core.errors import PeerError, RankLostError, RequestTimeoutError
from mpidist.core.text import names_text, tell_user, user_call_site
from mpidist.parameter_server import messages
from mpidist.parameter_server.messages import Kind, Request, RequestPart
from mpidist.parameter_server.pickling import pack
from mpidist.topology import import_mpi
from mpidist.topology.exit import says_rank_is_lost

if TYPE_CHECKING:
    from mpi4py import MPI


# For a reply, before it is waited for with a deadline: about half a millisecond.
_QUICK_LOOKS = 500


class Connection:
    """The requests to one server, and its replies. Any thread may ask, one after the other.

    A wait that is broken off, at the deadline or by Ctrl-C, leaves a request whose reply is still to come: the next
    request takes it first, so that both sides stay in step. If the server does not have all arrays of that request yet
    it leaves them alone, since their owner goes on and may change them.

    Args:
        comm: The communicator of the link.
        server: The rank of the server in it.
        name: The server's, for messages, such as ``"ps 0"``.
        timeout: Seconds before a reply is given up.

    Attributes:
        server: As given.
        is_lost: Whether MPI has said that the server is gone.
    """

    def __init__(self, comm: MPI.Intracomm, server: int, name: str, timeout: float) -> None:
        self._comm = comm
        self._byte = import_mpi().BYTE
        self.server = server
        self.name = name
        self._timeout = timeout
        self._warn_after: float = settings.WARN_AFTER.read()
        self.lock = threading.Lock()
        self._reply = bytearray(messages.FIRST_MESSAGE_BYTES)
        self._await_reply = comm.Recv_init(self._reply, server, message_tags.REPLY)
        self._sending: list[MPI.Request] = []
        self._sent = Request([])
        self._number = 0
        self._owes_reply = False
        self._is_given_up = False
        self._is_in_step = True
        self._results: list[Array] = []
        self._receiving: list[MPI.Request] | None = None
        self._takes_error = False
        self._pool = Pool()
        self._end: str | None = None
        self._has_left = False
        self.is_lost = False

    def ask(self, request: Request) -> list[Any]:
        """Have the server carry out a request in one go, and return its results.

        There is one result for each part, None where the part gives nothing back.

        Raises:
            Exception: The server's error; nothing after the part that failed was done.
            RankLostError: It is gone.
            RequestTimeoutError: It did not answer in time.
            RuntimeError: This process has taken leave of it.
        """
        with self.lock:
            self.start(request)
            return self.finish()

    def control(self, name: str, *arguments: object, doing: str) -> Any:
        """Have the server carry out one of its rarer requests, and return the answer.

        Args:
            name: Of the request.
            arguments: Its arguments, which can be pickled.
            doing: Its purpose, for messages.
        """
        message = np.frombuffer(pack((name, arguments), lambda _: None, f"what {doing} takes"), np.uint8)
        (answer,) = self.ask(
            Request([RequestPart(messages.CONTROL, arrays=[message], length=message.size, name=doing)])
        )
        return pickle.loads(answer.tobytes())

    def leave(self) -> None:
        """Tell the server that this process asks nothing more. It does nothing if that was done, or the server is lost.

        Raises:
            RuntimeError: It cannot be told, as a request was broken off.
        """
        if self.is_lost or self._has_left:
            return
        # What was given up gets a last chance, as collectives that were given up do.
        limit = min(self._timeout, EXIT_SECONDS) if self._owes_reply else self._timeout
        with self.lock:
            self._timeout = limit
            self.start(Request([RequestPart(messages.LEAVE)]))
            self.finish()
        self._has_left = True
        self._end = (
            "this process released the parameter servers when mpidist.launch() returned, or when its program ended. "
            "Use variables only inside the function that you pass to launch()"
        )

    def start(self, request: Request) -> None:
        """Send a request, with the lock held. Its arrays must stay as they are until :meth:`finish`."""
        if self._end is not None:
            kind = RankLostError if self.is_lost else RuntimeError
            raise kind(f"{self.name} can no longer be asked: {self._end}")
        if self._owes_reply:
            # That of a request that was broken off; an error in it is reported here, as nobody asks any more.
            failed, late = self._take_reply()
            if failed and not self._is_given_up:
                tell_user(f"a request that was not waited for: {self._failure(late[0], _doing(self._sent))}")
        # Before anything is under way: there may not be the memory.
        results = self._room(request.results) if request.comes_apart and request.results is not None else []
        self._sent = request
        try:
            # First of all, so that the server is busy with it meanwhile.
            self._number += 1
            self._send(request.first, message_tags.REQUEST)
            for message in request.following:
                for piece in messages.pieces_of(message):
                    self._send(piece, message_tags.REQUEST_DATA)
            self._await_reply.Start()
            if request.comes_apart:
                # They come straight to where they will lie.
                self._results = results
                self._receiving = messages.receives_of(self._comm, results, self.server, message_tags.REPLY_DATA)
        except BaseException as error:
            self._check_lost(error)
            self._end = f"{_doing(request)} was broken off while it was sent, with {type(error).__name__}: {error}"
            raise
        self._owes_reply, self._is_given_up = True, False

    def finish(self) -> list[Any]:
        """Return the server's results for the request that was started; the lock is held."""
        request = self._sent
        failed, results = self._take_reply()
        if failed:
            raise self._failure(results[0], _doing(request))
        if len(results) == len(request.parts):
            return results
        arrays = iter(results)
        return [next(arrays) if part.operation.gives else None for part in request.parts]

    def _take_reply(self) -> tuple[bool, list[Array]]:
        """Return whether the server failed, and the arrays of its reply.

        May be called again where it was broken off.
        """
        try:
            for _ in range(_QUICK_LOOKS):
                if self._await_reply.Test():
                    break
            else:
                drive(until_done(self._await_reply), self._deadline)
            if not all_done(self._sending):
                drive(until_all_done(self._sending), self._deadline)
            data_bytes, is_inline, status = messages.PREAMBLE.unpack_from(self._reply)
            # Whoever breaks in here leaves the receives in a state that nobody knows.
            self._is_in_step = False
            if status == messages.FAILED and self._receiving is not None and not self._takes_error:
                self._expect_nothing()
            if self._receiving is None:
                self._takes_error = status == messages.FAILED
                self._receive_reply(self._kinds_of_reply(data_bytes, status), is_inline)
            self._is_in_step = True
            if self._receiving and not all_done(self._receiving):
                drive(until_all_done(self._receiving), self._deadline)
        except BaseException as error:
            self._check_lost(error)
            if not self._is_in_step:
                self._end = f"the reply to {_doing(self._sent)} was broken off with {type(error).__name__}: {error}"
            else:
                self._give_up()
            raise
        results, self._results, self._receiving, self._owes_reply = self._results, [], None, False
        self._takes_error = False
        return status == messages.FAILED, results

    def _give_up(self) -> None:
        """Have the server drop the arrays that it lacks: they may change from now on."""
        if self._sent.following and not self._is_given_up and not all_done(self._sending):
            self._is_given_up = True
            self._send(messages.GIVE_UP.pack(self._number), message_tags.GIVE_UP)

    def _expect_nothing(self) -> None:
        """Take back the receives of arrays that do not come, as the request has failed."""
        for request in self._receiving or ():
            request.Cancel()
            request.Wait()
        self._results, self._receiving = [], None

    def _send(self, buffer: Any, tag: int) -> None:
        self._sending.append(self._comm.Isend([buffer, self._byte], self.server, tag))

    def _kinds_of_reply(self, data_bytes: int, status: int) -> Sequence[Kind]:
        """Return the arrays of a reply."""
        if status == messages.FAILED:
            return [Kind((data_bytes,), messages.BYTES)]
        if self._sent.results is not None:
            return self._sent.results
        parts = self._sent.parts
        return [kind for part in parts for kind in part.kind.results(part.operation.gives, data_bytes)]

    def _room(self, kinds: Sequence[Kind]) -> list[Array]:
        return [self._pool.take(kind.shape, kind.dtype) for kind in kinds]

    def _receive_reply(self, kinds: Sequence[Kind], is_inline: int) -> None:
        """Take a reply's arrays from its first message, or start to receive them."""
        if is_inline:
            self._results, self._receiving = messages.arrays_in(self._reply, messages.PREAMBLE.size, kinds), []
        else:
            self._results = self._room(kinds)
            self._receiving = messages.receives_of(self._comm, self._results, self.server, message_tags.REPLY_DATA)

    def _deadline(self) -> Deadline:
        doing, rank, site = _doing(self._sent), self._comm.Get_rank(), user_call_site()
        return Deadline(
            lambda waited: f"rank {rank} has waited {waited:.0f} s for {self.name} in {doing}, at {site}",
            lambda waited: RequestTimeoutError(f"{self.name} in {doing}, at {site}", waited, rank),
            self._timeout,
            self._warn_after,
        )

    def _check_lost(self, error: BaseException) -> None:
        """Raise RankLostError if MPI's ``error`` means that the server is lost."""
        if says_rank_is_lost(error):
            doing = _doing(self._sent)
            self._end = f"it was lost in {doing}"
            self.is_lost = True
            raise RankLostError(
                f"{self.name} was lost while this process waited for it in {doing}; its variables are gone. Start the "
                "job again and restore the newest checkpoint"
            ) from error

    def _failure(self, message: Array, doing: str) -> Exception:
        error: Exception = pickle.loads(message.tobytes())
        if not isinstance(error, PeerError):
            error.args = (f"{doing} failed at {self.name}: {error}",)
        return error


def ask_all(parts: Sequence[tuple[Connection, RequestPart]]) -> list[Any]:
    """Ask several servers at once, and return the results in the order of the parts.

    Requests that were sent are finished before an error is raised.
    """
    by_server: dict[Connection, list[int]] = {}
    for place, (connection, _) in enumerate(parts):
        by_server.setdefault(connection, []).append(place)
    # In one order in all threads, or two of them would wait for each other.
    ordered = sorted(by_server, key=lambda connection: connection.server)
    requests = {connection: Request([parts[place][1] for place in by_server[connection]]) for connection in ordered}
    if len(requests) == 1:
        ((connection, request),) = requests.items()
        return connection.ask(request)
    results: list[Any] = [None] * len(parts)
    errors: list[Exception] = []
    started: list[Connection] = []
    with ExitStack() as locks:
        for connection in requests:
            locks.enter_context(connection.lock)
        for connection, request in requests.items():
            try:
                connection.start(request)
            except Exception as error:  # raised below, once the others are finished
                errors.append(error)
                break
            started.append(connection)
        for connection in started:
            try:
                for place, result in zip(by_server[connection], connection.finish(), strict=True):
                    results[place] = result
            except Exception as error:  # as above
                errors.append(error)
    if errors:
        raise errors[0]
    return results


def _doing(request: Request) -> str:
    return names_text(dict.fromkeys(f"{part.operation.name} {part.name}".strip() for part in request.parts))
