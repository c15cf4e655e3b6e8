"""Operation: one collective, which is carried out now or later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from mpidist.collectives.channel.description import Description
from mpidist.collectives.channel.tally import Tally
from mpidist.collectives.mpi.waiting import Steps

T_co = TypeVar("T_co", covariant=True)
S = TypeVar("S")


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
