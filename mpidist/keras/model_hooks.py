"""Hooks by which a strategy's scope adopts Keras models, as in TensorFlow.

Methods of Keras' own classes are wrapped: Keras has no callback for models that are made or compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from weakref import WeakKeyDictionary

import keras

from mpidist.core.context import StrategyLike, get_strategy, has_strategy, in_scope_of

_scope_of: WeakKeyDictionary[keras.Model, StrategyLike] = WeakKeyDictionary()


def _note_scope(model: keras.Model) -> None:
    """Record the scope in which a model is created. It may be compiled outside."""
    if has_strategy():
        _scope_of[model] = get_strategy()


def _adopt(model: keras.Model) -> None:
    """Let the strategy of its scope train a compiled model."""
    strategy = get_strategy() if has_strategy() else _scope_of.get(model)
    if strategy is not None:
        # An ImportError for other backends of Keras.
        from mpidist.keras.adopting import adopt

        with in_scope_of(strategy):
            adopt(model)


def _require_adoption(model: keras.Model) -> None:
    """Raise RuntimeError if a model is trained in a scope that has not adopted it."""
    strategy = get_strategy()
    owner = getattr(getattr(model, "_mpidist", None), "strategy", None)
    if strategy.num_replicas_in_sync > 1 and owner is not strategy:
        raise RuntimeError(
            f"the Keras model {model.name!r} is trained under {type(strategy).__name__}, which has not adopted it. "
            "Each rank would train a model of its own. Call model.compile() or mpidist.keras.adopt(model) inside `with "
            "strategy.scope():`, or train a model of this rank alone outside of the scope."
        )


def _hook(owner_of: str, method: str, hook: Callable[[keras.Model], None], calls_before: bool = False) -> None:
    """Call ``hook`` before or after a method of the class of Keras that defines ``owner_of``."""
    owner = next(kind for kind in keras.Model.__mro__ if owner_of in vars(kind))
    original = getattr(owner, method)

    @wraps(original)
    def hooked(self: keras.Model, *args: object, **kwargs: object) -> None:
        if calls_before:
            hook(self)
        original(self, *args, **kwargs)
        if not calls_before:
            hook(self)

    setattr(owner, method, hooked)


# On Keras' base trainer, not on Model: while loading a model, Keras compares its compile with Trainer.compile.
_hook("compile", "__init__", _note_scope)
_hook("compile", "compile", _adopt)
# By which fit() and train_on_batch() begin.
_hook("make_train_function", "make_train_function", _require_adoption, calls_before=True)
