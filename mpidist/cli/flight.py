"""``python -m mpidist flight``: shows the flight records of all ranks beside one another."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from mpidist.cli.json_output import add_json_argument, json_text
from mpidist.collectives.watch.flight_record import read_folder
from mpidist.collectives.watch.flight_text import merged_text
from mpidist.core.text import names_text

HELP = "show the last collectives of all ranks (MPIDIST_FLIGHT_RECORD), and where they went apart"
_USAGE_ERROR = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", metavar="DIR", help="where flight-rank-0000.bin and the others are")
    parser.add_argument("--last", type=int, default=10, metavar="N", help="collectives shown of each communicator")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print them."""
    left_out: list[str] = []
    try:
        flights = read_folder(arguments.folder, left_out)
        if arguments.json:
            print(json_text({"flights": [dataclasses.asdict(flight) for flight in flights], "left_out": left_out}))
        else:
            print(merged_text(flights, arguments.last))
    except (OSError, ValueError) as error:
        print(f"python -m mpidist flight: {error}", file=sys.stderr)
        return _USAGE_ERROR
    if left_out:
        print(f"python -m mpidist flight: left out: {names_text(left_out)}", file=sys.stderr)
    return 0
