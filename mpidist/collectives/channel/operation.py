"""Operation: one collective, which is carried out now or later, and its description.

All ranks compare descriptions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from mpidist.arrays.device_ops import is_device_array
from mpidist.arrays.dtypes import Array, DType
from mpidist.collectives.channel.tally import Tally
from mpidist.collectives.mpi.waiting import Steps
from mpidist.core.nest import LEAF

T_co = TypeVar("T_co", covariant=True)
S = TypeVar("S")
Signature = tuple[tuple[tuple[int, ...], DType], ...]

HOUSEKEEPING = "housekeeping"
"""The operation of a collective that no program asks for."""
_HOST_ARRAYS = {np.ndarray}


class Description(NamedTuple):
    """The description of a collective.

    Attributes:
        text: All that the ranks have to agree on.
        title: The same without shapes and dtypes.
        operation: The method of Communicator that it comes from, such as ``"all_reduce"``, or ``HOUSEKEEPING``.
        nbytes: Of the values that this rank passes in.
        id: The same on every rank and in every run that has the same text.
    """

    text: str
    title: str
    operation: str
    nbytes: int
    id: int


def describe(title: str, of: str = "", *, operation: str = HOUSEKEEPING, nbytes: int = 0) -> Description:
    """Return the description of a collective.

    >>> describe("all_reduce SUM", "float32(3,)", operation="all_reduce", nbytes=12)[:4]
    ('all_reduce SUM of float32(3,)', 'all_reduce SUM', 'all_reduce', 12)
    """
    text = f"{title} of {of}" if of else title
    return Description(text, title, operation, nbytes, plan_id(text))


def plan_id(text: str) -> int:
    """Return the id of a text, the same on every rank and in every run."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def signature_of(arrays: Sequence[Array]) -> Signature:
    """Return shape and dtype of each array."""
    return tuple([(array.shape, array.dtype) for array in arrays])


def which_on_device(arrays: Sequence[Array]) -> tuple[bool, ...]:
    """Return for each array whether it lies on a GPU; empty where none does."""
    if {*map(type, arrays)} <= _HOST_ARRAYS:
        return ()
    found = tuple(map(is_device_array, arrays))
    return found if any(found) else ()


def signature_text(signature: Signature, on_device: Sequence[bool] = ()) -> str:
    """Return shapes and dtypes as text, runs of equal ones once.

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
    """Return a note as the end of a text, with ``word`` before it.

    It is empty for no note, and for that of a single array.

    >>> note_text("as", "[*, *]"), note_text("as", "*")
    (' as [*, *]', '')
    """
    return "" if note in ("", LEAF) else f" {word} {note}"


class Operation(Generic[T_co]):
    """One collective on a channel.

    Args:
        steps: The collective itself.
        description: The facts that all ranks have to agree on.
        timeout: Seconds before it is given up; that of the channel by default.

    Attributes:
        steps, description, timeout: See above.
        number: Among the collectives of the channel, in the order in which they are issued.
        is_rest: Whether it carries on with a short call.
        is_work: Whether it was started, to be waited for later.
        call_site: Line of the user's program; None where it is still on the stack.
        tally: The changes that this rank had made by itself when it was issued, if any.
        algorithms: The algorithms that it took.
        error: The error that it ends with, if any, while observers are told of the end.
        hopeless: Why it can never end, if an observer has found that out; of a message.
        ask_at: When to ask next whether it can end, on the monotonic clock; of a message.
        let_go: Called when the operation needs its device no more, once it has been carried out or cannot begin.
        before_return: Called in each thread that waits, each time, when the result is there.
    """

    def __init__(self, steps: Steps[T_co], description: Description, timeout: float | None = None) -> None:
        self.steps: Steps[object] = steps
        self.description = description
        self.timeout = timeout
        self.number = 0
        self.is_rest = False
        self.is_work = False
        self.call_site: str | None = None
        self.tally: Tally | None = None
        self.algorithms: list[str] = []
        self.error: BaseException | None = None
        self.hopeless = ""
        self.ask_at = math.inf
        self.let_go: Callable[[], None] | None = None
        self.before_return: Callable[[], None] | None = None
        self._finish: tuple[Callable[..., object], ...] = ()

    def __repr__(self) -> str:
        return f"<Operation {self.text}>"

    @property
    def text(self) -> str:
        """The text that all ranks have to agree on."""
        return self.description.text

    def then(self, finish: Callable[[T_co], S]) -> Operation[S]:
        """Have ``finish`` turn the result into that of the operation; returns the operation itself."""
        self._finish = (*self._finish, finish)
        return self  # type: ignore[return-value]  # its type is that of its result, which changes here

    def finished(self, result: object) -> T_co:
        """Return the result of the operation, given that of its steps."""
        functions, self._finish = self._finish, ()
        for finish in functions:
            result = finish(result)
        return result  # type: ignore[return-value]  # the steps and functions give it step by step

    def took(self, algorithm: str) -> None:
        """Note an algorithm that it took."""
        if algorithm not in self.algorithms:
            self.algorithms.append(algorithm)
