"""Constants, enumerations, options and public names."""

from __future__ import annotations

import mpidist
from mpidist import ReduceOp, VariableAggregation, VariableSynchronization
from mpidist.experimental import (
    CollectiveCommunication,
    CommunicationImplementation,
    CommunicationOptions,
)


def test_numbers_of_the_enumerations() -> None:
    assert [(m.name, m.value) for m in VariableSynchronization] == [
        ("AUTO", 0),
        ("NONE", 1),
        ("ON_WRITE", 2),
        ("ON_READ", 3),
    ]
    assert [(m.name, m.value) for m in VariableAggregation] == [
        ("NONE", 0),
        ("SUM", 1),
        ("MEAN", 2),
        ("ONLY_FIRST_REPLICA", 3),
    ]
    assert VariableAggregation.ONLY_FIRST_TOWER is VariableAggregation.ONLY_FIRST_REPLICA
    assert {op.name for op in ReduceOp} == {"SUM", "MEAN", "MIN", "MAX", "PROD", "BAND", "BOR", "BXOR"}
    assert mpidist.get_loss_reduction() is ReduceOp.SUM
    assert mpidist.v1.get_loss_reduction() is ReduceOp.SUM
    policies = [(m.name, m.value) for m in mpidist.AutoShardPolicy]
    assert sorted(policies, key=lambda p: p[1]) == [("OFF", -1), ("AUTO", 0), ("FILE", 1), ("DATA", 2), ("HINT", 3)]
    assert {m.name for m in mpidist.InputReplicationMode} == {"PER_WORKER", "PER_REPLICA"}


def test_communication_options() -> None:
    options = CommunicationOptions()
    assert (options.bytes_per_pack, options.timeout_seconds) == (0, None)
    assert options.implementation is CommunicationImplementation.AUTO
    assert CommunicationOptions(implementation="ring").implementation is CommunicationImplementation.RING
    assert CommunicationOptions(1, 2.5, CommunicationImplementation.NCCL).timeout_seconds == 2.5
    assert {"AUTO", "RING", "NCCL", "MPI"} <= set(CommunicationImplementation.__members__)
    assert CollectiveCommunication is CommunicationImplementation


def test_error_types() -> None:
    assert issubclass(mpidist.MismatchError, ValueError)
    assert issubclass(mpidist.PeerError, RuntimeError)
    assert issubclass(mpidist.CollectiveTimeoutError, TimeoutError)
    assert issubclass(mpidist.OutOfRangeError, Exception)
