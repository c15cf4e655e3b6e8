"""``python -m mpidist trace``: merges the trace files of all ranks into one."""

from __future__ import annotations

import argparse

from mpidist.cli.json_output import add_json_argument, json_text
from mpidist.collectives.observe.trace import merge

HELP = "merge the traces of all ranks (MPIDIST_TRACE) into one file, for Perfetto or chrome://tracing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", metavar="DIR", help="folder with trace-rank-0000.json and the other files")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Merge the files and print the path of the result."""
    path = merge(arguments.folder)
    print(json_text({"path": str(path)}) if arguments.json else path)
    return 0
