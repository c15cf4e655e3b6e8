"""Frames inside mpidist take one line of a traceback; those of the program are all there."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable

import pytest

import mpidist
from mpidist.core.callsite import path_in_package
from mpidist.topology.last_output import traceback_text, without_folds

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


def test_the_line_of_the_program_stands_next_to_the_message() -> None:
    text = traceback_text(caught(runs_it))
    assert len(re.findall(FOLD, text)) == 2
    assert PACKAGE not in re.sub(FOLD, "", text)
    *_, program, fold, message = re.sub(r"\n\s*[\^~]+\n", "\n", text).rstrip("\n").split("\n")
    assert program.strip() == "mpidist.Variable()"
    assert re.fullmatch(FOLD, fold + "\n")
    assert message.startswith("ValueError: Variable was given no initial_value")
    assert without_folds(text) == re.sub(FOLD, "", text)


def test_what_an_error_comes_of_is_kept() -> None:
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


def test_all_of_it_on_request_and_where_nothing_is_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: found.append(args.exc_value))
    thread = threading.Thread(target=mpidist.Variable)
    thread.start()
    thread.join()
    assert path_in_package(mpidist.values.__file__) == "values/__init__.py"
    assert "in variable_arguments" in traceback_text(found[0])
    error = caught(runs_it)
    monkeypatch.setenv("MPIDIST_FULL_TRACEBACK", "1")
    assert "in variable_arguments" in traceback_text(error)
    monkeypatch.setenv("MPIDIST_FULL_TRACEBACK", "yes")
    assert "in variable_arguments" in traceback_text(error)
    assert traceback_text(error).endswith("mpidist: MPIDIST_FULL_TRACEBACK='yes': expected 0 or 1\n")
