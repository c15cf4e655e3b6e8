"""``cupy.RawKernel``: its source is not read; kernels.py does what the kernel's name says."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.fake_cupy.devices import current_device
from tests.support.fake_cupy.ndarray import ndarray
from tests.support.fake_cupy.streams import worker_of

_MOST_THREADS = 1024
# CUDA before 12.1 has 4 KiB for all parameters of a kernel.
_MOST_BYTES = 4096 - 64


def compile_source(kernel: RawKernel) -> None:
    """Compile a kernel for the current device: nothing here; a test may let it fail."""


class RawKernel:
    """``cupy.RawKernel``.

    The stream's thread runs the kernel. It sees arrays of the device as the addresses of their first elements, and a
    NumPy array of one element by value.
    """

    def __init__(
        self,
        code: str,
        name: str,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        *,
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        jitify: Any = None,
    ) -> None:
        if not isinstance(options, tuple):
            raise TypeError(f"Argument 'options' has incorrect type (expected tuple, got {type(options).__name__})")
        if name not in code:
            raise ValueError(f"the source has no kernel {name!r}")
        self.code = code
        self.name = name
        self.options = options
        self.backend = backend
        self._compiled: set[int] = set()

    @property
    def kernel(self) -> RawKernel:
        """Itself, compiled for the current device."""
        if current_device() not in self._compiled:
            compile_source(self)
            self._compiled.add(current_device())
        return self

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0, stream: Any = None) -> None:
        from tests.support.fake_cupy.kernels import run

        if not (isinstance(grid, tuple) and isinstance(block, tuple)):
            raise TypeError("grid and block are tuples")
        if not 0 < int(np.prod(block)) <= _MOST_THREADS:
            raise ValueError(f"a block has 1 to {_MOST_THREADS} threads, and was to have {block}")
        name = self.kernel.name
        seen = tuple(self._seen(value) for value in args)
        worker = worker_of(stream)
        worker.machine.counts.add("launches")
        worker.enqueue(lambda: run(name, grid, block, seen, worker.device))

    def _seen(self, value: Any) -> Any:
        if isinstance(value, ndarray):
            if value.data.device_id != current_device():
                raise RuntimeError(
                    f"kernel {self.name} of gpu:{current_device()} would read memory of gpu:{value.data.device_id}"
                )
            return value.data.ptr
        if isinstance(value, np.ndarray):
            if value.size != 1:
                raise TypeError(f"Only numpy.ndarrays of size one can be passed by value, not shape {value.shape}")
            if value.nbytes > _MOST_BYTES:
                raise ValueError(f"a kernel has at most {_MOST_BYTES} bytes of parameters")
            return value.copy()
        return value
