"""Keras 3 under a strategy: models that are made or compiled inside ``strategy.scope()``.

An adopted model, and the optimizer that it is compiled with, become objects of subclasses of their classes.
"""

from typing import TYPE_CHECKING

from mpidist.core.lazy import on_first_use

if TYPE_CHECKING:
    from mpidist.keras.adopting import adopt
    from mpidist.keras.global_batches import sharded
else:
    # Keras takes a second to import, and reads its settings then.
    __getattr__, __dir__ = on_first_use(
        __name__, {"mpidist.keras.adopting": "adopt", "mpidist.keras.global_batches": "sharded"}
    )

del TYPE_CHECKING, on_first_use

__all__ = ["adopt", "sharded"]
