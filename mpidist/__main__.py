"""The command line: ``python -m mpidist COMMAND ...``, or ``mpidist COMMAND ...``.

Each command is a module of ``mpidist.cli``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from mpidist.cli import COMMANDS
from mpidist.core import __version__
from mpidist.core.errors import LaunchError
from mpidist.topology.launchers import LauncherVariableError, read_launcher

_USAGE_ERROR = 2


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mpidist", description="Tools of mpidist.")
    parser.add_argument("--version", action="version", version=f"mpidist {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.HELP, description=command.HELP))
    if _is_first():
        return parser.parse_args(arguments)
    # Rank 0 prints help, once. Every rank prints errors of arguments, because the launcher ends the other ranks as soon
    # as one has ended with an error.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return parser.parse_args(arguments)


def _is_first() -> bool:
    try:
        launcher = read_launcher()
    except LauncherVariableError:  # the command reports it
        return True
    return launcher is None or launcher.rank == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of ``arguments``, by default this process's, and return the exit status.

    If the command raises OSError, ValueError or LaunchError, print its text. The status is then 2.
    """
    parsed = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        status: int = COMMANDS[parsed.command].run(parsed)
        if sys.stdout is not None:  # Closed before Python started, as `>&-` does.
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output has exited, such as `head`. Python flushes again at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, ValueError, LaunchError) as error:
        print(f"python -m mpidist {parsed.command}: {error}", file=sys.stderr)
        return _USAGE_ERROR
    return status


if __name__ == "__main__":
    sys.exit(main())
