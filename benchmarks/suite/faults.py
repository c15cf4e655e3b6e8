"""What failures cost, simulated: `python -m benchmarks faults`, checkpoints and elastic runs on 1 to 10,000 nodes.

Nodes fail at random, each independent of its age and of the others. With checkpoints a failure costs the work since the
last save, and a restart; an elastic job goes on from the last commit without the node, and starts again once a day.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

_SECONDS_PER_HOUR, _SECONDS_PER_DAY = 3600.0, 86400.0
_NODES = (1, 16, 128, 1250, 10_000)


@dataclass(frozen=True)
class Costs:
    """What a job pays, in seconds.

    Attributes:
        save: How long work stands still for a save.
        restart: From a failure to the first step after it, in a new job.
        commit: How long work stands still for a commit of ``elastic.State``.
        between_commits: Work between two of them.
        resume: From a failure to the first step of those that go on.
        between_restarts: How long an elastic job runs until it is started again with all nodes.
    """

    save: float = 30.0
    restart: float = 600.0
    commit: float = 0.5
    between_commits: float = 60.0
    resume: float = 10.0
    between_restarts: float = _SECONDS_PER_DAY


@dataclass(frozen=True)
class Line:
    """What failures cost on so many nodes; shares of the time, from 0 to 1.

    Attributes:
        nodes: How many.
        mtbf: Seconds between two failures of the job.
        interval: Seconds of work between two saves, by Young and Daly.
        useful: Share of the time that was work which stayed.
        spread: Standard deviation of that over the trials.
        predicted: The same by Daly's formula.
        hourly: The share with a save each hour.
        elastic: The share of an elastic run, of the time of all nodes.
    """

    nodes: int
    mtbf: float
    interval: float
    useful: float
    spread: float
    predicted: float
    hourly: float
    elastic: float


def daly_interval(save: float, mtbf: float) -> float:
    """Return the seconds of work between two saves that lose the least time (Young and Daly).

    >>> round(daly_interval(30.0, 24 * 3600.0))
    2257
    """
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def predicted_share(interval: float, mtbf: float, costs: Costs) -> float:
    """Return the useful share of the time by Daly's complete model (doi:10.1016/j.future.2004.11.016, equation 20).

    >>> round(predicted_share(1800.0, 1e12, Costs(save=200.0)), 3)
    0.9
    """
    exponent = (interval + costs.save) / mtbf
    if exponent + costs.restart / mtbf > 700:
        return 0.0
    return interval / (mtbf * math.exp(costs.restart / mtbf) * math.expm1(exponent))


def simulated_share(days: float, interval: float, mtbf: float, costs: Costs, rng: random.Random) -> float:
    """Return the useful share of so many days with a save after each ``interval`` of work."""
    end, now, useful = days * _SECONDS_PER_DAY, 0.0, 0.0
    cycle = interval + costs.save
    while now < end:
        until_failure = rng.expovariate(1 / mtbf)
        saves, rest = divmod(min(until_failure, end - now), cycle)
        useful += saves * interval
        now += until_failure
        if now >= end:
            # It saves as it ends, and nothing is lost.
            return (useful + min(rest, interval)) / end
        # A restart may be hit by the next failure.
        while now < end and (failure := rng.expovariate(1 / mtbf)) < costs.restart:
            now += failure
        now += costs.restart
    return useful / now


def elastic_share(days: float, nodes: int, node_mtbf: float, costs: Costs, rng: random.Random) -> float:
    """Return the useful share of all nodes' time where a job goes on with the nodes that are left."""
    end, now, useful = days * _SECONDS_PER_DAY, 0.0, 0.0
    cycle = costs.between_commits + costs.commit
    while now < end:
        alive, stop = nodes, now + costs.between_restarts
        while now < stop and alive:
            until_failure = rng.expovariate(alive / node_mtbf)
            worked = min(until_failure, stop - now)
            useful += alive / nodes * (worked // cycle) * costs.between_commits
            now += worked
            if now < stop:
                alive, now = alive - 1, now + costs.resume
        now += costs.save + costs.restart
    return useful / now


def simulate(nodes: int, node_mtbf: float, costs: Costs, days: float, trials: int, seed: int) -> Line:
    """Return what failures cost on so many nodes, the mean of several trials."""
    mtbf = node_mtbf / nodes
    interval = daly_interval(costs.save, mtbf)

    def shares(trial: Callable[[random.Random], float]) -> list[float]:
        return [trial(random.Random(f"{seed} {nodes} {number}")) for number in range(trials)]

    by_daly = shares(lambda rng: simulated_share(days, interval, mtbf, costs, rng))
    return Line(
        nodes,
        mtbf,
        interval,
        statistics.mean(by_daly),
        statistics.pstdev(by_daly),
        predicted_share(interval, mtbf, costs),
        statistics.mean(shares(lambda rng: simulated_share(days, _SECONDS_PER_HOUR, mtbf, costs, rng))),
        statistics.mean(shares(lambda rng: elastic_share(days, nodes, node_mtbf, costs, rng))),
    )


# The command ------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks faults", description=__doc__)
    top.add_argument("--nodes", type=_counts, default=_NODES, help="how many, such as 1,128,1250")
    top.add_argument(
        "--node-mtbf-days",
        type=float,
        default=154.0,
        help="mean days between two failures of a node (154)",
    )
    for name, value in asdict(Costs()).items():
        top.add_argument(f"--{name.replace('_', '-')}", type=float, default=value, help=f"seconds ({value:g})")
    top.add_argument("--days", type=float, default=30.0, help="how long a job runs (30)")
    top.add_argument("--trials", type=int, default=20, help="jobs per number of nodes (20)")
    top.add_argument("--seed", type=int, default=1, help="of the failures (1)")
    top.add_argument("--json", type=Path, help="a file that gets all figures")
    return top


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(map(int, text.split(",")))
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected whole numbers of 1 or more, such as 1,128,1250")
    return counts


def main(arguments: list[str]) -> int:
    """Simulate and print; nothing is measured."""
    options = parser().parse_args(arguments)
    costs = Costs(**{name: getattr(options, name) for name in asdict(Costs())})
    node_mtbf = options.node_mtbf_days * _SECONDS_PER_DAY
    lines = [simulate(nodes, node_mtbf, costs, options.days, options.trials, options.seed) for nodes in options.nodes]
    print(table(lines))
    if options.json is not None:
        given = {"node_mtbf": node_mtbf, "seed": options.seed, "days": options.days, "trials": options.trials}
        content = {**given, "costs": asdict(costs), "lines": [*map(asdict, lines)]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def table(lines: list[Line]) -> str:
    """Return a markdown table: shares in percent, times in hours and seconds."""
    header = ("nodes", "a failure every", "save every", "useful", "Daly's formula", "save each hour", "elastic")
    rows = [
        (
            f"{line.nodes:,}",
            f"{line.mtbf / _SECONDS_PER_HOUR:.1f} h",
            f"{line.interval:.0f} s",
            f"{line.useful:.1%} ± {line.spread:.1%}",
            *(f"{share:.1%}" for share in (line.predicted, line.hourly, line.elastic)),
        )
        for line in lines
    ]
    borders = ["---:"] * len(header)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, borders, *rows))
