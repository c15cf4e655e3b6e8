"""The predictions beside published measurements are what the commands above them print, and so are the errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from benchmarks.__main__ import main
from benchmarks.measuring.sizes import size_of_text
from tests.docs.commands import Command, commands_of
from tests.support.ranks.jobs import ROOT

pytestmark = pytest.mark.one_rank

_PAGE = "docs/scaling.md"
_PREDICTIONS = [command for command in commands_of(_PAGE) if "--plain" in command.line]
_MINUS, _BOLD_FROM = "\N{MINUS SIGN}", 0.15
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def _rows_below(command: Command) -> list[list[str]]:
    """Return the cells of the first table below a command, its head first."""
    lines = (ROOT / _PAGE).read_text().splitlines()
    first = next(number for number in range(command.block.line, len(lines)) if lines[number].startswith("|"))
    end = next(number for number in range(first, len(lines)) if not lines[number])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[first:end]]
    return [rows[0], *rows[2:]]


def _points(command: Command) -> Iterator[tuple[int, int, float, float, str]]:
    """Yield nodes, bytes, the time that stands as measured, that predicted, and the error, for each error."""
    head, *rows = _rows_below(command)
    for row in rows:
        nodes, size, measured, predicted = int(row[0].replace(",", "")), 0, 0.0, 0.0
        for name, cell in zip(head[1:], row[1:], strict=True):
            if name == "off by":
                yield nodes, size, measured, predicted, cell
            elif name == "predicted":
                predicted = _seconds(cell)
            else:
                measured = _seconds(cell)
                size = size if name == "fastest" else size_of_text(re.sub(r" (.)iB", r"\1", name))


def _seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * _SECONDS[unit]


@pytest.mark.parametrize("command", _PREDICTIONS, ids=str)
def test_predictions_and_errors(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.line.split()[3:], "--json"]) == 0
    found = {
        (each["nodes"], each["nbytes"]): each["seconds"] for each in json.loads(capsys.readouterr().out)["reductions"]
    }
    points = list(_points(command))
    assert {point[:2] for point in points} == set(found)
    for nodes, size, measured, predicted, error in points:
        assert predicted == pytest.approx(found[nodes, size], rel=0.005)
        share = float(error.strip("*").replace(_MINUS, "-").removesuffix(" %")) / 100
        assert share == pytest.approx(predicted / measured - 1, abs=0.001)
        assert error.startswith("**") == (abs(share) > _BOLD_FROM)


def test_all_of_them_are_looked_at() -> None:
    assert len(_PREDICTIONS) == 5
