"""Convert arrays of other libraries to NumPy or CuPy and back, without copying.

Arrays with DLPack are supported (PyTorch tensors, JAX arrays). On the CPU, objects with the buffer protocol are too,
such as array.array. Arrays on a GPU become CuPy arrays. Results have the type of the input. Buffers of no array library
become NumPy arrays.

The arithmetic classes compute with tensors of PyTorch and arrays of JAX and preserve gradients. Neither library is
imported here, because their values exist only in programs that imported them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import numpy as np

from mpidist.arrays.device_ops import is_device_array, ops_for, ops_of
from mpidist.arrays.dtypes import Array, DType, as_dtype

if TYPE_CHECKING:
    import jax
    import torch


T = TypeVar("T")
# Converts a result to a scalar, a tensor of PyTorch or an array of JAX.
Restore = Callable[[Array], Any]

NUMBERS = (bool, int, float, complex, np.generic)
# DLPack's device types: CUDA memory, and memory that CUDA migrates between host and device.
_CUDA, _CUDA_MANAGED = 2, 13
_ROCM = 10


def is_array_like(value: object) -> bool:
    """Return True if ``value`` is a number or an array of any library."""
    return (
        isinstance(value, (np.ndarray, *NUMBERS))
        or hasattr(value, "__array__")
        or hasattr(value, "__dlpack__")
        or hasattr(value, "__cuda_array_interface__")
        or isinstance(value, (memoryview, bytearray))
    )


def to_array(value: Any, what: str = "value") -> Array:
    """Convert ``value`` to a NumPy array, or on a GPU to a CuPy array.

    The array shares memory with ``value`` if possible. Python numbers become 0-d arrays, with NumPy's dtypes. Errors
    name the value ``what``.

    >>> to_array(1.5).dtype
    dtype('float64')
    """
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{what} is a masked array, whose mask would be lost. Fill it first: {what}.filled(0)")
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, NUMBERS):
        return np.asarray(value)
    if is_device_array(value):
        return value
    if is_torch(value):
        return _from_torch_on_gpu(value, what) if value.is_cuda else _from_torch(value, what)
    if is_jax(value):
        return _from_jax(value, what)
    if _is_on_gpu(value):
        return _from_gpu(value, what)
    if hasattr(value, "__array__"):
        array = np.asarray(value)
    elif hasattr(value, "__dlpack__"):
        try:
            array = np.from_dlpack(value)
        except (BufferError, RuntimeError) as error:
            raise TypeError(f"{what} of type {_type_name(value)} cannot be read on the CPU: {error}") from error
    else:
        try:
            array = np.asarray(memoryview(value))
        except TypeError:
            raise TypeError(
                f"{what} is of type {_type_name(value)}; expected a number, a NumPy or CuPy array, or an array with "
                "DLPack or, on the CPU, the buffer protocol. Convert it with numpy.asarray(...)"
            ) from None
    if array.dtype.hasobject:
        raise TypeError(f"{what} of type {_type_name(value)} holds Python objects. Pass numbers")
    return array


def restorer(value: object) -> Restore | None:
    """Return a function that converts an array to the type of ``value``.

    Returns None if results need no conversion. Numbers become NumPy scalars.

    >>> restorer(1.5)(np.array(3.0))
    np.float64(3.0)
    """
    if isinstance(value, np.ndarray) or is_device_array(value):
        return None
    if isinstance(value, NUMBERS):
        return _to_scalar
    if is_torch(value):
        return to_torch
    if is_jax(value):
        return partial(_to_jax, value)
    if hasattr(value, "__array_namespace__") and hasattr(value, "__dlpack__"):
        namespace = value.__array_namespace__()
        return lambda array: _exported(namespace.from_dlpack, array)
    return None


def graph_error(what: str) -> RuntimeError:
    """Build the error for a call while the current stream records a CUDA graph."""
    return RuntimeError(
        f"{what}: the current stream records a CUDA graph, and graphs cannot record the host's communication. Call it "
        "between two graphs: end the first before it (cudaStreamEndCapture, the end of `with torch.cuda.graph(...)`)"
    )


def _to_scalar(array: Array) -> object:
    return array[()]


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _is_on_gpu(value: object) -> bool:
    # Checked before __array__, which silently copies from the GPU in some libraries.
    dlpack_device = getattr(value, "__dlpack_device__", None)
    if dlpack_device is None:
        return hasattr(value, "__cuda_array_interface__")
    try:
        return dlpack_device()[0] in (_CUDA, _CUDA_MANAGED, _ROCM)
    except (BufferError, RuntimeError, TypeError, ValueError, NotImplementedError):
        return False  # a device unknown to DLPack, for which the read fails with the reason


def _from_gpu(value: Any, what: str) -> Array:
    """Return an array of another library as a CuPy array over the same memory."""
    from mpidist.arrays.streams import require_cupy

    cupy = require_cupy()
    if not hasattr(value, "__dlpack__"):
        wrapped: Array = cupy.asarray(value)
        return wrapped
    try:
        # from_dlpack orders CuPy's current stream after pending work of the other library.
        with ops_for("gpu").on(value.__dlpack_device__()[1]):
            array: Array = cupy.from_dlpack(value)
    except (BufferError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{what} of type {_type_name(value)} cannot be read by CuPy: {error}") from error
    return array


def is_torch(value: object) -> TypeGuard[torch.Tensor]:
    """Return True if ``value`` is a tensor of PyTorch."""
    # A tensor can exist only if torch is imported.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_sparse(tensor: torch.Tensor) -> bool:
    """Return True if a tensor of PyTorch is sparse, which NumPy does not support."""
    return tensor.layout is not sys.modules["torch"].strided


def is_writable(value: object) -> bool:
    """Return True if each element of an array or a tensor can be written separately."""
    if is_torch(value):
        return all(stride or size <= 1 for stride, size in zip(value.stride(), value.shape, strict=True))
    return not isinstance(value, np.ndarray) or value.flags.writeable


def fill_torch(tensor: torch.Tensor, array: Array) -> None:
    """Copy ``array`` into a tensor of PyTorch in place, visible to autograd's version counter."""
    torch = sys.modules["torch"]
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        tensor.copy_(to_torch(array))


def _is_of(library: str, name: str, value: object) -> bool:
    """Return True if ``value`` is of a class of a library. Imports nothing."""
    # During its import, a library lacks attributes.
    kind = sys.modules.get(library)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    return kind is not None and isinstance(value, kind)  # type: ignore[arg-type]


def is_torch_module(value: object) -> TypeGuard[torch.nn.Module]:
    """Return True if ``value`` is a module of PyTorch."""
    return _is_of("torch", "nn.Module", value)


def others_of_module(module: torch.nn.Module) -> list[tuple[str, object]]:
    """Return the attributes of a module and its submodules that PyTorch did not set."""
    of_torch = vars(sys.modules["torch"].nn.Module()).keys()
    return [
        (f"{prefix}.{name}".removeprefix("."), value)
        for prefix, inner in module.named_modules()
        for name, value in vars(inner).items()
        if name not in of_torch
    ]


def is_torch_optimizer(value: object) -> bool:
    """Return True if ``value`` is an optimizer of PyTorch."""
    return _is_of("torch", "optim.Optimizer", value)


def is_torch_scheduler(value: object) -> bool:
    """Return True if ``value`` is a learning rate scheduler of PyTorch."""
    return _is_of("torch", "optim.lr_scheduler.LRScheduler", value)


def is_keras_layer(value: object) -> bool:
    """Return True if ``value`` is a layer or model of Keras."""
    return _is_of("keras", "layers.Layer", value)


def is_jax(value: object) -> TypeGuard[jax.Array]:
    """Return True if ``value`` is an array of JAX."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, getattr(jax, "Array", ()))


def like_jax(before: jax.Array, array: Array) -> jax.Array:
    """Return ``array`` as a JAX array on the devices of ``before``."""
    jax = sys.modules["jax"]
    # JAX moves uncommitted arrays to other devices when needed.
    sharding = before.sharding if getattr(before, "committed", True) else None
    # Copy, because JAX may alias the memory of its argument.
    return jax.device_put(np.array(array), sharding)


def _from_jax(value: jax.Array, what: str) -> Array:
    if isinstance(value, sys.modules["jax"].core.Tracer):
        raise TypeError(
            f"{what} has no value while JAX traces a function (jit, grad, vmap). Use mpidist.jax.all_reduce there, or "
            "call this between two jitted functions"
        )
    # devices() is faster than DLPack's query.
    if any([device.platform != "cpu" for device in value.devices()]) and _is_on_gpu(value):
        return _from_gpu(value, what)
    return np.asarray(value)


def _to_jax(before: jax.Array, array: Array) -> jax.Array:
    if is_device_array(array):
        return _exported(sys.modules["jax"].numpy.from_dlpack, array)
    if getattr(before, "committed", True):
        return like_jax(before, array)
    # Three times faster than jnp.asarray. Import by DLPack would commit the result to its device.
    return _jax_identity()(array)


@cache
def _jax_identity() -> Callable[[Array], jax.Array]:
    jax = sys.modules["jax"]
    made: Callable[[Array], Any] = jax.jit(jax.numpy.asarray)
    return made


def jax_makes(dtype: DType) -> DType:
    """Return the dtype that JAX uses for ``dtype``, narrower if 64 bits are disabled."""
    made: DType = sys.modules["jax"].dtypes.canonicalize_dtype(dtype)
    return made


def _exported(from_dlpack: Callable[[Array], T], array: Array) -> T:
    """Export an array to another library, which shares its memory."""
    if not is_device_array(array):
        return from_dlpack(_writable(array))
    ops = ops_of(array)
    # The export orders the other library after the current stream of the current device.
    with ops.on(ops.device_of(array)):
        return from_dlpack(array)


def _writable(array: Array) -> Array:
    # Common versions of DLPack do not support read-only arrays.
    return array if array.flags.writeable else array.copy()


def _from_torch(tensor: torch.Tensor, what: str) -> Array:
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise TypeError(
            f"{what} is a torch.Tensor on {tensor.device}; expected one on the CPU or on a CUDA device: {what}.cpu()"
        )
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy()
        return bits.view(as_dtype("bfloat16"))
    try:
        array: Array = tensor.numpy()
    except (RuntimeError, TypeError) as error:
        raise TypeError(f"{what} is a torch.Tensor that NumPy cannot read: {error}") from error
    return array


def _from_torch_on_gpu(tensor: torch.Tensor, what: str) -> Array:
    torch = sys.modules["torch"]
    if torch.cuda.is_current_stream_capturing():
        raise graph_error(what)
    if tensor.dtype == torch.bfloat16:
        # CuPy's DLPack has no bfloat16.
        return _from_gpu(tensor.detach().view(torch.int16), what).view(as_dtype("bfloat16"))
    return _from_gpu(tensor.detach(), what)


def to_torch(array: Array) -> torch.Tensor:
    """Return an array as a tensor of PyTorch that shares its memory."""
    torch = sys.modules["torch"]
    if array.dtype.name == "bfloat16":
        return to_torch(array.view(np.int16)).view(torch.bfloat16)
    if is_device_array(array):
        return _exported(torch.from_dlpack, array)
    return torch.from_numpy(_writable(array))


class TorchArithmetic:
    """Compute with tensors of PyTorch."""

    def __init__(self) -> None:
        self._torch = sys.modules["torch"]

    def array(self, value: object, like: torch.Tensor | None = None, what: str = "value") -> torch.Tensor:
        """Convert to a tensor on the device of ``like``. Lists of tensors are stacked."""
        if is_torch(value):
            return value if like is None else value.to(like.device)
        if isinstance(value, Sequence) and arithmetic_of(value) is not None:
            return self._torch.stack([self.array(part, like) for part in value])
        array = np.asarray(value)
        # PyTorch rejects negative strides and foreign byte order, and warns about read-only arrays.
        array = np.array(array, array.dtype.newbyteorder("="), order="C")
        return self._torch.as_tensor(array, device=None if like is None else like.device)

    def result_dtype(self, array: torch.Tensor) -> torch.dtype:
        """Return the dtype of an average: float64 for integers, otherwise the array's."""
        is_inexact = array.dtype.is_floating_point or array.dtype.is_complex
        return array.dtype if is_inexact else self._torch.float64

    def wide_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a sum: at least float32."""
        return self._torch.float32 if dtype.itemsize < 4 else dtype

    def cast(self, array: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Cast ``array`` to ``dtype``."""
        return array.to(dtype)

    def current(self, array: torch.Tensor) -> AbstractContextManager[None]:
        """Return a null context, because PyTorch uses the device of ``array``."""
        return nullcontext()


class JaxArithmetic:
    """Compute with arrays of JAX, also while JAX traces a function (``jax.jit``, ``jax.grad``)."""

    def __init__(self) -> None:
        self._jnp = sys.modules["jax"].numpy

    def array(self, value: object, like: jax.Array | None = None, what: str = "value") -> jax.Array:
        """Convert to an array of JAX. Lists of arrays are stacked."""
        if isinstance(value, Sequence) and arithmetic_of(value) is not None:
            return self._jnp.stack([self.array(part, like) for part in value])
        return self._jnp.asarray(value)

    def result_dtype(self, array: jax.Array) -> DType:
        """Return the dtype of an average: JAX's default for integers, otherwise the array's."""
        jnp = self._jnp
        dtype: DType = array.dtype if jnp.issubdtype(array.dtype, jnp.inexact) else jnp.result_type(float)
        return dtype

    def wide_dtype(self, dtype: DType) -> DType:
        """Return the dtype of a sum: at least float32."""
        return self._jnp.dtype(self._jnp.float32) if dtype.itemsize < 4 else dtype

    def cast(self, array: jax.Array, dtype: DType) -> jax.Array:
        """Cast ``array`` to ``dtype``."""
        return array.astype(dtype)

    def current(self, array: jax.Array) -> AbstractContextManager[None]:
        """Return a null context, because JAX uses the device of ``array``."""
        return nullcontext()


def arithmetic_of(*values: object) -> TorchArithmetic | JaxArithmetic | None:
    """Return the arithmetic of the first tensor of PyTorch or array of JAX, or None.

    >>> arithmetic_of(1.5, [2.5]) is None
    True
    """
    for value in values:
        if is_torch(value):
            return TorchArithmetic()
        if is_jax(value):
            return JaxArithmetic()
        if isinstance(value, (list, tuple)) and (found := arithmetic_of(*value)) is not None:
            return found
    return None
