"""Operation: one collective, with its description, local changes and handle."""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol

import numpy as np

from mpidist.arrays.device_ops import is_device_array
from mpidist.arrays.dtypes import Array, DType
from mpidist.collectives.mpi.exchange import is_common
from mpidist.collectives.mpi.waiting import Steps
from mpidist.core.nest import LEAF
from mpidist.core.options import ReduceOp
from mpidist.core.text import tell_user, user_call_site

if TYPE_CHECKING:
    # A plain ``Work`` in a program has any result. Type checkers know the default, Python 3.10 does not.
    from typing_extensions import TypeVar

    T_co = TypeVar("T_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)

S = TypeVar("S")
Signature = tuple[tuple[tuple[int, ...], DType], ...]

HOUSEKEEPING = "housekeeping"
"""Operation name of collectives that no program calls."""
_HOST_ARRAYS = {np.ndarray}
# Local changes shown in an error.
_MOST_LINES = 4


class Description(NamedTuple):
    """The facts about a collective that all ranks must agree on."""

    text: str  # all of them
    title: str  # the text without shapes and dtypes
    operation: str  # method of Communicator, such as "all_reduce", or HOUSEKEEPING
    nbytes: int  # size of this rank's input
    id: int  # hash of the text, equal in every process


def describe(title: str, of: str = "", *, operation: str = HOUSEKEEPING, nbytes: int = 0) -> Description:
    """Return the description of a collective.

    >>> describe("all_reduce SUM", "float32(3,)", operation="all_reduce", nbytes=12)[:4]
    ('all_reduce SUM of float32(3,)', 'all_reduce SUM', 'all_reduce', 12)
    """
    text = f"{title} of {of}" if of else title
    return Description(text, title, operation, nbytes, plan_id(text))


def plan_id(text: str) -> int:
    """Return a hash of a text that is equal in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def signature_of(arrays: Sequence[Array]) -> Signature:
    """Return shape and dtype of each array."""
    return tuple([(array.shape, array.dtype) for array in arrays])


def which_on_device(arrays: Sequence[Array]) -> tuple[bool, ...]:
    """Return for each array whether it is on a GPU, or () if none is."""
    if {*map(type, arrays)} <= _HOST_ARRAYS:
        return ()
    found = tuple(map(is_device_array, arrays))
    return found if any(found) else ()


def signature_text(signature: Signature, on_device: Sequence[bool] = ()) -> str:
    """Return shapes and dtypes as text.

    >>> signature_text((((2, 3), np.dtype("f4")), ((2, 3), np.dtype("f4"))))
    '2 x float32(2, 3)'
    """
    parts: list[tuple[str, int]] = []
    for (shape, dtype), is_on_device in zip(signature, on_device or [False] * len(signature), strict=True):
        text = f"{dtype.name}{shape}{' on a GPU' if is_on_device else ''}"
        if parts and parts[-1][0] == text:
            parts[-1] = (text, parts[-1][1] + 1)
        else:
            parts.append((text, 1))
    return ", ".join(text if count == 1 else f"{count} x {text}" for text, count in parts) or "nothing"


def note_text(word: str, note: str) -> str:
    """Return the end of a description for a structure. The structure of one array has none.

    >>> note_text("as", "[*, *]"), note_text("as", "*")
    (' as [*, *]', '')
    """
    return "" if note in ("", LEAF) else f" {word} {note}"


class FastCall(NamedTuple):
    """The arguments by which the fast path recognizes a call."""

    name: str  # of its function
    arrays: Array | list[Array]
    signature: Signature  # of the arrays, when the call began
    op: ReduceOp | None = None
    divisor: int | None = None
    root: int = 0  # of a broadcast. For an all-reduce, ``flat_kind`` of the structure, which the core compares too

    def is_unchanged(self) -> bool:
        """Return whether the program has left shapes and dtypes alone since."""
        return signature_of(self.arrays if isinstance(self.arrays, list) else [self.arrays]) == self.signature


class _Change(NamedTuple):
    """Old content of a variable, function that returns its content, and last act."""

    before: bytes
    content: Callable[[], bytes]
    act: str


class LocalChanges:
    """The variables that this rank changed by itself since its last collective. Restored old values do not count.

    Copies of a variable drift apart if ranks assign different values, and no message shows it. So a checksum of the
    changed variables is part of the id that opens the next collective, which costs no message. It is computed only
    then, because checksums take several times as long as the assignments.

    >>> mine, theirs, variable = LocalChanges(), LocalChanges(), bytearray(b"old")
    >>> for changes in (mine, theirs):
    ...     changes.change("w", b"old", lambda: bytes(variable), "assign of variable 'w' at train.py:7")
    >>> variable[:] = b"new"
    >>> mine.settled().text
    "assign of variable 'w' at train.py:7 (checksum 6be34445)"
    >>> variable[:] = b"old"
    >>> theirs.settled() is None
    True
    """

    def __init__(self) -> None:
        self._changes: dict[str, _Change] = {}
        # Checksum and last act by label.
        self._settled: dict[str, tuple[int, str]] = {}

    def before(self, label: str) -> bytes | None:
        """Return the old content of a changed variable, or None."""
        return self._changes[label].before if label in self._changes else None

    def change(self, label: str, before: bytes, content: Callable[[], bytes], act: str) -> None:
        """Record the content before an act, and a function that returns the content."""
        first = self.before(label)
        self._changes[label] = _Change(before if first is None else first, content, act)

    def add(self, label: str, checksum: int, act: str) -> None:
        """Record an act with its value, if ranks can only compare their sequences of acts."""
        before = self._settled.get(label, (0, ""))[0]
        self._settled[label] = zlib.crc32(f"{before} {checksum}".encode()), act

    def settle(self, label: str) -> None:
        """Compute the checksum of a variable now, because its copies may differ from here on."""
        change = self._changes.pop(label, None)
        now = b"" if change is None else change.content()
        if change is not None and now != change.before:
            self._settled[label] = zlib.crc32(now), change.act

    def settled(self) -> LocalChanges | None:
        """Compute the checksums, at the next collective. Return None if nothing has changed in the end."""
        for label in list(self._changes):
            self.settle(label)
        return self if self._settled else None

    @property
    def checksum(self) -> int:
        """Checksum of all settled changes."""
        found = 0
        for label, (checksum, _) in sorted(self._settled.items()):
            found = zlib.crc32(f"{label} {checksum}".encode(), found)
        return found

    @property
    def text(self) -> str:
        """The changes, for the error of ranks that differ."""
        changed = [each for _, each in sorted(self._settled.items())]
        lines = [f"{act} (checksum {checksum & 0xFFFFFFFF:08x})" for checksum, act in changed[:_MOST_LINES]]
        more = len(changed) - len(lines)
        return "; ".join([*lines, *([f"{more} more"] if more else [])])


class Runner(Protocol):
    """Runs started operations: an executor, or the messages of a communicator."""

    def advance(self) -> None:
        """Run the next step of an unfinished operation."""

    def wait_for(self, operation: Operation[object], timeout: float | None) -> None:
        """Run operations until ``operation`` is done, for at most ``timeout`` seconds."""


class _Failure:
    """The error of a started operation. It is printed if the program drops the operation without waiting for it."""

    def __init__(self, error: BaseException, text: str) -> None:
        self.error, self._text, self.was_raised = error, text, False

    def __del__(self) -> None:
        if not self.was_raised:
            tell_user(f"{self._text} and never waited for, ended with {type(self.error).__name__}: {self.error}")


class Operation(Generic[T_co]):
    """A collective, or a message. The ``_async`` methods return it as their handle.

    Do not change its inputs until it is done. Operations of one Communicator run in the order in which the program
    started them, on every rank.

    Attributes:
        description: The facts that all ranks must agree on.
        number: Position among the collectives of the communicator.
        is_async: Whether the program started it to wait for it later.
        call_site: Line of the program; None while the call is still on the stack.
        algorithms: Names of the algorithms that it used.
        error: Its error, while observers see its end.
        hopeless: Reason why a message can never arrive, set by an observer.
        timeout: Seconds before it fails, less the time that callers have waited with a timeout of their own. The
            default is the timeout of the communicator.
        changes: Local changes of this rank that the ranks compare at its start.
        is_resumed: Whether it finishes a call that the fast path began.
        is_done: Whether it has ended.
    """

    number = 0
    is_resumed = is_async = is_done = False
    call_site: str | None = None
    changes: LocalChanges | None = None
    algorithms: tuple[str, ...] = ()
    error: BaseException | None = None
    hopeless = ""
    fast_call: FastCall | None = None
    # Releases the device, after the last step or if the operation cannot start.
    release: Callable[[], None] | None = None
    # Called in each thread that waits, each time, when the result is ready.
    before_return: Callable[[], None] | None = None
    _then: tuple[Callable[..., object], ...] = ()
    _runner: Runner | None = None
    _result: object = None
    _failure: _Failure | None = None

    def __init__(self, steps: Steps[T_co], description: Description, timeout: float | None = None) -> None:
        self.steps: Steps[object] = steps
        self.description = description
        self.timeout: float = timeout or 0.0

    def __repr__(self) -> str:
        state = "" if self._runner is None else ", done" if self.is_done else ", in flight"
        return f"<Operation {self.text}{state}>"

    @property
    def text(self) -> str:
        """All facts that the ranks must agree on."""
        return self.description.text

    def then(self, function: Callable[[T_co], S]) -> Operation[S]:
        """Apply ``function`` to the result when the program takes it; returns the operation itself."""
        self.add(function)
        return self  # type: ignore[return-value]  # its type is that of its result, which changes here

    def add(self, function: Callable[..., object]) -> None:
        """Apply ``function`` as `then` does, without a check of its type."""
        self._then = (*self._then, function)

    def finished(self, result: object) -> T_co:
        """Return the result of the operation, given the result of its steps."""
        functions, self._then = self._then, ()
        for function in functions:
            result = function(result)
        return result  # type: ignore[return-value]  # the steps and functions change it one by one

    def took(self, algorithm: str) -> None:
        """Record an algorithm that it used."""
        if algorithm not in self.algorithms:
            self.algorithms = (*self.algorithms, algorithm)

    # The handle of a started operation ---------------------------------------------------------------------

    def start(self, runner: Runner) -> None:
        """Make it a started operation of ``runner``."""
        self._runner, self.started_at = runner, time.monotonic()

    def done(self) -> bool:
        """Return whether the result is ready; moves the collective forward, and does not block.

        An array on a GPU is ready in the order of streams: the stream that is current when ``wait`` returns waits.
        """
        if not self.is_done and self._runner is not None:
            self._runner.advance()
        return self.is_done

    def wait(self, timeout: float | None = None) -> T_co:
        """Return the result when it is ready.

        Args:
            timeout: Seconds to wait. After a timeout the collective continues, and you may wait again.

        Raises:
            TimeoutError: Not done within ``timeout``.
            CollectiveTimeoutError: Not done within the deadline of the collective itself.
            MismatchError: The ranks started different collectives.
        """
        if not self.is_done and self._runner is not None:
            self._runner.wait_for(self, timeout)
        if self._failure is not None:
            self._failure.was_raised = True
            raise self._failure.error
        try:
            self._result = result = self.finished(self._result)
        except BaseException as error:  # the next wait raises it again
            self.fail(error)
            raise
        if self.before_return is not None:
            self.before_return()
        return result

    def step(self) -> bool:
        """Run the next step; return whether it was the last."""
        try:
            next(self.steps)
        except StopIteration as stop:
            self._result = stop.value
        except Exception as error:
            if not is_common(error):
                raise
            self.fail(error)
        else:
            # An operation that has failed still finishes its exchange with the other ranks.
            return False
        self.is_done = True
        return True

    def fail(self, error: BaseException) -> None:
        """End with ``error``, which ``wait`` raises."""
        if self._failure is None:
            self._failure = _Failure(error, f"{self.text}, started at {self.call_site or user_call_site()}")
        self._failure.error = error
        self.is_done = True


Work = Operation
"""The handle of a started collective."""


class FinishedWork(Generic[T_co]):
    """The handle of a collective that is done already; as ``Work``."""

    def __init__(self, result: T_co) -> None:
        self._result = result

    def __repr__(self) -> str:
        return "<Work, done>"

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self, timeout: float | None = None) -> T_co:
        """Return the result."""
        del timeout
        return self._result


class PartOfWork(Generic[T_co]):
    """One replica's handle of a collective for all replicas of the rank; as ``Work``.

    Args:
        work: The collective.
        select: Returns the replica's part, given the result of the collective.
    """

    def __init__(self, work: Work[S] | FinishedWork[S] | PartOfWork[S], select: Callable[[S], T_co]) -> None:
        self._work: Work[object] | FinishedWork[object] | PartOfWork[object] = work
        self._select: Callable[..., T_co] = select

    def __repr__(self) -> str:
        return repr(self._work)

    def done(self) -> bool:
        """See ``Work``."""
        return self._work.done()

    def wait(self, timeout: float | None = None) -> T_co:
        """See ``Work``."""
        return self._select(self._work.wait(timeout))
