"""The checks of the project: ``python -m tests.checks`` quick, test, test-all, test-share, test-torch, ...

Parts run beside each other. Each ends with a line; what a part printed that failed follows at once,
and everything is in ``out/checks``. The status is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.checks import library_parts, long, parts
from tests.checks.runner import Done, run_parts
from tests.checks.summary import end_of_log, line_of, summary
from tests.support import speed

SETS = {
    "quick": parts.quick,
    "test": parts.ordinary,
    "test-all": lambda: [*parts.ordinary(), *long.everything()],
    "test-share": lambda: [*long.always(), *long.share()],
    **{f"test-{library}": found for library, found in library_parts.LIBRARIES.items()},
}


# What a set takes on the reference machine of tests/support/speed.py, in minutes.
_MINUTES = {"quick": 2, "test": 11}
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def tell(done: Done) -> None:
    """Print how a part ended, and what it printed if it failed."""
    print(line_of(done), flush=True)
    if done.has_failed:
        print(end_of_log(done), flush=True)


def announcement(name: str) -> str:
    """Return how fast the machine is, and how long a set will take if that is known."""
    factor = speed.slowness()
    speed_text = f"this machine takes {factor:.1f} times as long as the reference, and deadlines grow by that factor"
    return f"{speed_text}; expect about {_MINUTES[name] * factor:.0f} minutes" if name in _MINUTES else speed_text


def _end(*_: object) -> None:
    # A second signal, such as the one of the process group and the one of make, would break the cleanup off.
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    sys.exit("ended by a signal")


@contextmanager
def alone_in(folder: Path) -> Iterator[Path]:
    """Hold ``folder`` against other runs, which would write over the logs."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"other checks are running in {folder}; wait for them, or give another folder: --out FOLDER")
        yield folder


def main(arguments: list[str]) -> int:
    """Run a set of parts and print the summary."""
    parser = argparse.ArgumentParser(prog="python -m tests.checks", description=__doc__)
    parser.add_argument("set", choices=SETS, nargs="?", default="test")
    parser.add_argument("--out", type=Path, default=Path("out/checks"), help="folder of logs (out/checks)")
    parser.add_argument("--only", nargs="+", metavar="PART", help="some of its parts")
    given = parser.parse_args(arguments)
    # A time limit around all of it, or a terminal that is closed, must not leave ranks behind.
    for number in _ENDING:
        signal.signal(number, _end)
    everything = SETS[given.set]()
    names = [part.name for part in everything]
    unknown = set(given.only or []) - set(names)
    if unknown:
        parser.error(f"no part is called {', '.join(sorted(unknown))}; expected some of {', '.join(names)}")
    chosen = [part for part in everything if given.only is None or part.name in given.only]
    os.environ[speed.VARIABLE] = f"{speed.measure():.2f}"
    print(announcement(given.set if given.only is None else ""), flush=True)
    began = time.monotonic()
    with alone_in(given.out.resolve()) as folder:
        done = run_parts(chosen, folder, tell)
    print(summary(done, time.monotonic() - began))
    failed = [each.part.name for each in done if each.has_failed]
    if failed:
        print(f"failed: {', '.join(failed)}")
    else:
        print(f"make {given.set}: everything passed" if given.only is None else f"passed: {', '.join(given.only)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
