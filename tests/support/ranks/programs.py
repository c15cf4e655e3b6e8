"""Programs on warm ranks: what one prints and leaves is as in a job of its own, without the time that a start takes."""

from __future__ import annotations

import io
import os
import runpy
import sys
import tempfile
import textwrap
import traceback
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from mpidist.collectives.channel.shutdown import shut_down
from tests.support.ranks.pool import run


@dataclass(frozen=True)
class Ended:
    """What a program came to, of all ranks together.

    Attributes:
        returncode: The largest of the ranks'.
        stdout, stderr: What they printed, rank by rank.
    """

    returncode: int
    stdout: str
    stderr: str


def run_program(
    program: str | Path,
    ranks: int,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    ranks_per_node: int | None = None,
    folder: Path | None = None,
) -> Ended:
    """Run a Python program on warm ranks.

    Args:
        program: Path of a script, source text of more than one line, or name of a module that ``python -m`` would run.
        ranks: How many.
        arguments: Those of its command line.
        env: Environment variables to add.
        timeout: Seconds until the ranks are killed.
        ranks_per_node: Lets the ranks count as several virtual nodes of this many ranks.
        folder: Where it runs; otherwise where the ranks do.
    """
    if isinstance(program, str) and "\n" in program:
        with tempfile.TemporaryDirectory(prefix="mpidist-program-") as folder:
            path = Path(folder, "script.py")
            path.write_text(textwrap.dedent(program))
            return run_program(
                path, ranks, *arguments, env=env, timeout=timeout, ranks_per_node=ranks_per_node, folder=folder
            )
    is_file = isinstance(program, Path)
    task = (str(program), is_file, arguments, None if folder is None else str(folder))
    told = run(carry_out, ranks, *task, env=env, timeout=timeout, ranks_per_node=ranks_per_node)
    codes, outputs, errors = zip(*told, strict=True)
    return Ended(max(codes), "".join(outputs), "".join(errors))


def carry_out(
    program: str, is_file: bool, arguments: tuple[str, ...], folder: str | None = None
) -> tuple[int, str, str]:
    """Run a program in this process, in ``folder``; return exit code and output."""
    argv, path, modules, place = sys.argv, list(sys.path), set(sys.modules), os.getcwd()
    output, errors = io.StringIO(), io.StringIO()
    try:
        os.chdir(folder or place)
        with redirect_stdout(output), redirect_stderr(errors), warnings.catch_warnings():
            code = _exit_code(program, is_file, arguments)
            # What the end of its process would do; programs need not close what they open.
            shut_down()
    finally:
        sys.argv, sys.path[:] = argv, path
        os.chdir(place)
        # Modules beside the script keep what the program put into them.
        for name in set(sys.modules) - modules:
            if str(Path(program).parent) == str(Path(getattr(sys.modules[name], "__file__", None) or "/").parent):
                del sys.modules[name]
    return code, output.getvalue(), errors.getvalue()


def _exit_code(program: str, is_file: bool, arguments: tuple[str, ...]) -> int:
    sys.argv = [program, *arguments]
    try:
        if is_file:
            sys.path.insert(0, str(Path(program).parent))
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0
