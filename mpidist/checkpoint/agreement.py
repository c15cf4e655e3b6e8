"""What one rank does for all, or each does by itself, and how the others learn how it went."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpidist.core.errors import PeerError
from mpidist.core.protocols import StrategyLike
from mpidist.core.wording import ranks_text

if TYPE_CHECKING:
    from mpidist.strategies import StrategyExtended


# Of the names that a message shows.
_MOST_NAMES = 10


def extended_of(strategy: StrategyLike) -> StrategyExtended:
    """Return the interface for library writers."""
    return cast("StrategyExtended", strategy.extended)


def before_communication(strategy: StrategyLike, doing: str) -> AbstractContextManager[None]:
    """Return a block around what each rank does before the ranks meet: they learn of an error in it, too."""
    return extended_of(strategy).shared_errors(_without_path(doing))


def chief_does(strategy: StrategyLike, doing: str, work: Callable[[], Any]) -> Any:
    """Call ``work`` on the chief and return its result on every rank (collective).

    Args:
        strategy: Its first rank is the chief; all its ranks take part.
        doing: What is being done, for messages.
        work: Returns something that JSON has.

    Raises:
        Exception: What ``work`` raised, on the chief.
        PeerError: The same as text, on the other ranks.
    """
    message: dict[str, Any] = {}
    failure: Exception | None = None
    if strategy.extended.should_checkpoint:
        message, failure = _outcome(work)
    message = _broadcast(strategy, message, doing)
    if failure is not None:
        raise failure
    if "error" in message:
        raise PeerError(f"{doing} failed on rank 0, the chief of {type(strategy).__name__}, with {message['error']}")
    return message["result"]


def every_rank_does(strategy: StrategyLike, doing: str, work: Callable[[], Any]) -> list[Any]:
    """Call ``work`` on every rank and return the results of all, in the order of the ranks (collective).

    Args:
        strategy: Its ranks take part.
        doing: What is being done, for messages.
        work: Returns something that JSON has. If it communicates, it does so on all ranks alike.

    Raises:
        Exception: What ``work`` raised, on the ranks where it did.
        PeerError: The same as text, on the other ranks; it names the ranks that failed.
    """
    message, failure = _outcome(work)
    line = np.frombuffer(json.dumps(message).encode() + b"\n", np.uint8)
    gathered = extended_of(strategy).gather_leaves([line], 0, f"a checkpoint ({_without_path(doing)})")[0]
    messages = [json.loads(text) for text in np.asarray(gathered).tobytes().splitlines()]
    if failure is not None:
        raise failure
    errors = {rank: message["error"] for rank, message in enumerate(messages) if "error" in message}
    if errors:
        told = "; ".join(f"rank {rank}: {error}" for rank, error in errors.items())
        raise PeerError(f"{doing} failed on rank {ranks_text(errors)} of {len(messages)}, with {told}")
    return [message["result"] for message in messages]


def check_same(strategy: StrategyLike, doing: str, names: Sequence[str], digests: Sequence[int]) -> None:
    """Raise ValueError on every rank unless all ranks have the same names (collective where they have not).

    Args:
        strategy: Its ranks take part.
        doing: What is being done, for messages.
        names: Of what this rank saves or restores.
        digests: ``digest(names)`` of every rank; all ranks were told the same.
    """
    if len(set(digests)) == 1:
        return
    told = every_rank_does(strategy, doing, lambda: sorted(names))
    holders: dict[str, list[int]] = {}
    for rank, theirs in enumerate(told):
        for name in theirs:
            holders.setdefault(name, []).append(rank)
    partial = sorted((name, ranks) for name, ranks in holders.items() if len(ranks) < len(told))
    shown = "; ".join(f"{name!r} only on rank {ranks_text(ranks)}" for name, ranks in partial[:_MOST_NAMES])
    more = f"; and {len(partial) - _MOST_NAMES} more" if len(partial) > _MOST_NAMES else ""
    raise ValueError(
        f"{doing}: the ranks hold different objects: {shown}{more}; expected the same on each of {len(told)} ranks: "
        "give Checkpoint(...) the same objects on every rank"
    )


def digest(names: Sequence[str]) -> int:
    """Return a number that tells one set of names from another."""
    return zlib.crc32(json.dumps(sorted(names)).encode())


def _outcome(work: Callable[[], Any]) -> tuple[dict[str, Any], Exception | None]:
    try:
        return {"result": work()}, None
    except Exception as error:  # raised by the caller, once the other ranks know
        return {"error": f"{type(error).__name__}: {error}"}, error


def _broadcast(strategy: StrategyLike, message: dict[str, Any], doing: str) -> dict[str, Any]:
    # As arrays, which every strategy can broadcast; the others must know the length first.
    text = np.frombuffer(json.dumps(message).encode(), np.uint8)
    doing = f"a checkpoint ({_without_path(doing)})"
    size = int(strategy.extended.broadcast_nest(np.asarray(text.size), note=doing))
    if not strategy.extended.should_checkpoint:
        text = np.zeros(size, np.uint8)
    received: dict[str, Any] = json.loads(np.asarray(strategy.extended.broadcast_nest(text, note=doing)).tobytes())
    return received


def _without_path(doing: str) -> str:
    # Paths may differ from rank to rank.
    return doing.split()[0]
