"""What replicas of one process must not have in common: results to write to, and the gradients of one PyTorch module.

Replicas run one after the other in one process, so they share whatever the program made once. A module of PyTorch that
was made once has one ``.grad`` per parameter, to which each replica adds: their sum over replicas is no sum of theirs.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from mpidist.arrays.convert import to_array
from mpidist.collectives.packing import overlapping
from mpidist.core import nest
from mpidist.values import PerReplica

_ONE_REPLICA_PER_RANK = (
    "Expected one replica per rank, each with a module and arrays of its own: give the strategy one device, and type "
    "mpirun -n {n} python train.py"
)
# Tensors that replicas share and that are no gradients, by id: constants, which come again at every step.
_constants: dict[int, weakref.ref[Any]] = {}


def check_results_apart(outs: Any) -> None:
    """Raise ValueError where replicas gave the same memory for their results.

    Args:
        outs: What each replica gave as ``out``, regrouped.
    """
    for leaf in nest.flatten(outs):
        parts = leaf.values if isinstance(leaf, PerReplica) else ()
        for (i, one), (j, other) in combinations(enumerate(map(to_array, parts)), 2):
            if overlapping(one, [other]):
                raise ValueError(
                    f"replicas {i} and {j} of this process gave the same memory as out, so one result would overwrite "
                    f"the other. {_ONE_REPLICA_PER_RANK.format(n=len(parts))}"
                )


def check_gradients_apart(values: Sequence[Any]) -> None:
    """Raise ValueError where replicas gave the gradient of one and the same parameter of PyTorch.

    Args:
        values: Of the replicas of this process.
    """
    torch = sys.modules.get("torch")
    if torch is None or len(values) == 1 or not isinstance(values[0], torch.Tensor):
        return
    seen: dict[int, int] = {}
    for number, tensor in enumerate(values):
        if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
            continue
        first = seen.setdefault(tensor.data_ptr(), number)
        if first != number and _is_gradient(torch, tensor):
            raise ValueError(
                f"replicas {first} and {number} of this process gave the same tensor, the .grad of a parameter: they "
                "use one module of PyTorch, to whose gradients both have added. "
                f"{_ONE_REPLICA_PER_RANK.format(n=len(values))}"
            )


def _is_gradient(torch: Any, tensor: Any) -> bool:
    known = _constants.get(id(tensor))
    if known is not None and known() is tensor:
        return False
    address = tensor.data_ptr()
    # Not isinstance: it asks proxies for their class, which may do anything.
    leaves = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and thing.is_leaf)
    if any(leaf.grad is not None and leaf.grad.data_ptr() == address for leaf in leaves):
        return True
    number = id(tensor)
    _constants[number] = weakref.ref(tensor, lambda _: _constants.pop(number, None))
    return False
