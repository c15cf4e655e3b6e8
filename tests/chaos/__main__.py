"""Trains the example while faults are injected: ``python -m tests.chaos [--short] [--only FAULT ...] [--seed N]``.

Prints a line for each trial, with the seed that repeats it, and a table; writes both as JSON. The status is 1 if a
trial failed. The long form is some 180 trials, which take most of an hour.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos import report
from tests.chaos.driver import try_fault
from tests.chaos.faults import FAULTS
from tests.chaos.trial import train_undisturbed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few of each kind")
    parser.add_argument("--only", nargs="+", metavar="FAULT", choices=FAULTS, help=f"some of {', '.join(FAULTS)}")
    parser.add_argument("--times", type=int, help="how often each; by default as the table of faults says")
    parser.add_argument("--seed", type=int, help="of the first trial of each fault, the next have the next numbers")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no trial after so long (default: 60)")
    parser.add_argument("--out", type=Path, default=Path("out/chaos"), help="folder of chaos.json (out/chaos)")
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    skipped = {name: why for name in given.only or FAULTS if (why := FAULTS[name].missing()) is not None}
    for name, why in skipped.items():
        print(f"{name}: not tried: {why}")
    outcomes: list[report.Outcome] = []
    trials = [
        (name, seed + number)
        for name in given.only or FAULTS
        for number in range(given.times or (FAULTS[name].short_times if given.short else FAULTS[name].times))
        if name not in skipped
    ]
    end = time.monotonic() + 60 * given.minutes
    folder = Path(tempfile.mkdtemp(prefix="mpidist-chaos-"))
    try:
        reference = train_undisturbed(folder / "reference")
        while trials and time.monotonic() < end:
            name, own_seed = trials.pop(0)
            outcomes.append(try_fault(name, own_seed, reference, folder, given.short))
            print(outcomes[-1].line, flush=True)
    except KeyboardInterrupt:
        print("interrupted")
    report.write(given.out / "chaos.json", outcomes, seed, skipped)
    print(f"\n{report.table(outcomes)}\n\nwritten: {given.out / 'chaos.json'}")
    if trials:
        print(f"not tried: {len(trials)} trials, from {trials[0][0]} --seed {trials[0][1]} on")
    failed = [outcome for outcome in outcomes if outcome.outcome == report.FAILED]
    for outcome in failed:
        print(f"repeat: python -m tests.chaos --only {outcome.fault} --times 1 --seed {outcome.seed}")
    if not failed:
        shutil.rmtree(folder)
    return int(bool(failed) or not outcomes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
