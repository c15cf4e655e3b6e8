"""Tracebacks with mpidist's frames folded."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import mpidist
from mpidist.topology import exit as ends
from mpidist.topology.exit import traceback_text

pytestmark = pytest.mark.one_rank

PACKAGE = os.path.dirname(mpidist.__file__) + os.sep
FOLD = r"  \.\.\. (\d+ frames|1 frame) inside mpidist, to [\w/]+\.py:\d+; MPIDIST_FULL_TRACEBACK=1 shows them\n"


def caught(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("no error")


def makes_a_wrong_variable() -> None:
    mpidist.Variable()


def runs_it() -> None:
    mpidist.OneDeviceStrategy("cpu:0").run(makes_a_wrong_variable)


def test_line_of_the_program_is_next_to_the_message() -> None:
    text = traceback_text(caught(runs_it))
    assert len(re.findall(FOLD, text)) == 2
    assert PACKAGE not in re.sub(FOLD, "", text)
    *_, program, fold, message = re.sub(r"\n\s*[\^~]+\n", "\n", text).rstrip("\n").split("\n")
    assert program.strip() == "mpidist.Variable()"
    assert re.fullmatch(FOLD, fold + "\n")
    assert message.startswith("ValueError: Variable was given no initial_value")


def test_causes_and_contexts_are_printed() -> None:
    def fails_again() -> None:
        try:
            runs_it()
        except ValueError as error:
            raise KeyError("outer") from error

    def fails_while_handling() -> None:
        try:
            fails_again()
        except KeyError:
            runs_it()

    text = traceback_text(caught(fails_while_handling))
    assert text.count("Traceback (most recent call last)") == 3
    assert text.index("direct cause") < text.index("KeyError: 'outer'") < text.index("During handling")
    assert len(re.findall(FOLD, text)) == 4
    assert PACKAGE not in re.sub(FOLD, "", text)


def test_full_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """On request, with a wrong setting, and if no frame is the program's."""
    found: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: found.append(args.exc_value))
    thread = threading.Thread(target=mpidist.Variable)
    thread.start()
    thread.join()
    assert "in variable_arguments" in traceback_text(found[0])
    error = caught(runs_it)
    monkeypatch.setenv("MPIDIST_FULL_TRACEBACK", "1")
    assert "in variable_arguments" in traceback_text(error)
    monkeypatch.setenv("MPIDIST_FULL_TRACEBACK", "yes")
    assert "in variable_arguments" in traceback_text(error)
    assert traceback_text(error).endswith("mpidist: MPIDIST_FULL_TRACEBACK='yes': expected 0 or 1\n")


def test_flush_survives_a_closed_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = (tmp_path / "closed").open("w")
    closed.close()
    with (tmp_path / "open").open("w") as opened:
        monkeypatch.setattr(sys, "stdout", closed)
        monkeypatch.setattr(sys, "stderr", opened)
        opened.write("no end of the line")
        ends.flush_output()
        assert os.stat(tmp_path / "open").st_size == len("no end of the line")
