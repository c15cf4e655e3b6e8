"""The command line: python -m tests.cluster.lab check|up|down|run|on|off|boot|cut|mend|rate; see README.md."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys

from tests.cluster.lab.lab import Lab, LabError
from tests.cluster.lab.requirements import missing
from tests.cluster.lab.settings import LOGIN, Settings

_FAULTS = {
    "off": "cut a host's power",
    "boot": "start it again",
    "cut": "pull its network cable",
    "mend": "plug it in again",
}


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m tests.cluster.lab", description=__doc__)
    top.add_argument("--name", default=Settings.name, help=f"which lab, if several are up ({Settings.name})")
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="say whether a lab can come up on this machine; installs nothing")
    up = commands.add_parser("up", help="bring the cluster up")
    run = commands.add_parser("run", help="bring it up, run a command on its login host, take it down")
    for parser in (up, run):
        parser.add_argument("--hosts", type=int, default=Settings.hosts, help=f"compute hosts ({Settings.hosts})")
        parser.add_argument("--cpus", type=int, default=Settings.cpus, help="CPUs each claims to have")
        parser.add_argument("--memory", type=int, default=Settings.memory, help="MiB each claims to have")
        parser.add_argument("--gpus", type=int, default=Settings.gpus, help="GPUs each claims to have")
        parser.add_argument("--rate", help="what each sends at most, such as 1gbit")
        parser.add_argument("--burst", default=Settings.burst, help=f"and at once, after a pause ({Settings.burst})")
        parser.add_argument("--switches", type=int, default=Settings.switches, help="that hosts are at, in a tree (1)")
        parser.add_argument("--trunk", help="what the link of each switch to the middle carries, such as 200mbit")
        parser.add_argument("--enforce-memory", action="store_true", help="end steps that take more than asked for")
        parser.add_argument("--share", action="append", default=[], metavar="FOLDER", help="below /tmp, for all hosts")
    commands.add_parser("down", help="take it down")
    on = commands.add_parser("on", help="run a command on a host, in the current folder")
    on.add_argument("host")
    for parser in (on, run):
        parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="COMMAND")
    for fault, text in _FAULTS.items():
        commands.add_parser(fault, help=text).add_argument("host")
    rate = commands.add_parser("rate", help="change what a host sends at most")
    rate.add_argument("host")
    rate.add_argument("rate")
    return top


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        name=options.name,
        hosts=options.hosts,
        cpus=options.cpus,
        memory=options.memory,
        gpus=options.gpus,
        rate=options.rate,
        burst=options.burst,
        switches=options.switches,
        trunk=options.trunk,
        enforce_memory=options.enforce_memory,
        shared=tuple(options.share),
    )


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.command == "check":
        reason = missing()
        if reason is not None:
            print(reason)
        return int(reason is not None)
    if options.command == "up":
        Lab(_settings(options)).up()
        print("up; for example: python -m tests.cluster.lab on login srun -N2 hostname")
        return 0
    if options.command == "run":
        # A time limit ends this process with SIGTERM, which must take the lab down as an interrupt does.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        with Lab(_settings(options)) as lab:
            return subprocess.run(lab.command(LOGIN, _without_dashes(options.arguments)), cwd="/").returncode
    if options.command == "down":
        # As `rm -f`: what is not there is down.
        if Settings(name=options.name).folder.exists():
            Lab.attach(options.name).down()
        return 0
    lab = Lab.attach(options.name)
    if options.command == "on":
        command = lab.command(options.host, _without_dashes(options.arguments) or ["bash"])
        os.execvp(command[0], command)
    if options.command == "rate":
        lab.rate(options.host, options.rate)
    else:
        getattr(lab, options.command)(options.host)
    return 0


def _without_dashes(arguments: list[str]) -> list[str]:
    return arguments[1:] if arguments[:1] == ["--"] else arguments


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (LabError, RuntimeError, ValueError) as error:
        sys.exit(f"python -m tests.cluster.lab: {error}")
