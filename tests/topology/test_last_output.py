"""What a process prints last is seen once, whatever the program has put into sys.stderr."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpidist.topology import last_output

pytestmark = pytest.mark.one_rank


class Copying:
    """Hands on what it gets and keeps a copy, as programs do that log their output; it has no descriptor."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.copy = stream, ""

    def write(self, text: str) -> None:
        self.stream.write(text)
        self.copy += text

    def flush(self) -> None:
        self.stream.flush()


class Broken:
    def write(self, text: str) -> None:
        raise OSError("full")


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that stands for descriptor 2 and sys.__stderr__."""
    path = tmp_path / "real"
    with path.open("w") as opened:
        monkeypatch.setattr(last_output, "STDERR", opened.fileno())
        monkeypatch.setattr(sys, "__stderr__", opened)
        yield path


def test_a_buffer_is_passed_by_and_what_lasts_is_not_printed_twice(
    real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = (tmp_path / "closed").open("w")
    closed.close()
    with tempfile.TemporaryFile("w+") as nameless:
        buffers = (io.StringIO(), io.TextIOWrapper(io.BytesIO()), nameless, closed, Broken(), None)
        for number, stream in enumerate((*buffers, Copying(sys.__stderr__), sys.__stderr__), start=1):
            monkeypatch.setattr(sys, "stderr", stream)
            last_output.write_last("told \udc80\n" if number == 1 else "told\n")
            assert real.read_text(errors="surrogateescape").count("told") == number
    with (tmp_path / "own").open("w") as own:
        monkeypatch.setattr(sys, "stderr", own)
        last_output.write_last("told to a file\n")
        assert (tmp_path / "own").read_text() == "told to a file\n"
    assert "to a file" not in real.read_text()


def test_a_hook_that_prints_into_a_buffer_is_seen(real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        with last_output.lasting_stderr():
            print("a hook's", "words", file=sys.stderr)
        assert sys.stderr is stream
    assert real.read_text() == "a hook's words\n" * 2


def test_all_output_is_flushed_though_one_stream_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = (tmp_path / "closed").open("w")
    closed.close()
    with (tmp_path / "open").open("w") as opened:
        monkeypatch.setattr(sys, "stdout", closed)
        monkeypatch.setattr(sys, "stderr", opened)
        opened.write("no end of the line")
        last_output.flush_output()
        assert os.stat(tmp_path / "open").st_size == len("no end of the line")
