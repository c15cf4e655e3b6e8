"""How an ordinary operation runs: it sees what its stream has done, and its result lands on the device later.

An operation first waits for the *current* stream and no other, then computes at once; what it writes is written by a
job of that stream. A stream that does not wait for an event sees memory before the write, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.fake_cupy.devices import current_device, use_cublas
from tests.support.fake_cupy.streams import current_worker

SCALARS = (bool, int, float, complex, np.generic)
# Keywords of NumPy that CuPy's reductions do not have.
_ABSENT = {"initial", "where", "subok", "like"}
_REDUCTIONS = {np.sum, np.mean, np.prod, np.max, np.min, np.any, np.all}
_OF_CUBLAS = {np.matmul, np.dot, np.vdot, np.inner, np.tensordot}


class Capsule:
    """What ``__dlpack__`` of an array gives."""

    def __init__(self, array: Any) -> None:
        self.array = array


def run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any = None,
    host_operands: bool = False,
) -> Any:
    """Run a function of NumPy on arrays of the current device.

    Args:
        function: What to run.
        args: Its arguments; arrays may be in lists and tuples.
        kwargs: Its keyword arguments but for ``out``.
        out: The array that takes the result, if any.
        host_operands: Whether NumPy arrays are allowed: indices are, operands are not.
    """
    if function in _REDUCTIONS and _ABSENT & kwargs.keys():
        raise TypeError(f"{function.__name__}() got an unexpected keyword argument {_ABSENT & kwargs.keys()}")
    if function in _OF_CUBLAS:
        use_cublas()
    sources: list[Any] = []
    seen_args = _seen(args, sources, host_operands)
    seen_kwargs = {name: _seen(value, sources, host_operands) for name, value in kwargs.items()}
    if out is not None:
        _check(out, sources)
        current_worker().drain()
        seen_out = out.host_view()
        value = seen_out.copy()
        function(*seen_args, out=value, **seen_kwargs)
        _launch(lambda: np.copyto(seen_out, value))
        return out
    current_worker().drain()
    return _wrapped(function(*seen_args, **seen_kwargs), sources)


def run_into(target: Any, write: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Let ``write(view of target, *args)`` happen on the current stream, with ``args`` as they are now."""
    sources: list[Any] = []
    _check(target, sources)
    views = _seen(args, sources, host_operands=True)
    current_worker().drain()
    seen = [_snapshot(part) for part in views]
    view = target.host_view()
    write(view.copy(), *seen)  # errors show in the line that makes them
    _launch(lambda: write(view, *seen))


def binary(function: Any, left: Any, right: Any, reflected: bool) -> Any:
    """Run an operator."""
    from tests.support.fake_cupy.ndarray import ndarray

    if not isinstance(right, (ndarray, np.ndarray, *SCALARS)):
        return NotImplemented
    if isinstance(right, np.ndarray) and not right.ndim and function in _COMPARISONS:
        right = right.item()
    return run(function, (right, left) if reflected else (left, right), {})


_COMPARISONS = {np.less, np.less_equal, np.equal, np.not_equal, np.greater, np.greater_equal}


def offered(function: Any) -> Any:
    """Return the function of the fake module that stands for one of NumPy, or None."""
    import functools
    import sys

    try:
        path = [*function.__module__.split(".")[1:], function.__name__]
        found = functools.reduce(getattr, path, sys.modules["cupy"])
    except AttributeError:
        return None
    return None if found is function else found


def _check(array: Any, sources: list[Any]) -> None:
    from tests.support.fake_cupy.ndarray import ndarray

    if not isinstance(array, ndarray):
        raise TypeError(f"Unsupported type {type(array)}")
    if array.data.device_id != current_device():
        raise ValueError(
            f"The device where the array resides ({array.data.device_id}) is different from the current device "
            f"({current_device()}). Peer access is unavailable between these devices."
        )
    sources.append(array)


def _seen(value: Any, sources: list[Any], host_operands: bool) -> Any:
    from tests.support.fake_cupy.ndarray import ndarray

    if isinstance(value, ndarray):
        _check(value, sources)
        return value.host_view()
    if isinstance(value, np.ndarray) and not host_operands:
        raise TypeError(f"Unsupported type {type(value)}")
    if type(value) in (list, tuple):
        return type(value)(_seen(part, sources, host_operands) for part in value)
    return value


def _snapshot(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(_snapshot(part) for part in value)
    return value


def _wrapped(value: Any, sources: list[Any]) -> Any:
    """Return a result of NumPy as an array of the device: a view where it is one, new memory otherwise."""
    from tests.support.fake_cupy.ndarray import ndarray

    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_wrapped(part, sources) for part in value))
    if type(value) in (list, tuple):
        return type(value)(_wrapped(part, sources) for part in value)
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        return value
    for source in sources:
        if value.size and np.may_share_memory(value, source.data.mem.buffer):
            return source.view_of(value)
    result = ndarray(value.shape, value.dtype, strides=value.strides if _is_dense(value) else None)
    seen = result.host_view()
    _launch(lambda: np.copyto(seen, value))
    return result


def _launch(job: Callable[[], None]) -> None:
    worker = current_worker()
    worker.machine.counts.add("launches")
    worker.enqueue(job)


def _is_dense(value: np.ndarray) -> bool:
    return value.flags.c_contiguous or value.flags.f_contiguous
