"""WorkerLoop: a worker carries out the coordinator's functions until it is told to stop."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

from mpidist.collectives.mpi.waiting import Naps, drive
from mpidist.core import message_tags
from mpidist.core.context import variable_creator_scope
from mpidist.core.errors import RankLostError
from mpidist.input import Dataset, DistributedDataset
from mpidist.parameter_server.connection import report_only
from mpidist.parameter_server.link import Link
from mpidist.parameter_server.messages import ByteExchange
from mpidist.parameter_server.names import Names
from mpidist.parameter_server.pickling import pack, pack_error, unpack
from mpidist.topology.faults import says_rank_is_lost

if TYPE_CHECKING:
    from mpidist.strategies.base import Strategy

STOP, CALL, DONE, FAILED = b"S", b"C", b"D", b"F"
_index: ContextVar[int | None] = ContextVar("mpidist_worker_index", default=None)


def current_worker_index() -> int:
    """Return the index of the worker that carries out the scheduled function that calls this.

    Raises:
        RuntimeError: Called elsewhere than in a scheduled function.
    """
    index = _index.get()
    if index is None:
        raise RuntimeError(
            "experimental_get_current_worker_index() was called outside a scheduled function; expected: inside fn of "
            "coordinator.schedule(fn)"
        )
    return index


class WorkerLoop:
    """The loop of a worker, which carries out functions for the coordinator.

    Args:
        link: Connects with the coordinator and the servers.
        strategy: This worker's twin of the coordinator's strategy.
    """

    def __init__(self, link: Link, strategy: Strategy) -> None:
        self._link = link
        self._strategy = strategy
        self._names = Names(link, strategy, self._own_value)
        self._exchange = ByteExchange(link.comm, link.workers[0], message_tags.FROM_WORKER, message_tags.TO_WORKER)
        self._definitions: dict[int, bytes] = {}
        self._own: dict[int, object] = {}

    def run(self) -> None:
        """Carry out functions until the coordinator says stop.

        Raises:
            RankLostError: It is gone.
        """
        _index.set(self._link.task.number)
        try:
            while True:
                self._exchange.expect()
                naps = Naps()
                while not self._exchange.expected.Test():
                    naps.take()
                message = drive(self._exchange.receive(), lambda: report_only("the rest of a function"))
                if message[:1] == STOP:
                    break
                answer = self._answer(message[1:])
                drive(self._exchange.send(answer), lambda: report_only("the coordinator to take a result"))
            self._exchange.close()
        except Exception as error:
            if not says_rank_is_lost(error):
                raise
            raise RankLostError(
                f"the coordinator was lost, and {self._link.task} has nothing more to do; start the job again and "
                "restore the newest checkpoint"
            ) from error
        finally:
            _index.set(None)

    def _answer(self, message: bytes) -> bytes:
        try:
            drops, definitions, payload = pickle.loads(message)
            for number in drops:
                del self._definitions[number]
                self._own.pop(number, None)
            self._definitions.update(definitions)
            with self._strategy.scope():
                fn, args, kwargs = unpack(payload, self._names.find)
                result = fn(*args, **kwargs)
            name = getattr(fn, "__qualname__", repr(fn))
            return DONE + pack(result, self._names.name_of, f"the result of {name}, {type(result).__name__},")
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return FAILED + pickle.dumps(tuple(pack_error(error, self._names.name_of)))

    def _own_value(self, number: int) -> object:
        """Return this worker's value of a number, built the first time."""
        if number not in self._own:
            kind, given = unpack(self._definitions[number], self._names.find)
            self._own[number] = _BUILDERS[kind](given)
        return self._own[number]


def _build_dataset(given: object) -> object:
    with variable_creator_scope(_refuse_variable):
        dataset = given() if callable(given) else given
    if not isinstance(dataset, (Dataset, DistributedDataset)):
        raise TypeError(f"the function of a per-worker dataset returned {dataset!r}; expected a Dataset")
    return dataset


def _refuse_variable(_: Callable[..., object], **arguments: object) -> NoReturn:
    raise ValueError(
        f"variable {arguments['name']!r} was created in the function of a per-worker dataset; create variables on the "
        "coordinator, inside `with strategy.scope():`"
    )


_BUILDERS: dict[str, Callable[[Any], object]] = {
    "dataset": _build_dataset,
    "iterator": iter,
    "resource": lambda given: given(),
}
