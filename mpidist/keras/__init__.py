"""Keras 3 under a strategy: ``mpidist.keras.adopt(model)`` inside ``strategy.scope()``.

Nothing of Keras is changed: the model, and the optimizer that it is compiled with, get subclasses of their classes.
"""

from mpidist.keras.adopting import adopt

__all__ = ["adopt"]
