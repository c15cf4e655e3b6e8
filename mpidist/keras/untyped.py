"""Names for the objects of Keras, which has no types."""

from __future__ import annotations

from typing import Any, TypeAlias

# Tensors of Keras' backend or arrays, and nests of them.
Tensors: TypeAlias = Any
# A model, a variable, a callback.
KerasObject: TypeAlias = Any
