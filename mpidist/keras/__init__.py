"""Keras 3 under a strategy: models that are created or compiled inside ``strategy.scope()``."""

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
