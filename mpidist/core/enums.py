"""The enumerations of tf.distribute: how values are reduced, and how variables are kept in step."""

from __future__ import annotations

from enum import Enum, IntEnum


class VariableSynchronization(IntEnum):
    """The time at which a variable's copies are brought together (tf.VariableSynchronization).

    ``AUTO`` means ``ON_WRITE``; ``NONE`` is refused by every strategy; ``ON_WRITE`` keeps all copies equal at
    each assignment; ``ON_READ`` lets each replica write its own copy and combines them when read.
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(IntEnum):
    """The way to combine values that replicas assign to, or hold in, a variable (tf.VariableAggregation)."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3
    ONLY_FIRST_TOWER = 3


class ReduceOp(Enum):
    """The way to make one value of several replicas' values (tf.distribute.ReduceOp).

    ``SUM`` and ``MEAN`` are TensorFlow's; ``MIN``, ``MAX`` and ``PROD`` are extensions, and so are ``BAND``, ``BOR``
    and ``BXOR`` of whole numbers, bit by bit, and of bool, for which they are the logical operations. Wherever an
    operation is taken its name will do, in any case.

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

    # Members are singletons; Enum's own hash is Python code on the way of every reduction.
    __hash__ = object.__hash__

    @property
    def is_bitwise(self) -> bool:
        """Whether it combines bits. Extension."""
        return self in _BITWISE

    @staticmethod
    def of(op: object) -> ReduceOp:
        """Return the member that ``op`` names.

        Raises:
            ValueError: A string that is no operation.
            TypeError: Neither a ``ReduceOp`` nor a string.
        """
        if type(op) is ReduceOp:
            return op
        if isinstance(op, str):
            member = _REDUCE_OPS.get(op) or _REDUCE_OPS.get(op.upper())
            if member is None:
                names = ", ".join(ReduceOp.__members__)
                raise ValueError(f"reduce_op is {op!r}; expected one of {names}, for example reduce_op='SUM'")
            return member
        names = ", ".join(ReduceOp.__members__)
        hint = f", one of {names}, before the value: strategy.reduce('SUM', x, axis=None), context.all_reduce('SUM', x)"
        if isinstance(op, VariableAggregation):
            hint = "; a VariableAggregation is turned into one by ReduceOp.from_variable_aggregation(...)"
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


# Looked up at every reduction; Enum's own __members__ makes a new proxy each time.
_REDUCE_OPS = dict(ReduceOp.__members__)
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


class CommunicationImplementation(Enum):
    """The library that moves the bytes between replicas (tf.distribute.experimental.CommunicationImplementation).

    ``AUTO`` picks by array kind and place; ``RING`` is MPI and mpidist's own algorithms; ``NCCL`` asks for NCCL
    between GPUs; ``MPI`` is another name for ``RING``.
    """

    AUTO = "AUTO"
    RING = "RING"
    MPI = "RING"
    NCCL = "NCCL"
