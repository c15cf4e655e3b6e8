"""The type of torch's objects, which type checkers see only where torch is installed."""

from __future__ import annotations

from typing import Any, TypeAlias

# Options, works, groups and stores of torch.distributed, and its classes, also as bases.
Foreign: TypeAlias = Any
