"""Parameters: the costs by which is predicted, of a tuning file, of the command line, or those that are shipped."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from benchmarks.measuring.wire import bits_per_second
from mpidist.collectives.reduce import tuning_file
from mpidist.collectives.reduce.cost_model import SHIPPED_NETWORK, Network

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_TIMES = {
    "latency": "of a message without bytes between nodes",
    "overhead": "of the processor, for each message",
    "meeting": "in which the ranks of a node meet",
    "exchange": "of a round of the handshake; as --latency and --overhead together unless given",
}
_LINKS = {
    "bandwidth": "out of a node to the next",
    "far_bandwidth": "out of a node to one half-way round, all at once; as --bandwidth unless given",
    "rail_bandwidth": "that one rank reaches alone; as --bandwidth unless given",
}
_SPEEDS = {"reduce": "combined in a node", "copy": "copied in a node"}


def seconds_of_text(text: str) -> float:
    """Return the seconds of "20us", "1.5ms", "300ns" or "2s".

    >>> seconds_of_text("1.5ms")
    0.0015
    """
    match = re.fullmatch(r"([0-9.]+)(s|ms|us|ns)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"time is {text!r}; expected a number with s, ms, us or ns, such as 20us")
    return float(match[1]) * _UNITS[match[2]]


def bandwidth_of_text(text: str) -> float:
    """Return the bytes per second of a rate as tc writes it.

    >>> bandwidth_of_text("100mbit")
    12500000.0
    """
    try:
        return bits_per_second(text) / 8
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _seconds_per_byte(text: str) -> float:
    """Return the seconds for a byte at so many GB/s."""
    return 1 / (1e9 * float(text))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what messages and work cost."""
    group = parser.add_argument_group("costs", "of a tuning file, else those shipped; each option replaces one")
    group.add_argument("--tuning", type=Path, metavar="FILE", help="what `python -m mpidist tune --out FILE` wrote")
    group.add_argument("--layout", help="whose costs, where the file has several, such as '2 nodes x 1 rank'")
    for name, what in _TIMES.items():
        group.add_argument(_option(name), type=seconds_of_text, metavar="TIME", help=f"{what}, such as 20us")
    for name, what in _LINKS.items():
        group.add_argument(_option(name), type=bandwidth_of_text, metavar="RATE", help=f"{what}, such as 100gbit")
    for name, what in _SPEEDS.items():
        group.add_argument(_option(name), type=_seconds_per_byte, metavar="GB/S", help=f"gigabytes a second, {what}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def network_of(options: argparse.Namespace) -> Network:
    """Return the costs that the options name.

    Raises:
        SystemExit: The file is no tuning file, or has not one entry that fits.
    """
    found = SHIPPED_NETWORK if options.tuning is None else _network_in(options.tuning, options.layout)
    given = {name: value for name in Network._fields if (value := getattr(options, name)) is not None}
    if "bandwidth" in given:
        given = {**dict.fromkeys(_LINKS, given["bandwidth"]), **given}
    network = found._replace(**given)
    if "exchange" not in given and ("latency" in given or "overhead" in given):
        network = network._replace(exchange=network.latency + network.overhead)
    return network


def _network_in(path: Path, layout: str | None) -> Network:
    try:
        tables = tuning_file.read(path)
    except ValueError as error:
        raise SystemExit(f"python -m benchmarks predict: {error}") from error
    found = [table for setup, table in tables.items() if layout in (None, setup.layout)]
    if len(found) != 1:
        layouts = ", ".join(repr(setup.layout) for setup in tables)
        raise SystemExit(f"{path} has costs of {layouts}; expected one to be named, as in --layout '2 nodes x 1 rank'")
    return found[0].between_nodes
