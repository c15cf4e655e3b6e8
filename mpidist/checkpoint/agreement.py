"""Act on a checkpoint with all ranks.

Ranks learn who writes what, and errors of one are raised on all.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mpidist.core.context import StrategyLike
from mpidist.core.errors import PeerError
from mpidist.core.text import numbered_ranks, said_lines

if TYPE_CHECKING:
    from mpidist.strategies import StrategyExtended

T = TypeVar("T")
# Of the names that a message shows.
_MOST_NAMES = 10


def extended_of(strategy: StrategyLike) -> StrategyExtended:
    """Return the interface for library writers."""
    return cast("StrategyExtended", strategy.extended)


class Agreement:
    """An action of all ranks on a checkpoint, in steps of one collective each.

    Args:
        strategy: Its ranks take part; its first rank is the chief.
        action: Its name in one word; ranks that name different ones all raise MismatchError.
        subject: The name of its object, for messages; paths in it may differ from rank to rank.

    Attributes:
        extended: Of the strategy, for library writers.
        is_chief: Whether this rank writes for all.
    """

    def __init__(self, strategy: StrategyLike, action: str, subject: str) -> None:
        self.extended = extended_of(strategy)
        self.is_chief = bool(self.extended.should_checkpoint)
        self._chief_name = f"rank 0, the chief of {type(strategy).__name__}"
        self._action, self._doing = action, f"{action} {subject}"

    def chief_does(self, work: Callable[[], T]) -> T:
        """Call ``work`` on the chief and return its result on every rank (collective).

        Args:
            work: Returns something that JSON has.

        Raises:
            Exception: That of ``work``, on the chief.
            PeerError: The same as text, on the other ranks.
        """
        answer = self._exchange(work if self.is_chief else None)[0]
        if "error" in answer:
            raise PeerError(f"{self._doing} failed on {self._chief_name}, with {answer['error']}")
        result: T = answer["result"]
        return result

    def every_rank_does(self, work: Callable[[], T]) -> list[T]:
        """Call ``work`` on every rank and return all results in rank order (collective).

        Args:
            work: Returns something that JSON has. If it communicates, it does so on all ranks alike.

        Raises:
            Exception: That of ``work``, on the ranks where it failed.
            PeerError: The same as text, on the other ranks; it names the ranks that failed.
        """
        answers = self._exchange(work)
        results, errors = [], {}
        for rank, answer in enumerate(answers):
            if "error" in answer:
                errors[rank] = answer["error"]
            else:
                results.append(answer["result"])
        if errors:
            told = "; ".join(said_lines(errors.items()))
            raise PeerError(f"{self._doing} failed on {numbered_ranks(errors)} of {len(answers)}, with {told}")
        return results

    def check_same(self, names: Sequence[str], digests: Sequence[int]) -> None:
        """Raise ValueError on every rank unless all have the same names (collective if not).

        Args:
            names: Of the objects that this rank saves or restores.
            digests: ``digest(names)`` of every rank; all ranks were told the same.
        """
        if len(set(digests)) == 1:
            return
        told = self.every_rank_does(lambda: sorted(names))
        holders: dict[str, list[int]] = {}
        for rank, theirs in enumerate(told):
            for name in theirs:
                holders.setdefault(name, []).append(rank)
        partial = sorted((name, ranks) for name, ranks in holders.items() if len(ranks) < len(told))
        shown = "; ".join(f"{name!r} only on {numbered_ranks(ranks)}" for name, ranks in partial[:_MOST_NAMES])
        more = f"; and {len(partial) - _MOST_NAMES} more" if len(partial) > _MOST_NAMES else ""
        raise ValueError(
            f"{self._doing}: the ranks hold different objects: {shown}{more}; expected the same on each of {len(told)} "
            "ranks: give Checkpoint(...) the same objects on every rank"
        )

    def _exchange(self, work: Callable[[], object] | None) -> list[dict[str, Any]]:
        """Return the results or errors of all ranks; raise an own error afterwards."""
        failure: Exception | None = None
        try:
            answer = {"result": None if work is None else work()}
        except Exception as error:
            answer, failure = {"error": f"{type(error).__name__}: {error}"}, error
        comm, text = self.extended.communicator, json.dumps(answer)
        texts = [text] if comm is None else comm.gather_objects(text, f"a checkpoint ({self._action})")
        if failure is not None:
            raise failure
        return [json.loads(each) for each in texts]


def digest(names: Sequence[str]) -> int:
    """Return a number that tells one set of names from another."""
    return zlib.crc32(json.dumps(sorted(names)).encode())
