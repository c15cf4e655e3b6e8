"""The events of torch's profilers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

_is_enabled: Any = torch.autograd._profiler_enabled
_enter: Any = torch.autograd._record_function_with_args_enter
_exit: Any = torch.autograd._record_function_with_args_exit


def begin_event(name: str, tensors: Sequence[Tensor]) -> Callable[[], None] | None:
    """Begin an event of a profiler, and return what ends it, in any thread; None while no profiler runs."""
    if not _is_enabled():
        return None
    handle = _enter(name, *tensors)
    return lambda: _exit(handle)
