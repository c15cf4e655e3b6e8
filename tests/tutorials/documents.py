"""The documents of docs/tutorials as programs: their blocks are run one after the other, in one namespace.

A heading such as ``With PyTorch`` or ``With PyTorch and Keras on PyTorch`` says who follows its section; all follow the
others. A block of text behind a block of code is what that prints with two replicas, ``...`` in it stands for anything.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import mpidist
from tests.checkpoint.shared_folder import of_all_ranks
from tests.docs import pages
from tests.docs.programs import check_printed, unordered
from tests.support.ranks.jobs import ROOT

FOLDER = ROOT / "docs" / "tutorials"
_HEADING = re.compile(r"(#+) (?:With (.*))?")
_STRATEGY = re.compile(r"(MultiWorkerMirroredStrategy)\((devices=\[[^]]*\])?\)")


class Block(NamedTuple):
    """A block of code.

    Attributes:
        line: Of the document, counted from 1.
        readers: Those who follow it, such as ("PyTorch", "Keras on PyTorch"); all where there are none.
        code: Python.
        output: That is shown, or None.
    """

    line: int
    readers: tuple[str, ...]
    code: str
    output: str | None

    def is_for(self, reader: str) -> bool:
        """Whether ``reader`` follows it: "Keras" is for those on both of its backends."""
        return not self.readers or any(reader == name or reader.startswith(f"{name} on ") for name in self.readers)


def blocks(document: str) -> Iterator[Block]:
    """Return the blocks of code of a document, by its name without the ending."""
    path = FOLDER / f"{document}.md"
    readers = list(_readers(path.read_text().splitlines()))
    last = None
    for block in pages.blocks(path):
        if block.kind == "python":
            if last is not None:
                yield last
            last = Block(block.line, readers[block.line - 1], block.text, None)
        elif block.kind == "text" and last is not None:
            last = last._replace(output=block.text)
    if last is not None:
        yield last


def _readers(lines: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield for each line who follows it."""
    readers: tuple[str, ...] = ()
    level, is_code = 0, False
    for line in lines:
        is_code ^= line.startswith("```")
        heading = None if is_code else _HEADING.match(line)
        if heading and (heading[2] or len(heading[1]) <= level or not readers):
            readers, level = tuple(heading[2].split(" and ")) if heading[2] else (), len(heading[1])
        yield readers


def follow(document: str, reader: str, folder: Path, local_replicas: int = 1) -> dict[str, Any]:
    """Run the blocks for ``reader`` (collective), compare what they print with two replicas, return the namespace.

    Args:
        document: Its name.
        reader: Such as "NumPy", "PyTorch", "Keras on JAX".
        folder: Of this rank: all are in the first one's while the program runs.
        local_replicas: Replicas per rank, whatever the document says.
    """
    devices = [f"cpu:{number}" for number in range(local_replicas)]
    path = str(FOLDER / f"{document}.md")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown, printed = [], []
    with ExitStack() as stack:
        place = stack.enter_context(of_all_ranks(folder))
        stack.enter_context(pytest.MonkeyPatch.context()).chdir(place)
        stack.callback(_close, namespace)
        for block in blocks(document):
            if not block.is_for(reader):
                continue
            code = _STRATEGY.sub(rf"\1(devices={devices})", block.code)
            # A traceback shows the line of the document.
            program = compile("\n" * (block.line - 1) + code, path, "exec")
            with redirect_stdout(io.StringIO()) as output:
                exec(program, namespace)
            if block.output is not None:
                shown.append(f"line {block.line}\n{block.output}")
                printed.append(f"line {block.line}\n{output.getvalue()}")
        if mpidist.size() * local_replicas == 2:
            _compare(shown, printed)
    return namespace


def _close(namespace: dict[str, Any]) -> None:
    for value in namespace.values():
        if isinstance(value, (mpidist.Strategy, mpidist.Communicator)):
            value.close()


def _compare(shown: list[str], printed: list[str]) -> None:
    """Raise AssertionError if the ranks have not printed what is shown.

    On two ranks each line is printed by one of them, or by both.
    """
    from mpi4py import MPI

    if MPI.COMM_WORLD.size > 1:
        shown = [unordered(text) for text in shown]
        printed = [unordered("".join(texts)) for texts in zip(*MPI.COMM_WORLD.allgather(printed), strict=True)]
    for want, got in zip(shown, printed, strict=True):
        check_printed(want, got)
