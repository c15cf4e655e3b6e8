"""The enumerations of tf.distribute, and the options of collectives and of ``Strategy.run``."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields, replace
from enum import Enum, IntEnum
from typing import NamedTuple

_WIRE_DTYPES = (None, "float16", "bfloat16")


class VariableSynchronization(IntEnum):
    """The time at which a variable's copies are synchronized (tf.VariableSynchronization).

    ``AUTO`` means ``ON_WRITE``. Every strategy refuses ``NONE``. ``ON_WRITE`` keeps all copies equal at each
    assignment. ``ON_READ`` lets each replica write its own copy, and combines the copies when they are read.
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(IntEnum):
    """The way to combine the values that replicas assign to a variable (tf.VariableAggregation)."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3
    ONLY_FIRST_TOWER = 3


class ReduceOp(Enum):
    """The way to combine the values of several replicas (tf.distribute.ReduceOp).

    ``SUM`` and ``MEAN`` are TensorFlow's. ``MIN``, ``MAX`` and ``PROD`` are extensions. So are the bitwise ``BAND``,
    ``BOR`` and ``BXOR`` of integers, which are the logical operations for bool. Every function that takes an operation
    takes its name as well, in any case.

    >>> ReduceOp.of("mean")
    <ReduceOp.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"
    BAND = "BAND"
    BOR = "BOR"
    BXOR = "BXOR"

    # Members are singletons. Enum's own hash is Python code in the path of every reduction.
    __hash__ = object.__hash__

    @property
    def is_bitwise(self) -> bool:
        """Whether it combines bits. Extension."""
        return self in _BITWISE

    @staticmethod
    def of(op: object) -> ReduceOp:
        """Return the member with the name ``op``, or ``op`` itself.

        Raises:
            ValueError: The name is unknown.
            TypeError: Neither a ``ReduceOp`` nor a string.
        """
        if type(op) is ReduceOp:
            return op
        if isinstance(op, str) and (member := _REDUCE_OPS.get(op) or _REDUCE_OPS.get(op.upper())):
            return member
        names = ", ".join(ReduceOp.__members__)
        if isinstance(op, str):
            raise ValueError(f"reduce_op is {op!r}; expected one of {names}, for example reduce_op='SUM'")
        hint = f", one of {names}, before the value: strategy.reduce('SUM', x, axis=None), context.all_reduce('SUM', x)"
        if isinstance(op, VariableAggregation):
            hint = ". Convert a VariableAggregation by ReduceOp.from_variable_aggregation(...)"
        raise TypeError(f"reduce_op is {op!r} of type {type(op).__name__}; expected a ReduceOp or its name{hint}")

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """Return the operation that combines values under ``aggregation``.

        Raises:
            ValueError: ``aggregation`` is neither SUM nor MEAN.
        """
        if aggregation == VariableAggregation.SUM:
            return ReduceOp.SUM
        if aggregation == VariableAggregation.MEAN:
            return ReduceOp.MEAN
        raise ValueError(f"aggregation is {aggregation!r}; only VariableAggregation.SUM and MEAN are reductions")


# For lookups in every reduction. Enum's own __members__ creates a new proxy each time.
_REDUCE_OPS = dict(ReduceOp.__members__)
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


class CommunicationImplementation(Enum):
    """The library that moves data between replicas (tf.distribute.experimental.CommunicationImplementation).

    ``AUTO`` chooses by the kind and location of the arrays. ``RING`` is MPI and mpidist's own algorithms, ``MPI`` is
    another name for it. ``NCCL`` requests NCCL between GPUs.
    """

    AUTO = "AUTO"
    RING = "RING"
    MPI = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True, init=False)
class CommunicationOptions:
    """The options of collectives (tf.distribute.experimental.CommunicationOptions).

    Args:
        bytes_per_pack: Arrays are packed into buffers of at least this many bytes. 0 packs all arrays of one dtype
            together.
        timeout_seconds: Deadline of one collective. ``None`` means ``MPIDIST_TIMEOUT`` (30 minutes by default).
        implementation: A ``CommunicationImplementation`` or its name.
        wire_dtype: ``"float16"`` or ``"bfloat16"`` halves the bytes of float32 sums on the wire. Extension.
        error_feedback: Add the rounding error of ``wire_dtype`` to the next call. Extension.
        deterministic: Return the same bits for the same inputs and the same placement of ranks on nodes, in every run
            and for every packing, between nodes as well. Extension.
        algorithm: Name of the algorithm to use instead of the one in the table. Extension.

    Raises:
        ValueError: A size is negative, a time is not positive, or a name is unknown.

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
        if wire_dtype not in _WIRE_DTYPES:
            raise ValueError(f"wire_dtype is {wire_dtype!r}; expected one of {_WIRE_DTYPES}")
        values = (bytes_per_pack, timeout_seconds, member, wire_dtype, error_feedback, deterministic, algorithm)
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        # Cached, because options are part of the key of every plan.
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def merge(self, other: CommunicationOptions | None) -> CommunicationOptions:
        """Return these options, overridden by the fields of ``other`` that differ from the defaults."""
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
"""Options of one call. None means the options of its strategy or communicator."""


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
    """Return the CommunicationOptions that replace hints (deprecated, as in TensorFlow)."""
    warnings.warn("CollectiveHints is deprecated; use CommunicationOptions", DeprecationWarning, stacklevel=2)
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


class RunOptions(NamedTuple):
    """Options of ``Strategy.run`` (tf.distribute.RunOptions).

    They apply to TPUs only. mpidist accepts and ignores them, as TensorFlow does on other devices.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: object = None
