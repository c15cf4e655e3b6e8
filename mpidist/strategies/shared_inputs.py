"""What replicas of one process must not have in common: results to write to, and the gradients of one PyTorch module.

Replicas run one after the other in one process, so they share whatever the program made once. A module of PyTorch that
was made once has one ``.grad`` per parameter, to which each replica adds: their sum over replicas is no sum of theirs.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from mpidist.arrays.convert import Array, is_torch, to_array
from mpidist.collectives.node.packing import overlaps
from mpidist.core import nest
from mpidist.values import PerReplica

_ONE_REPLICA_PER_RANK = (
    "Expected one replica per rank, each with a module and arrays of its own: give the strategy one device, and type "
    "mpirun -n {n} python train.py"
)
# A look asks all that Python knows, a tenth of a second in a large program. Who shares a module does so from the first
# step; where so many looks were in vain the replicas share constants, and one look in so many is enough.
_LOOKS = 32
_shared_calls = [0]


def check_results_apart(outs: Any) -> None:
    """Raise ValueError where replicas gave the same memory for their results.

    Args:
        outs: What each replica gave as ``out``, regrouped.
    """
    for leaf in nest.flatten(outs):
        parts = leaf.values if isinstance(leaf, PerReplica) else ()
        for (i, one), (j, other) in combinations(enumerate(map(to_array, parts)), 2):
            if any(overlaps([one], [other])) and _share_elements(one, other):
                raise ValueError(
                    f"replicas {i} and {j} of this process gave the same memory as out, so one result would overwrite "
                    f"the other. {_ONE_REPLICA_PER_RANK.format(n=len(parts))}"
                )


def _share_elements(one: Array, other: Array) -> bool:
    """Whether arrays whose addresses overlap have elements in common; on a device that is taken for granted."""
    on_host = isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
    return not on_host or bool(np.shares_memory(one, other))


def check_gradients_apart(leaves: Iterable[PerReplica]) -> None:
    """Raise ValueError where replicas gave the gradient of one and the same parameter of PyTorch.

    Args:
        leaves: What the replicas of this process gave.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    shared = [found for leaf in leaves if (found := _shared_tensor(torch, leaf.values)) is not None]
    if not shared:
        return
    _shared_calls[0] += 1
    if _shared_calls[0] > _LOOKS and _shared_calls[0] % _LOOKS:
        return
    gradients = _addresses_of_gradients(torch)
    for address, first, number, count in shared:
        if address in gradients:
            raise ValueError(
                f"replicas {first} and {number} of this process gave the same tensor, the .grad of a parameter: they "
                "use one module of PyTorch, to whose gradients both have added. "
                f"{_ONE_REPLICA_PER_RANK.format(n=count)}"
            )


def _shared_tensor(torch: Any, values: Sequence[Any]) -> tuple[int, int, int, int] | None:
    """Return the address of a tensor that two replicas gave, which these are, and of how many."""
    seen: dict[int, int] = {}
    for number, value in enumerate(values):
        address = _address(torch, value) if is_torch(value) else None
        if address is not None and (first := seen.setdefault(address, number)) != number:
            return address, first, number, len(values)
    return None


def _addresses_of_gradients(torch: Any) -> set[int | None]:
    """Return where the gradients of all parameters lie; modules are not known here, so all objects are asked."""
    # Not isinstance: it asks proxies for their class, which may do anything.
    leaves = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and thing.is_leaf)
    return {_address(torch, leaf.grad) for leaf in leaves if leaf.grad is not None}


def _address(torch: Any, tensor: Any) -> int | None:
    """Return where a tensor lies; None for one without elements, or without memory in one piece, as sparse ones."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    try:
        return int(tensor.data_ptr()) or None
    except RuntimeError:
        return None
