"""Options that callers hand through many rooms: CommunicationOptions and RunOptions."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from mpidist.core.enums import CommunicationImplementation

WIRE_DTYPES = (None, "float16", "bfloat16")


@dataclass(frozen=True, init=False)
class CommunicationOptions:
    """The way in which collectives communicate (tf.distribute.experimental.CommunicationOptions).

    Args:
        bytes_per_pack: Arrays are packed into buffers of at least this many bytes; 0 packs everything of one
            dtype together.
        timeout_seconds: Deadline of one collective; ``None`` takes ``MPIDIST_TIMEOUT`` (30 minutes).
        implementation: A ``CommunicationImplementation`` or its name.
        wire_dtype: ``"float16"`` or ``"bfloat16"`` halves the bytes of float32 sums on the wire. Extension.
        error_feedback: Add the rounding error of ``wire_dtype`` to the next call. Extension.
        deterministic: The same bits for the same inputs and the same places of ranks on nodes, from run to run and
            whatever is packed together, between nodes as well. Extension.
        algorithm: Force one algorithm by name instead of the one the table picks. Extension.

    Raises:
        ValueError: A negative size, a time that is not positive, or an unknown name.

    >>> CommunicationOptions(bytes_per_pack=1 << 20, implementation="ring").implementation
    <CommunicationImplementation.RING: 'RING'>
    """

    bytes_per_pack: int
    timeout_seconds: float | None
    implementation: CommunicationImplementation
    wire_dtype: str | None
    error_feedback: bool
    deterministic: bool
    algorithm: str | None

    def __init__(
        self,
        bytes_per_pack: int = 0,
        timeout_seconds: float | None = None,
        implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        *,
        wire_dtype: str | None = None,
        error_feedback: bool = False,
        deterministic: bool = False,
        algorithm: str | None = None,
    ) -> None:
        if isinstance(implementation, str):
            member = CommunicationImplementation.__members__.get(implementation.upper())
        else:
            member = implementation if isinstance(implementation, CommunicationImplementation) else None
        if member is None:
            names = ", ".join(CommunicationImplementation.__members__)
            raise ValueError(f"implementation is {implementation!r}; expected one of {names}")
        if bytes_per_pack < 0:
            raise ValueError(f"bytes_per_pack is {bytes_per_pack}; expected 0 (one pack) or a number of bytes")
        if timeout_seconds is not None and not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds is {timeout_seconds}; expected None or more than 0")
        if wire_dtype not in WIRE_DTYPES:
            raise ValueError(f"wire_dtype is {wire_dtype!r}; expected one of {WIRE_DTYPES}")
        values = (bytes_per_pack, timeout_seconds, member, wire_dtype, error_feedback, deterministic, algorithm)
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        # Kept, since options are part of what every plan is looked up by.
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def merge(self, other: CommunicationOptions | None) -> CommunicationOptions:
        """Return these options overridden by the fields of ``other`` that differ from the defaults."""
        if other is None:
            return self
        changed = {
            f.name: getattr(other, f.name)
            for f in fields(other)
            if getattr(other, f.name) != getattr(_DEFAULTS, f.name)
        }
        return replace(self, **changed) if changed else self


_DEFAULTS = CommunicationOptions()
CallOptions = CommunicationOptions | None
"""Options of one call; None for those of whom it is made by."""


def check_communication_options(options: object) -> None:
    """Raise TypeError unless ``options`` is None or a CommunicationOptions."""
    if options is not None and not isinstance(options, CommunicationOptions):
        raise TypeError(
            f"options is {options!r} of type {type(options).__name__}; expected None or "
            "mpidist.experimental.CommunicationOptions(...)"
        )


def CollectiveHints(  # noqa: N802 - TensorFlow's name
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """Return the CommunicationOptions that replaced hints (deprecated, as in TensorFlow)."""
    warnings.warn("CollectiveHints is deprecated; use CommunicationOptions", DeprecationWarning, stacklevel=2)
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


class RunOptions(NamedTuple):
    """Options of ``Strategy.run`` (tf.distribute.RunOptions).

    They matter on TPUs only; mpidist accepts and ignores them, as TensorFlow does elsewhere.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: object = None
