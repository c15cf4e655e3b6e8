"""``python -m mpidist top``: shows where the ranks of a running job are."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time

from mpidist.cli.json_output import add_json_argument, json_text
from mpidist.cli.top_text import facts_of, may_be_there, screen, states_of
from mpidist.cli.tune import seconds
from mpidist.collectives.watch.status_files import read_status_folder
from mpidist.core.settings import STATUS

HELP = "show where the ranks of a running job are (MPIDIST_STATUS), and how it ended"
_USAGE_ERROR = 2
# Of output that is no terminal.
_WIDTH, _HEIGHT = 200, 50
# Another screen of the terminal, and back; its begin, and everything behind the cursor away.
_ENTER, _LEAVE, _AGAIN = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", metavar="DIR", nargs="?", help=f"where the job writes; {STATUS.name} by default")
    parser.add_argument("--once", action="store_true", help="print it once; so does output that is no terminal")
    parser.add_argument(
        "--every", type=seconds, metavar="SECONDS", default=2.0, help="how often the screen is drawn anew (2)"
    )
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show it once, or until Ctrl-C."""
    folder = arguments.folder or STATUS.read()
    if folder is None:
        print(
            f"python -m mpidist top: no folder; expected the one that the job was started with as {STATUS.name}=DIR; "
            "type: python -m mpidist top DIR",
            file=sys.stderr,
        )
        return _USAGE_ERROR
    try:
        if not (arguments.once or arguments.json) and sys.stdout.isatty():
            _show(folder, arguments.every)
        found, now = read_status_folder(folder), time.time()
    except (OSError, ValueError) as error:
        print(f"python -m mpidist top: {error}", file=sys.stderr)
        return _USAGE_ERROR
    states = states_of(found, now, may_be_there)
    if arguments.json:
        print(json_text(facts_of(found, states, folder)))
    else:
        print("\n".join(screen(found, states, now, *_size())))
    return 0


def _size() -> os.terminal_size:
    return shutil.get_terminal_size((_WIDTH, _HEIGHT)) if sys.stdout.isatty() else os.terminal_size((_WIDTH, _HEIGHT))


def _show(folder: str, every: float) -> None:
    """Draw the screen again and again, until Ctrl-C."""
    sys.stdout.write(_ENTER)
    try:
        while True:
            width, height = _size()
            try:
                found, now = read_status_folder(folder), time.time()
                lines = screen(found, states_of(found, now, may_be_there), now, width, height - 2)
            except (OSError, ValueError) as error:
                lines = [str(error)]
            foot = f"{time.strftime('%H:%M:%S')}, every {every:g} s; Ctrl-C ends"
            sys.stdout.write(_AGAIN + "\n".join([*lines, "", foot[:width]]))
            sys.stdout.flush()
            time.sleep(every)
    except KeyboardInterrupt:
        return  # which is how it ends; what it showed last stays, on the screen that was there before
    finally:
        sys.stdout.write(_LEAVE)
