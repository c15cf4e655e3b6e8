"""The commands of all pages run, and those that cannot are written as the commands themselves expect it."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.docs.commands import EXCEPTED, commands_of, pages_with_commands, run_all, runnable_of
from tests.support.ranks.jobs import ROOT

pytestmark = pytest.mark.one_rank

# Of a checkout, of what is built from it, and names that stand for others.
_FILE = re.compile(r"(?:\./)?((?:benchmarks|examples|packaging|slurm|tests)/[\w./-]+)")


@pytest.mark.long
@pytest.mark.jobs
@pytest.mark.parametrize("page", [page for page in pages_with_commands() if runnable_of(page)])
def test_commands_run(page: str, tmp_path: Path) -> None:
    run_all(page, tmp_path)


def not_run() -> list[str]:
    """Return the lines that are not run, each once."""
    found = [command for page in pages_with_commands() for command in commands_of(page) if command.reasons]
    return list(dict.fromkeys(command.line for command in found))


class Parsed(Exception):
    """A program has understood its arguments."""


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> object:
    """Return a function that starts a program and stops it as soon as it has understood its arguments."""
    whole = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser, *given: object) -> None:
        whole(parser, *given)  # type: ignore[call-overload]
        raise Parsed

    def start(what: list[str]) -> None:
        environment = dict(os.environ)
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        monkeypatch.setattr(sys, "argv", what)
        try:
            with pytest.raises(Parsed), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run = runpy.run_path if what[0].endswith(".py") else runpy.run_module
                run(what[0], run_name="__main__")  # type: ignore[operator]
        finally:
            os.environ.clear()
            os.environ.update(environment)

    return start


def own_programs(line: str) -> list[list[str]]:
    """Return the programs of this repository that a line starts, with their arguments."""
    words, found = shlex.split(line), []
    for number, word in enumerate(words):
        rest = words[number + 2 :]
        if word == "-m" and re.match(r"(mpidist|benchmarks|tests\.[\w.]+)$", words[number + 1]):
            found.append([words[number + 1], *rest[: _end_of(rest)]])
        elif word.startswith("examples/") and words[number - 1] == "python":
            found.append(words[number:])
    return found


def _end_of(words: list[str]) -> int:
    """Return where the words of one command end."""
    return next((number for number, word in enumerate(words) if word in (">", "||", "&&", "#")), len(words))


@pytest.mark.parametrize("line", not_run())
def test_a_command_that_is_not_run_is_understood(line: str, parse: object) -> None:
    for program in own_programs(line):
        parse(program)  # type: ignore[operator]
    files = [name for name in _FILE.findall(line) if not (ROOT / name).exists()]
    assert files == []
    extras = {name for found in re.findall(r"(?:mpidist|\.|\.whl)\[([\w,]+)\]", line) for name in found.split(",")}
    assert extras <= set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))


@pytest.mark.jobs
def test_make_has_the_targets() -> None:
    targets = [line.removeprefix("make ") for line in not_run() if line.startswith("make ")]
    assert len(targets) > 5
    told = subprocess.run(["make", "-n", *" ".join(targets).split()], cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr


def test_every_exception_is_one_of_a_command() -> None:
    reasons = [command.reasons for page in pages_with_commands() for command in commands_of(page)]
    assert [found for found in reasons if len(found) > 1] == []
    assert {found[0] for found in reasons if found} == set(EXCEPTED)
