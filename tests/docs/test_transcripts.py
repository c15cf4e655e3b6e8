"""What the pages say that commands print is what they print, but for figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.commands import checkout
from tests.docs.pages import blocks
from tests.docs.programs import programs_of
from tests.docs.shell import run_command
from tests.docs.transcripts import EXCEPTED, PRINTED_BY, Transcript, without_figures
from tests.support.ranks.jobs import ROOT
from tests.support.ranks.programs import run_program

pytestmark = pytest.mark.one_rank


@pytest.mark.long
@pytest.mark.jobs
@pytest.mark.parametrize("transcript", PRINTED_BY, ids=lambda transcript: transcript.page)
def test_a_command_prints_what_is_shown(transcript: Transcript, tmp_path: Path) -> None:
    command, numbers = PRINTED_BY[transcript]
    checkout("docs/index.md", tmp_path)
    done = run_command(command, tmp_path)
    printed = [without_figures(line) for line in (done.stdout + done.stderr).splitlines()]
    for number in numbers:
        shown = without_figures(transcript.lines[number])
        assert any(line.startswith(shown) for line in printed), f"{shown} is none of\n" + "\n".join(printed)


def test_what_is_not_printed_here_is_read_by_a_test() -> None:
    files = [file for reason in EXCEPTED.values() for file in re.findall(r"tests/[\w/]+\.py", reason)]
    assert len(files) == len(EXCEPTED) - 1
    assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.jobs
def test_the_table_of_the_page_about_tuning_is_taken(tmp_path: Path) -> None:
    (table,) = (block.text for block in blocks("docs/tuning.md") if block.kind == "json")
    path = tmp_path / "tuning.json"
    path.write_text(table)
    (program,) = programs_of("docs/index.md")
    done = run_program(program.text, 2, env={"MPIDIST_TUNING_FILE": str(path)})
    assert done.returncode == 0, done.stderr
