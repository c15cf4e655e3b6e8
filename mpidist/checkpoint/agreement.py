"""Act on a checkpoint with all ranks, which raise the errors of one together."""

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
_MOST_NAMES = 10  # in a message


def extended_of(strategy: StrategyLike) -> StrategyExtended:
    """Return the interface for library writers."""
    return cast("StrategyExtended", strategy.extended)


def spread(ranks: int, count: int) -> list[int]:
    """Return ``count`` of the ranks, at least one, evenly spaced over the nodes.

    >>> spread(8, 4), spread(8, 0), spread(2, 5)
    ([0, 2, 4, 6], [0], [0, 1])
    """
    count = min(max(count, 1), ranks)
    return [ranks * i // count for i in range(count)]


class Agreement:
    """An action of all ranks on a checkpoint, in steps of one collective each.

    Functions that it calls return types that JSON can hold.

    Args:
        strategy: Strategy of the ranks. Its first rank is the chief.
        action: Name of the action, equal on all ranks.
        subject: Name of the object in messages. Its paths may differ from rank to rank.
    """

    def __init__(self, strategy: StrategyLike, action: str, subject: str) -> None:
        self.extended = extended_of(strategy)
        self.is_chief = bool(self.extended.should_checkpoint)
        self._chief_name = f"rank 0, the chief of {type(strategy).__name__}"
        self._action, self._doing = action, f"{action} {subject}"

    def chief_does(self, work: Callable[[], T]) -> T:
        """Call ``work`` on the chief and return its result on every rank (collective).

        Its exception is raised on the chief, and as PeerError on the other ranks.
        """
        answer = self._exchange(work if self.is_chief else None)[0]
        if "error" in answer:
            raise PeerError(f"{self._doing} failed on {self._chief_name}, with {answer['error']}")
        result: T = answer["result"]
        return result

    def every_rank_does(self, work: Callable[[], T]) -> list[T]:
        """Call ``work`` on every rank and return all results in rank order (collective).

        An exception is raised on the ranks where it occurred, and as PeerError on the other ranks.
        """
        answers = self._exchange(work)
        errors = {rank: answer["error"] for rank, answer in enumerate(answers) if "error" in answer}
        if errors:
            reasons = "; ".join(said_lines(errors.items()))
            raise PeerError(f"{self._doing} failed on {numbered_ranks(errors)} of {len(answers)}, with {reasons}")
        return [answer["result"] for answer in answers]

    def check_same(self, names: Sequence[str], digests: Sequence[int]) -> None:
        """Raise ValueError on every rank unless ``digest(names)`` is the same on all (collective if not)."""
        if len(set(digests)) == 1:
            return
        names_of_ranks = self.every_rank_does(lambda: sorted(names))
        holders: dict[str, list[int]] = {}
        for rank, theirs in enumerate(names_of_ranks):
            for name in theirs:
                holders.setdefault(name, []).append(rank)
        count = len(names_of_ranks)
        partial = sorted((name, ranks) for name, ranks in holders.items() if len(ranks) < count)
        shown = "; ".join(f"{name!r} only on {numbered_ranks(ranks)}" for name, ranks in partial[:_MOST_NAMES])
        more = f"; and {len(partial) - _MOST_NAMES} more" if len(partial) > _MOST_NAMES else ""
        raise ValueError(
            f"{self._doing}: the ranks hold different objects: {shown}{more}; expected the same on each of {count} "
            "ranks: give Checkpoint(...) the same objects on every rank"
        )

    def _exchange(self, work: Callable[[], object] | None) -> list[dict[str, Any]]:
        """Return the results or errors of all ranks; raise this rank's error afterwards."""
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
    """Return a checksum of a set of names."""
    return zlib.crc32(json.dumps(sorted(names)).encode())
