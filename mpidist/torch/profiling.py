"""The events of torch's profilers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from mpidist.core.concurrency import start_daemon
from mpidist.torch.foreign import Foreign

if TYPE_CHECKING:
    from torch import Tensor

_autograd: Foreign = torch.autograd
is_profiling: Callable[[], bool] = _autograd._profiler_enabled
"""Return whether a profiler runs."""
_enter = _autograd._record_function_with_args_enter
_exit = _autograd._record_function_with_args_exit


def begin_event(name: str, tensors: Sequence[Tensor]) -> Callable[[], None] | None:
    """Begin an event, and return the function that ends it; None while no profiler runs."""
    if not is_profiling():
        return None
    handle = _enter(name, *tensors)

    def end() -> None:
        # In another thread, by which profilers tell events of a backend from calls of the program.
        start_daemon("event", lambda: _exit(handle)).join()

    return end
