"""Enumerations and options, and the texts of numbers, devices, ranks and settings."""

from __future__ import annotations

from typing import Any

import pytest

from mpidist import ReduceOp, VariableAggregation
from mpidist.core import settings
from mpidist.core.text import (
    cut_text,
    decimal_number,
    error_text,
    names_text,
    numbered_ranks,
    parse_device,
    pip_install,
    said_lines,
    whole_number,
)
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
def test_wrong_options_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CommunicationOptions(**arguments)


def test_merge_overrides_with_non_defaults() -> None:
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
        ("/job:localhost/replica:0/task:0/device:CPU:1", "cpu:1"),
        ("/job:worker/task:3/device:CPU:0", "/job:worker/replica:0/task:3/device:CPU:0"),
        ("/job:worker/replica:0/task:3/cpu:0", "/job:worker/replica:0/task:3/device:CPU:0"),
    ],
)
def test_devices_have_one_form(text: str, canonical: str) -> None:
    assert str(parse_device(text)) == canonical


@pytest.mark.parametrize("text", ["", "tpu:0", "cpu:-1", "cpu:x", "gpu:0:1", "/job:worker/cpu:0"])
def test_wrong_devices_raise(text: str) -> None:
    with pytest.raises(ValueError, match="expected 'cpu:0'"):
        parse_device(text)


def test_device_must_be_a_string() -> None:
    with pytest.raises(TypeError, match="3 of type int"):
        parse_device(3)  # type: ignore[arg-type]


NO_NUMBERS = ["", " ", " 1", "1 ", "1\n", "+1", "-1", "1_0", "0x10", "\u0661", "\u00b2", "one", "nan", "1,5"]


@pytest.mark.parametrize("text", [*NO_NUMBERS, "1.0", "1e3", "9" * 5000])
def test_wrong_whole_numbers_raise(text: str) -> None:
    with pytest.raises(ValueError, match="is no whole number; expected digits alone"):
        whole_number(text)


@pytest.mark.parametrize("text", [*NO_NUMBERS, ".", "1e", "infinity", "-inf"])
def test_wrong_numbers_raise(text: str) -> None:
    with pytest.raises(ValueError, match="expected one such as 60 or 0.5"):
        decimal_number(text)


def test_numbers() -> None:
    texts = {"0": 0, "1800": 1800, "0.5": 0.5, ".5": 0.5, "1.": 1, "1e3": 1000, "inf": float("inf")}
    assert {text: decimal_number(text) for text in texts} == texts
    assert whole_number("08") == 8


def test_short_texts() -> None:
    assert (numbered_ranks([3]), numbered_ranks(range(4096))) == ("rank 3", "ranks 0-4095")
    assert (names_text(["node0"]), names_text("abcde")) == ("node0", "a, b, c and 2 more")
    assert cut_text("all_reduce SUM", 13) == "all_reduce..."
    assert said_lines(enumerate(["no file", "no file"])) == ["ranks 0-1: no file"]
    assert error_text(ValueError("no rows")) == "ValueError: no rows"
    assert pip_install("half").startswith("pip install ")
    assert "[half]" in pip_install("half")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TIMEOUT", "0"),
        ("TIMEOUT", "soon"),
        ("RANKS_PER_NODE", "0"),
        ("ABORT_ON_EXCEPTION", "yes"),
        *(
            (name, text)
            for name in ("TIMEOUT", "RANKS_PER_NODE", "STAGING_BYTES")
            for text in (" 65536", "+65536", "65_536", "-65536", "\u0666")
        ),
    ],
)
def test_wrong_settings_raise(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    setting = getattr(settings, name)
    monkeypatch.setenv(setting.name, text)
    with pytest.raises(ValueError, match=rf"{setting.name}=.*: expected {setting.expected}"):
        setting.read()


def test_unknown_settings_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDIST_TIMEOT", "3")
    with pytest.warns(UserWarning, match="MPIDIST_TIMEOT.*MPIDIST_TIMEOUT"):
        settings.warn_about_unknown()
