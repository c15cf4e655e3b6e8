"""``--json``: every command that prints facts has it, and prints one document with mpidist's version."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from mpidist.__main__ import main
from mpidist.cli import COMMANDS
from mpidist.cli.json_output import json_text
from mpidist.cli.tune import facts_of_tuning
from mpidist.collectives.observe.trace import TraceFile
from mpidist.collectives.reduce.registry import SHIPPED
from mpidist.collectives.reduce.tuning_file import Setup
from mpidist.collectives.tuning import Timing, Tuned
from mpidist.core import __version__

pytestmark = pytest.mark.one_rank


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"launch"}))
def test_every_command_but_launch_takes_it(name: str) -> None:
    parser = argparse.ArgumentParser()
    COMMANDS[name].add_arguments(parser)
    assert "--json" in parser.format_help()


def test_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TraceFile(str(tmp_path), 0, 1)
    assert main(["trace", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "mpidist": __version__,
        "path": str(tmp_path / "trace-merged.json"),
    }


def test_a_table() -> None:
    setup = Setup("some CPU, 4 cores", "some MPI 1.0", "1 node x 4 ranks")
    facts = facts_of_tuning(Tuned(setup, "one_node", SHIPPED, [Timing(1024, {"mpi": 2e-6})], None))
    document = json.loads(json_text(facts))
    assert document["table"]["one_node"] == [[None, "hierarchical"]]
    assert document["timings"] == [{"nbytes": 1024, "seconds": {"mpi": 2e-6}}]
