"""Predictions: `python -m benchmarks predict`; how long reductions and training steps take on nodes not there.

By the library's own cost model, with the costs that `python -m mpidist tune` has measured. Nothing is started but, with
--replay, SimGrid.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks.measuring.models import MODELS
from benchmarks.measuring.sizes import size_of_text, size_text, sizes_of_text
from benchmarks.predicting import comparing, parameters, recording, simgrid
from benchmarks.predicting.reductions import LEADERS, Prediction, predicted, reduction_seconds
from benchmarks.predicting.steps import Step, buckets_of, step_of, work_of
from benchmarks.predicting.trace import bytes_sent
from benchmarks.reports.files import load
from benchmarks.reports.predictions import Predictions, document_of, plot, save, seconds_text, text_of
from mpidist.collectives.reduce.cost_model import Network, handshake_seconds
from mpidist.collectives.reduce.registry import wire_algorithms
from mpidist.training.gradients import BUCKET_BYTES


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks predict", description=__doc__)
    top.add_argument("--nodes", type=_numbers, default=[2, 4, 8, 16, 64, 256, 1250], metavar="A,B", help="of how many")
    top.add_argument("--ranks-per-node", type=_number, default=8, metavar="N", help="on each node (8)")
    top.add_argument("--sizes", type=sizes_of_text, default=sizes_of_text("4K,64K,1M,16M,64M"), metavar="A,B")
    names = [LEADERS, *sorted(wire_algorithms.costs)]
    top.add_argument("--algorithm", choices=names, help="force one way between nodes, or leaders")
    top.add_argument("--plain", action="store_true", help="no handshake and no slices, as in other libraries")
    top.add_argument("--compare", type=Path, nargs="+", default=[], metavar="JSON", help="results to be held against")
    parameters.add_arguments(top)
    step = top.add_argument_group("a training step", "its efficiency, given its time without communication")
    step.add_argument("--compute", type=parameters.seconds_of_text, metavar="TIME", help="of a step of one rank: 120ms")
    step.add_argument("--model", choices=list(MODELS), help="whose gradients, of float32")
    step.add_argument("--gradients", type=sizes_of_text, metavar="A,B", help="or their bytes, first layers first")
    step.add_argument("--backward", type=_share, default=2 / 3, help="share of backward in --compute (2/3)")
    step.add_argument(
        "--bucket", type=size_of_text, default=BUCKET_BYTES, help="of gradients, 25M in mpidist.torch (16M)"
    )
    step.add_argument("--first-bucket", type=size_of_text, help="the first, 1M in mpidist.torch (as the others)")
    trace = top.add_argument_group("SimGrid", "of the first of --sizes on the first of --nodes")
    trace.add_argument("--simgrid", type=Path, metavar="DIR", help="write trace, platform and hosts there")
    trace.add_argument("--one-rail", action="store_true", help="one rank of each node, with its part of the bandwidth")
    trace.add_argument("--replay", type=float, metavar="SECONDS", help="replay it, for at most so long")
    top.add_argument("--json", action="store_true", help="print JSON in place of tables")
    top.add_argument("--out", type=Path, help="folder for NAME.json and NAME.csv; none are written without")
    top.add_argument("--plot", action="store_true", help="and for NAME.png; needs matplotlib")
    top.add_argument("--name", default="predict", help="name of these files (predict)")
    return top


def _number(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"number is {text!r}; expected a whole one above 0, such as 16")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [_number(part) for part in text.split(",")]


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"share is {text!r}; expected more than 0 and at most 1, such as 0.67")
    return share


def main(arguments: list[str]) -> int:
    """Print what was asked for and write the files; the status is 1 if a comparison is off by more than its bar."""
    options = parser().parse_args(arguments)
    _check(options)
    network = parameters.network_of(options)
    if options.simgrid is not None:
        return _simulate(options, network)
    found = _predictions(options, network)
    print(json.dumps(document_of(found), indent=1) if options.json else text_of(found))
    if options.out is not None:
        paths = save(found, options.out, options.name)
        paths += [plot(found, options.out, options.name)] if options.plot else []
        print(f"# written: {', '.join(map(str, paths))}", file=sys.stderr)
    return int(any(abs(each.error) > each.bar for each in found.compared))


def _check(options: argparse.Namespace) -> None:
    """End the program for options that do not go together."""
    if options.compute is not None and (options.model is None) == (options.gradients is None):
        raise SystemExit("--compute needs the gradients of the step: --model resnet50, or --gradients 4M,16M")
    if options.compute is None and (options.model or options.gradients):
        raise SystemExit("--model and --gradients need the time of a step without communication: --compute 120ms")
    if options.plot and options.out is None:
        raise SystemExit("--plot needs a folder: --out DIR")
    if options.plain and (options.compare or options.simgrid):
        raise SystemExit("--plain is of other libraries; --compare and --simgrid are of mpidist")
    if (options.one_rail or options.replay) and options.simgrid is None:
        raise SystemExit("--one-rail and --replay need a folder for the trace: --simgrid DIR")


def _predictions(options: argparse.Namespace, network: Network) -> Predictions:
    found, left_out = [], []
    for path in options.compare:
        results = load(path)
        beside, without = comparing.compared(results.rows, results.machine["nodes"], network)
        found += beside
        left_out += without
    # What is compared has sizes and nodes of its own.
    reductions = [] if options.compare else _reductions(options, network)
    return Predictions(network, reductions, _steps(options, network), found, left_out)


def _reductions(options: argparse.Namespace, network: Network) -> list[Prediction]:
    return [
        predicted(network, nodes, options.ranks_per_node, size, options.algorithm, plain=options.plain)
        for size in options.sizes
        for nodes in options.nodes
    ]


def _steps(options: argparse.Namespace, network: Network) -> list[tuple[int, Step]]:
    if options.compute is None:
        return []
    work = work_of(options.gradients or gradients_of(options.model), options.compute, options.backward)
    buckets = buckets_of(work.gradients, options.bucket, options.first_bucket)
    place = options.ranks_per_node, options.algorithm
    return [
        (nodes, step_of(work, buckets, reduction_seconds(network, nodes, *place, plain=options.plain)))
        for nodes in options.nodes
    ]


def gradients_of(model: str) -> list[int]:
    """Return the bytes of a model's gradients, first layers first."""
    return [4 * math.prod(shape) for shape in MODELS[model]()]


# SimGrid --------------------------------------------------------------------------------------------------------------


class _Simulated(NamedTuple):
    """A schedule that was written for SimGrid."""

    prediction: Prediction
    command: list[str]
    seconds: float
    """As the model says, without the handshake."""
    lanes: int
    sent: int
    """Bytes that leave the node that sends most."""


def _simulate(options: argparse.Namespace, network: Network) -> int:
    written = _written(options, network)
    each = written.prediction
    print(f"# {each.nodes} nodes x {each.ranks_per_node} ranks, {size_text(each.nbytes)}, {each.algorithm}")
    print(f"# {written.lanes} ranks of the trace for each rank: slices under way; {written.sent} bytes from a node")
    if network.far_bandwidth < network.bandwidth:
        print("# the platform has no switches that would slow far nodes down, which the prediction counts")
    print(f"# {' '.join(written.command)}")
    print(f"predicted, without handshake: {seconds_text(written.seconds)}")
    if options.replay is not None:
        reason = simgrid.problem()
        if reason is not None:
            raise SystemExit(f"nothing was replayed: {reason}")
        seconds = simgrid.replay(written.command, options.replay)
        print(f"SimGrid: {seconds_text(seconds)}; the prediction is off by {written.seconds / seconds - 1:+.1%}")
    return 0


def _written(options: argparse.Namespace, network: Network) -> _Simulated:
    nodes, rails = options.nodes[0], options.ranks_per_node
    if nodes < 2 or options.algorithm == LEADERS:
        raise SystemExit("--simgrid writes what goes between nodes in slices; expected two nodes, and not leaders")
    prediction = predicted(network, nodes, rails, options.sizes[0], options.algorithm)
    if prediction.algorithm == LEADERS:
        raise SystemExit(f"{size_text(prediction.nbytes)} goes by leaders; type a larger size, or --algorithm NAME")
    slices = recording.slices_of(prediction.nbytes, rails, prediction.slice_bytes)
    of_rail = recording.rail_schedule(prediction.algorithm, nodes, rails, slices, network)
    rails_written = 1 if options.one_rail else rails
    schedule = recording.on_all_rails(of_rail, slices.lanes, rails_written)
    bandwidth = min(network.bandwidth * rails_written / rails, network.rail_bandwidth * rails_written)
    command = simgrid.write(
        options.simgrid, schedule, nodes, rails_written, latency=network.latency, bandwidth=bandwidth
    )
    seconds = prediction.seconds - handshake_seconds(nodes, network)
    return _Simulated(prediction, command, seconds, slices.lanes, max(bytes_sent(schedule, nodes)))
