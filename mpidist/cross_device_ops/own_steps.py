"""What a user's own CrossDeviceOps replaces: the step on a rank, the step between ranks, or neither.

A class that replaces the first alone would work on one rank, and be passed by without a word where each rank has one
replica.
"""

from __future__ import annotations

from mpidist.collectives import Communicator

# The two names of the step on a rank.
_ON_A_RANK = ("reduce_implementation", "batch_reduce_implementation")
_BETWEEN_RANKS = "between_ranks_implementation"
_ARGUMENTS = "reduce_op, arrays, divisor, options, structure"


def has_own_steps(kind: type) -> bool:
    """Whether a class replaces steps of one that knew what its own come to (``_is_plain``)."""
    return _place_of_first(kind, *_ON_A_RANK, _BETWEEN_RANKS) < _place_of_first(kind, "_is_plain")


def check_steps(kind: type, comm: Communicator | None) -> None:
    """Raise TypeError where a class replaces the step on a rank alone, and ``comm`` has several."""
    ours = _place_of_first(kind, *_ON_A_RANK)
    if comm is None or comm.size == 1 or ours >= _place_of_first(kind, _BETWEEN_RANKS):
        return
    name = next(name for name in _ON_A_RANK if name in kind.__mro__[ours].__dict__)
    raise TypeError(
        f"{kind.__name__} overrides {name}, which combines the replicas of one rank, and not {_BETWEEN_RANKS}, which "
        f"combines the results of the ranks, of which there are {comm.size}. Expected both: def {_BETWEEN_RANKS}(self, "
        f"{_ARGUMENTS}=''), which returns super().{_BETWEEN_RANKS}({_ARGUMENTS}) where a plain sum is right"
    )


def _place_of_first(kind: type, *names: str) -> int:
    """Return the place, in the order in which Python looks, of the first class that has one of ``names`` of its own."""
    return next(i for i, base in enumerate(kind.__mro__) if not base.__dict__.keys().isdisjoint(names))
