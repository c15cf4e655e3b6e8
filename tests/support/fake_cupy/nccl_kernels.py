"""The order in which a pretended GPU runs kernels of NCCL: one at a time, as they were launched.

A GPU may do so, as there may be no room for two of them, or one queue in hardware for two streams. Ranks that launch
the kernels of two communicators in different orders then wait for one another for ever.
"""

from __future__ import annotations

import threading

from tests.support.fake_cupy.nccl_messages import Steps


class Kernels:
    """The kernels of NCCL that were launched on one GPU and have not ended.

    Args:
        one_at_a_time: Whether they wait for one another.
    """

    def __init__(self, one_at_a_time: bool) -> None:
        self._one_at_a_time = one_at_a_time
        self._lock = threading.Lock()
        self._launched: list[object] = []

    def launch(self) -> object:
        """Return what stands for a new one, after all others."""
        kernel = object()
        with self._lock:
            self._launched.append(kernel)
        return kernel

    def until_first(self, kernel: object) -> Steps[None]:
        """Yield until all that were launched before have ended."""
        while self._one_at_a_time and self._launched[0] is not kernel:
            yield

    def end(self, kernel: object) -> None:
        """Let the next one run."""
        with self._lock:
            self._launched.remove(kernel)
