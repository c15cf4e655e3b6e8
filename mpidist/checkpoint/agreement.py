"""What one rank does for all, such as reading and writing files, and how the others learn how it went."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from mpidist.core.errors import PeerError
from mpidist.core.protocols import StrategyLike


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
        try:
            message = {"result": work()}
        except Exception as error:  # raised below, once the other ranks know
            failure = error
            message = {"error": f"{type(error).__name__}: {error}"}
    message = _broadcast(strategy, message, doing)
    if failure is not None:
        raise failure
    if "error" in message:
        raise PeerError(f"{doing} failed on the chief of {type(strategy).__name__}, with {message['error']}")
    return message["result"]


def _broadcast(strategy: StrategyLike, message: dict[str, Any], doing: str) -> dict[str, Any]:
    # As arrays, which every strategy can broadcast; the others must know the length first.
    text = np.frombuffer(json.dumps(message).encode(), np.uint8)
    # Without the path, which may differ from rank to rank.
    doing = f"a checkpoint ({doing.split()[0]})"
    size = int(strategy.extended._broadcast_from_first(np.asarray(text.size), doing))
    if not strategy.extended.should_checkpoint:
        text = np.zeros(size, np.uint8)
    received: dict[str, Any] = json.loads(np.asarray(strategy.extended._broadcast_from_first(text, doing)).tobytes())
    return received
