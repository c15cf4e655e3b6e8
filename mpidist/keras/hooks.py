"""Hooks on Keras' models, with which a scope reaches them as in TensorFlow; imported by ``Strategy``.

Methods of Keras' own classes are wrapped: Keras has no callback for models that are made or compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from weakref import WeakKeyDictionary

import keras

from mpidist.core.context import get_strategy, has_strategy, in_scope_of
from mpidist.core.protocols import StrategyLike
from mpidist.keras.untyped import KerasObject

_scope_of: WeakKeyDictionary[KerasObject, StrategyLike] = WeakKeyDictionary()


def _note_scope(model: KerasObject) -> None:
    """Remember the scope that a model is made in: it may be compiled outside."""
    if has_strategy():
        _scope_of[model] = get_strategy()


def _adopt(model: KerasObject) -> None:
    """Have a compiled model trained by the strategy of its scope."""
    strategy = get_strategy() if has_strategy() else _scope_of.get(model)
    if strategy is not None:
        # Raises ImportError for backends of Keras that it does not support.
        from mpidist.keras.adopting import adopt

        with in_scope_of(strategy):
            adopt(model)


def _call_after(method: str, hook: Callable[[KerasObject], None]) -> None:
    """Call ``hook`` after a method of Keras' trainer."""
    # On the class that defines both methods: Keras compares Trainer.compile with that of a model that it loads.
    trainer = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
    original = getattr(trainer, method)

    @wraps(original)
    def hooked(self: KerasObject, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        hook(self)

    setattr(trainer, method, hooked)


_call_after("__init__", _note_scope)
_call_after("compile", _adopt)
