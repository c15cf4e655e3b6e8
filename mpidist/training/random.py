"""Random numbers that do not depend on the layout of replicas, from one seed."""

from __future__ import annotations

import numpy as np

from mpidist.core import seed as process_seed
from mpidist.core.context import get_replica_context

_COMMON, _REPLICA = 0, 1


def set_seed(seed: int) -> None:
    """Set the seed that :func:`common_rng` and :func:`replica_rng` start from (tf.random.set_seed).

    Call it on every rank with the same number, at the start of the program. Nothing is communicated, and NumPy's
    own global generator is left alone.

    Args:
        seed: A whole number from 0.

    Raises:
        TypeError: Not a whole number.
        ValueError: Negative.

    >>> set_seed(1)
    """
    process_seed.set_seed(seed)


def common_rng(key: int, *more: int) -> np.random.Generator:
    """Return a new generator that gives the same numbers on every replica, for one key.

    The numbers depend on the seed and the key alone. A key tells this draw from others, such as the step: the same key
    gives the same numbers again, so a run that is resumed from a checkpoint draws the same numbers.

    Args:
        key: A whole number from 0.
        more: More of them.

    Raises:
        RuntimeError: ``set_seed`` has not been called.

    >>> set_seed(7)
    >>> bool(common_rng(3).integers(1000) == common_rng(3).integers(1000))
    True
    """
    return _generator(_COMMON, key, *more)


def replica_rng(key: int, *more: int) -> np.random.Generator:
    """Return a new generator that gives other numbers on every replica, for one key.

    For dropout and augmentation inside ``strategy.run``. The numbers depend on the seed, the global replica id and
    the key: not on the ranks that the replicas are on. Outside any strategy the replica is number 0.

    Args:
        key: A whole number from 0, such as the step.
        more: More of them.

    Raises:
        RuntimeError: ``set_seed`` has not been called, or this is cross-replica context.

    >>> set_seed(7)
    >>> bool(replica_rng(3).integers(1 << 62) == common_rng(3).integers(1 << 62))
    False
    """
    context = get_replica_context()
    if context is None:
        raise RuntimeError(
            "replica_rng() was called in cross-replica context, where no replica is meant; "
            "call it inside strategy.run(), or use common_rng()"
        )
    return _generator(_REPLICA, context.replica_id_in_sync_group, key, *more)


def _generator(*key: int) -> np.random.Generator:
    seed = process_seed.get_seed()
    if seed is None:
        raise RuntimeError(
            "no seed has been set, and ranks cannot agree on one without; "
            "call mpidist.set_seed(1) on every rank at the start of the program"
        )
    return np.random.default_rng([seed, *key])
