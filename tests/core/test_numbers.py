"""Numbers as text: digits alone, and the same in every variable that mpidist reads."""

from __future__ import annotations

import pytest

from mpidist.core import settings
from mpidist.core.wording import decimal_number, whole_number

pytestmark = pytest.mark.one_rank

NONE_OF_BOTH = ["", " ", " 1", "1 ", "1\n", "+1", "-1", "1_0", "0x10", "\u0661", "\u00b2", "one", "nan", "1,5"]


@pytest.mark.parametrize("text", [*NONE_OF_BOTH, "1.0", "1e3", "9" * 5000])
def test_what_is_no_whole_number(text: str) -> None:
    with pytest.raises(ValueError, match="is no whole number; expected digits alone"):
        whole_number(text)


@pytest.mark.parametrize("text", [*NONE_OF_BOTH, ".", "1e", "infinity", "-inf"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(ValueError, match="expected one such as 60 or 0.5"):
        decimal_number(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("1800", 1800), ("0.5", 0.5), (".5", 0.5), ("1.", 1), ("1e3", 1000), ("inf", float("inf"))],
)
def test_numbers(text: str, number: float) -> None:
    assert decimal_number(text) == number


@pytest.mark.parametrize(
    "setting", [settings.TIMEOUT, settings.RANKS_PER_NODE, settings.STAGING_BYTES], ids=lambda setting: setting.name
)
@pytest.mark.parametrize("text", [" 65536", "+65536", "65_536", "-65536", "\u0666"])
def test_settings_are_read_strictly(monkeypatch, setting: settings.Setting, text: str) -> None:
    monkeypatch.setenv(setting.name, text)
    with pytest.raises(ValueError, match=rf"{setting.name}=.*: expected {setting.expected}"):
        setting.read()
