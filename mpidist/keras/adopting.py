"""Adoption of a Keras model by a strategy."""

from __future__ import annotations

from typing import TypeVar, cast

import keras

from mpidist.core.context import get_strategy, require_cross_replica
from mpidist.core.text import parse_device
from mpidist.keras.replica_model import Adoption, ReplicaModel, subclassed
from mpidist.strategies import (
    CentralStorageStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    Strategy,
    check_adopts_in_scope,
    default_strategy,
)

if keras.backend.backend() == "torch":
    from mpidist.keras.torch_step import TorchModel as _Model
    from mpidist.keras.torch_step import TorchOptimizer as _Optimizer
elif keras.backend.backend() == "jax":
    from mpidist.keras.jax_step import JaxModel as _Model
    from mpidist.keras.jax_step import JaxOptimizer as _Optimizer
else:
    raise ImportError(
        f"mpidist.keras is for Keras' torch and jax backends, and this process has {keras.backend.backend()!r}; type: "
        "KERAS_BACKEND=torch python train.py"
    )

M = TypeVar("M")

_TAKEN = (MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy, CentralStorageStrategy)


def adopt(model: M) -> M:
    """Let the current strategy train a model (collective: call it on every rank).

    ``fit``, ``evaluate`` and ``predict`` then expect the same global batches on every rank. Each rank computes with the
    rows of its replicas. Gradients, metrics and statistics are averaged, and all ranks have the same model. Call it
    before or after ``compile``.

    Args:
        model: Any model of Keras. Its class becomes a subclass of its class.

    Returns:
        The same object.

    Raises:
        TypeError: Not a model of Keras.
        ValueError: A strategy of parameter servers, several GPUs in one process, ``keras.distribution`` beside it, or a
            model of another strategy.
        RuntimeError: Called inside ``strategy.run``, or outside of the scope although a strategy has several ranks.

    >>> import mpidist
    >>> with mpidist.OneDeviceStrategy("cpu:0").scope():
    ...     model = adopt(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    ...     model.compile("sgd", "mse")
    >>> isinstance(model, keras.Sequential), model.count_params()
    (True, 3)
    """
    check_adopts_in_scope("mpidist.keras.adopt()")
    strategy = cast("Strategy", get_strategy())
    require_cross_replica(strategy, "mpidist.keras.adopt()", "call it where the model is made")
    _check(strategy)
    if not isinstance(model, keras.Model):
        raise TypeError(f"model is a {type(model).__name__}; expected a keras.Model, such as keras.Sequential([...])")
    if isinstance(model, ReplicaModel):
        model.require_strategy(strategy)
        return model
    subclassed(model, _Model, Adoption(strategy, _Optimizer))
    if model.compiled:
        model.adopt_compiled()
    return model


def _check(strategy: Strategy) -> None:
    """Raise ValueError for a strategy that Keras' models cannot be trained by."""
    if strategy is not default_strategy and not isinstance(strategy, _TAKEN):
        raise ValueError(
            f"{type(strategy).__name__} and a Keras model: its variables are Keras' own, in this process, and not on "
            "parameter servers, which take one update at a time. Expected mpidist.MultiWorkerMirroredStrategy()"
        )
    if keras.distribution.distribution() is not None:
        raise ValueError("keras.distribution.set_distribution() was called; expected it or a strategy, not both")
    gpus = [
        device
        for replica in strategy.extended.worker_devices_by_replica
        for device in replica
        if parse_device(device).kind == "gpu"
    ]
    if len(gpus) > 1:
        raise ValueError(
            f"this process has {len(gpus)} GPUs, and Keras computes on one device; start a rank for each: mpirun -n "
            f"{len(gpus)}"
        )
