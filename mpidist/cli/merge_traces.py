"""``python -m mpidist trace``: merges the trace files of all ranks into one."""

from __future__ import annotations

import argparse
import sys

from mpidist.collectives.watch.trace_files import merge

HELP = "merge the traces of all ranks (MPIDIST_TRACE) into one file, for Perfetto or chrome://tracing"
_USAGE_ERROR = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", metavar="DIR", help="where trace-rank-0000.json and the others are")


def run(arguments: argparse.Namespace) -> int:
    """Merge and print the path of the file."""
    try:
        print(merge(arguments.folder))
    except (OSError, ValueError) as error:
        print(f"python -m mpidist trace: {error}", file=sys.stderr)
        return _USAGE_ERROR
    return 0
