"""Bad input: every message names what was given, what was expected and what to type."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.acceptance.checks import ON_READ, SUM, make_variable
from tests.support.ranks.layouts import layouts, per_replica
from tests.support.ranks.pool import run

FAILURES = (ValueError, TypeError, RuntimeError)
SEVERAL = pytest.mark.parametrize("strategy", layouts("mirrored-2local", "multi_worker-2local"), indirect=True)


def refused(kind: Any, words: tuple[str, ...], call: Callable[[], Any]) -> None:
    with pytest.raises(kind) as info:
        call()
    text = str(info.value)
    missing = [word for word in words if not re.search(word, text)]
    assert missing == [], f"{text!r} lacks {missing}"
    assert len(text) < 1500


@SEVERAL
def test_wrong_context(strategy: Any) -> None:
    context = mpidist.get_replica_context
    inside = strategy.run
    refused(
        RuntimeError,
        (r"reduce\(\)", "all_reduce"),
        lambda: inside(lambda: strategy.reduce("SUM", 1.0, axis=None)),
    )
    refused(RuntimeError, (r"gather\(\)", "all_gather"), lambda: inside(lambda: strategy.gather(np.ones(1), axis=0)))
    refused(RuntimeError, (r"scope\(\)", "merge_call"), lambda: inside(lambda: strategy.scope().__enter__()))
    refused(RuntimeError, (r"run\(\)",), lambda: inside(lambda: strategy.run(context)))
    refused(RuntimeError, (r"scope\(\)", "Variable"), lambda: inside(lambda: mpidist.Variable(1.0)))
    saved: list[Any] = []
    inside(lambda: saved.append(context()))
    refused(RuntimeError, (r"all_reduce\(\)", "run"), lambda: saved[0].all_reduce("SUM", 1.0))


def test_unknown_devices() -> None:
    for bad in ("tpu:0", "cpu:x", "", "gpu:-1", "gpu0"):
        refused(ValueError, (re.escape(repr(bad)), r"cpu:0|gpu:0"), lambda b=bad: mpidist.OneDeviceStrategy(b))
        refused(
            ValueError,
            (re.escape(repr(bad)), r"cpu:0|gpu:0"),
            lambda b=bad: mpidist.MirroredStrategy([b], communicator=_self()),
        )
    refused((TypeError, ValueError), ("3",), lambda: mpidist.OneDeviceStrategy(3))
    refused(
        (ValueError, AssertionError),
        ("cpu:0",),
        lambda: mpidist.MirroredStrategy(["cpu:0", "/cpu:0"], communicator=_self()),
    )
    refused((ValueError, AssertionError), ("device",), lambda: mpidist.MirroredStrategy([], communicator=_self()))


def _self() -> Any:
    from mpi4py import MPI

    return MPI.COMM_SELF


@SEVERAL
def test_axes_out_of_range(strategy: Any) -> None:
    value = per_replica(strategy, lambda i: np.zeros((2, 3)))
    for op in ("SUM", "MEAN"):
        refused(ValueError, ("axis", "7", "2"), lambda o=op: strategy.reduce(o, value, axis=7))
    refused(ValueError, ("axis", "-4", "2"), lambda: strategy.gather(value, axis=-4))
    refused(
        ValueError,
        ("axis", "2", "1"),
        lambda: strategy.run(lambda: mpidist.get_replica_context().all_gather(np.zeros(3), axis=2)),
    )


@SEVERAL
def test_shapes_and_structures_that_differ_between_replicas(strategy: Any) -> None:
    kinds = (ValueError, mpidist.PeerError)
    refused(
        kinds,
        ("2", "3"),
        lambda: strategy.reduce("SUM", per_replica(strategy, lambda i: np.zeros(2 + i % 2)), axis=None),
    )
    refused(
        kinds,
        ("'a'", "'b'"),
        lambda: strategy.run(
            lambda: mpidist.get_replica_context().all_reduce(
                "SUM", {"a" if mpidist.get_replica_context().replica_id_in_sync_group % 2 else "b": 1.0}
            )
        ),
    )
    refused(
        kinds,
        ("float32", "float64"),
        lambda: strategy.reduce("SUM", per_replica(strategy, lambda i: np.zeros(1, ("f4", "f8")[i % 2])), axis=None),
    )
    refused(
        kinds, ("1", "2"), lambda: strategy.gather(per_replica(strategy, lambda i: np.zeros((1, 1 + i % 2))), axis=0)
    )


@SEVERAL
def test_a_variable_assigned_without_an_aggregation(strategy: Any) -> None:
    variable = make_variable(strategy, 1.0, name="weights")
    words = ("weights", "aggregation=", "SUM", "MEAN")
    refused((ValueError, mpidist.PeerError), words, lambda: strategy.run(lambda: variable.assign(2.0)))
    counter = make_variable(strategy, 1.0, ON_READ, name="counter")
    refused(ValueError, ("counter", "aggregation="), counter.numpy)


@SEVERAL
def test_wrong_values_for_variables(strategy: Any) -> None:
    variable = make_variable(strategy, np.zeros((2, 3)), aggregation=SUM, name="weights")
    refused(ValueError, ("weights", "2, 3", "4"), lambda: variable.assign(np.zeros(4)))
    whole = make_variable(strategy, np.zeros(2, np.int32), aggregation=SUM, name="whole")
    refused((TypeError, ValueError), ("whole", "int32", "float64"), lambda: whole.assign(np.full(2, 0.5)))


@SEVERAL
def test_wrong_arguments_of_run(strategy: Any) -> None:
    refused(ValueError, ("args has type int", r"args=\(x,\)"), lambda: strategy.run(lambda x: x, args=(5)))
    refused(TypeError, ("needs an axis", "axis=None", "axis=0"), lambda: strategy.reduce("SUM", 1.0))
    refused(TypeError, ("needs an axis", "axis=0"), lambda: strategy.gather(np.ones(1)))
    gather = lambda: mpidist.get_replica_context().all_gather(np.ones(1))  # type: ignore[union-attr]
    refused(TypeError, ("all_gather.. needs an axis",), lambda: strategy.run(gather))


def test_wrong_arguments_of_constructors() -> None:
    refused(
        (ValueError, TypeError),
        ("cross_device_ops", "nccl"),
        lambda: mpidist.MirroredStrategy(["cpu:0"], "nccl", _self()),
    )
    refused(
        ValueError,
        ("communication_options",),
        lambda: mpidist.MultiWorkerMirroredStrategy(communication_options="RING"),
    )
    refused(ValueError, ("cluster_resolver",), lambda: mpidist.MultiWorkerMirroredStrategy(cluster_resolver={"a": 1}))


def mirrored_on_two_nodes() -> str:
    import mpidist

    try:
        mpidist.MirroredStrategy(["cpu:0"])
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.jobs
@pytest.mark.one_rank
def test_a_mirrored_strategy_on_several_nodes() -> None:
    for text in run(mirrored_on_two_nodes, 2, timeout=30, ranks_per_node=1):
        assert "MultiWorkerMirroredStrategy" in text
        assert "2" in text
