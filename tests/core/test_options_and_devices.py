"""Enumerations, options, device strings and settings."""

from __future__ import annotations

from typing import Any

import pytest

from mpidist import ReduceOp, VariableAggregation
from mpidist.core import settings
from mpidist.core.devices import parse_device
from mpidist.experimental import (
    CollectiveCommunication,
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)

pytestmark = pytest.mark.one_rank


def test_reduce_op_from_aggregation() -> None:
    assert ReduceOp.from_variable_aggregation(VariableAggregation.SUM) is ReduceOp.SUM
    assert ReduceOp.from_variable_aggregation(VariableAggregation.MEAN) is ReduceOp.MEAN
    with pytest.raises(ValueError, match="SUM and MEAN"):
        ReduceOp.from_variable_aggregation(VariableAggregation.ONLY_FIRST_REPLICA)


def test_an_aggregation_is_no_reduce_op() -> None:
    with pytest.raises(TypeError, match="from_variable_aggregation"):
        ReduceOp.of(VariableAggregation.SUM)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bytes_per_pack": -1}, "bytes_per_pack is -1"),
        ({"timeout_seconds": 0}, "timeout_seconds is 0"),
        ({"implementation": "smoke"}, "'smoke'.*AUTO"),
        ({"implementation": 3}, "3; expected one of"),
        ({"wire_dtype": "int8"}, "'int8'.*bfloat16"),
    ],
)
def test_wrong_options(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CommunicationOptions(**arguments)


def test_merge_lays_what_was_set_over_the_defaults() -> None:
    base = CommunicationOptions(bytes_per_pack=5, algorithm="mpi")
    merged = base.merge(CommunicationOptions(timeout_seconds=2, bytes_per_pack=7))
    assert (merged.bytes_per_pack, merged.timeout_seconds, merged.algorithm) == (7, 2, "mpi")
    assert base.merge(None) is base
    assert base.merge(CommunicationOptions()) is base


def test_names_of_implementations() -> None:
    assert CollectiveCommunication is CommunicationImplementation
    assert CommunicationOptions(implementation="mpi").implementation is CommunicationImplementation.RING
    with pytest.warns(DeprecationWarning, match="CommunicationOptions"):
        assert CollectiveHints(bytes_per_pack=3) == CommunicationOptions(bytes_per_pack=3)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("cpu:0", "cpu:0"),
        ("CPU", "cpu:0"),
        ("/gpu:1", "gpu:1"),
        ("/device:GPU:2", "gpu:2"),
        ("/job:worker/task:3/device:CPU:0", "/job:worker/replica:0/task:3/device:CPU:0"),
        ("/job:worker/replica:0/task:3/cpu:0", "/job:worker/replica:0/task:3/device:CPU:0"),
    ],
)
def test_devices_have_one_form(text: str, canonical: str) -> None:
    assert str(parse_device(text)) == canonical


@pytest.mark.parametrize("text", ["", "tpu:0", "cpu:-1", "cpu:x", "gpu:0:1", "/job:worker/cpu:0"])
def test_what_is_no_device(text: str) -> None:
    with pytest.raises(ValueError, match="expected 'cpu:0'"):
        str(parse_device(text))


def test_a_device_is_a_string() -> None:
    with pytest.raises(TypeError, match="3 of type int"):
        str(parse_device(3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "text"), [("TIMEOUT", "0"), ("TIMEOUT", "soon"), ("RANKS_PER_NODE", "0"), ("ABORT_ON_EXCEPTION", "yes")]
)
def test_settings_say_what_they_expect(monkeypatch: Any, name: str, text: str) -> None:
    setting = getattr(settings, name)
    monkeypatch.setenv(setting.name, text)
    with pytest.raises(ValueError, match=f"{setting.name}='{text}': expected {setting.expected}"):
        setting.read()


def test_unknown_settings_warn(monkeypatch: Any) -> None:
    monkeypatch.setenv("MPIDIST_TIMEOT", "3")
    with pytest.warns(UserWarning, match="MPIDIST_TIMEOT.*MPIDIST_TIMEOUT"):
        settings.warn_about_unknown()
