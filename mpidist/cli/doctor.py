"""``python -m mpidist doctor``: examines machine, launcher and ranks, and reports problems."""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from mpidist.cli.doctor_checks import findings
from mpidist.cli.doctor_checks.finding import ERROR, Finding
from mpidist.cli.doctor_checks.setup import is_torn, torn
from mpidist.cli.doctor_facts.facts import JobFacts, RankFacts
from mpidist.cli.doctor_facts.gather import UnreachableError, gather
from mpidist.cli.doctor_facts.machine import facts_of_this_rank
from mpidist.cli.doctor_facts.timed_messages import NoAnswerError
from mpidist.cli.doctor_facts.watchdog import Ending, Watchdog
from mpidist.cli.doctor_text import findings_text, report
from mpidist.cli.json_output import add_json_argument, json_text
from mpidist.cli.tune import seconds
from mpidist.core import settings
from mpidist.core.errors import LaunchError
from mpidist.topology import import_mpi
from mpidist.topology.exit import end_job_after_output
from mpidist.topology.launchers import LauncherInfo, LauncherVariableError, command_for, read_launcher
from mpidist.topology.mpi_library import MpiLibrary, loaded_library, mpi_install, mpirun_beside

HELP = "look at launcher, ranks, cores, memory, GPUs and network, and say what is wrong; also under mpirun or srun"
_FOUND_SOMETHING = 1
_Print = Callable[..., None]
_HOST_BY_HOST = "python -m mpidist doctor   # on one process of each host, then under the launcher on two at a time"
_OWN_LAUNCHER = "python -m mpidist launch -n 2 -m mpidist doctor   # takes the launcher that belongs to the MPI library"
# Ranks start at different times, and connect to the launcher's daemons first.
_START_FACTOR = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json_argument(parser)
    parser.add_argument(
        "--deadline",
        type=partial(seconds, most=3600.0),
        metavar="SECONDS",
        default=10.0,
        help="how long to wait for a message of another rank, and a sixth of what MPI may take to start (10)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Examine the job (collective); rank 0 prints the report. The status is 1 where something was found."""
    try:
        launcher = read_launcher()
    except LauncherVariableError as error:
        wrong = Finding(ERROR, "launcher", str(error), f"unset {error.variable}")
        with Watchdog() as watch:
            return _without_mpi(None, wrong, partial(_print_report, arguments.json, watch))
    is_first = launcher is None or launcher.rank == 0
    with Watchdog(_document_of_end if arguments.json and is_first else None) as watch:
        return _examine(arguments, launcher, watch)


def _examine(arguments: argparse.Namespace, launcher: LauncherInfo | None, watch: Watchdog) -> int:
    output = partial(_print_report, arguments.json, watch)
    try:
        settings.ABORT_ON_EXCEPTION.read()
    except ValueError as error:
        # The one setting without which MPI is not started.
        command = f"unset {settings.ABORT_ON_EXCEPTION.name}"
        return _without_mpi(launcher, Finding(ERROR, "settings", str(error), command), output)
    try:
        watch.stage(_START_FACTOR * arguments.deadline, *_bad_starts(launcher))
        import_mpi()
        watch.idle()
        me = facts_of_this_rank()
    except LaunchError as error:
        watch.idle()
        command = f"{mpi_install()}   # or: module load openmpi" if loaded_library() is None else _OWN_LAUNCHER
        return _without_mpi(launcher, Finding(ERROR, "MPI", str(error), command), output)
    if launcher is not None and is_torn(launcher, me.mpi):
        return _alone(launcher, me, output)
    try:
        job = gather(me, arguments.deadline, watch)
    except UnreachableError as error:
        _end_torn_job(error.job, arguments.deadline, output)
    except NoAnswerError as error:
        text = f"{error}; the host or the network failed meanwhile"
        print(f"mpidist doctor: {text}", file=sys.stderr, flush=True)
        if arguments.json and me.mpi.rank == 0:
            output(JobFacts((me,)), [Finding(ERROR, "reach", text, _HOST_BY_HOST)])
        end_job_after_output()
    if job is None:
        # The status of rank 0 is that of the job. Launchers end a job when a rank ends with another status than 0, and
        # drop what they have not read of the others' output.
        return 0
    found = findings(job)
    output(job, found)
    return _FOUND_SOMETHING if found else 0


def _bad_starts(launcher: LauncherInfo | None) -> tuple[Ending, Ending]:
    """Return the texts for an MPI that does not start, or ends the process."""
    who = "this process" if launcher is None else f"rank {launcher.rank} ({launcher.name})"
    where = f"{who} on {socket.gethostname()}"
    slow = Ending(
        f"MPI does not start in {where}, MPI_Init does not come back: other ranks did not start, hosts do not reach "
        "one another, or launcher and MPI library wait for each other",
        _HOST_BY_HOST,
    )
    ended = Ending(
        f"MPI ended {where} while it started; its own text is on stderr",
        _OWN_LAUNCHER,
    )
    return slow, ended


# What ends early ------------------------------------------------------------------------------------------------------


def _without_mpi(launcher: LauncherInfo | None, finding: Finding, output: _Print) -> int:
    """Report why MPI was not started.

    Rank 0 does so in full, as its output is one document, the others in a line on stderr.
    """
    if launcher is not None and launcher.rank > 0:
        print(f"mpidist doctor: rank {launcher.rank} on {socket.gethostname()}: {finding.text}", file=sys.stderr)
        # With another status launchers could end the job before rank 0 has printed.
        return 0
    output(None, [finding])
    return _FOUND_SOMETHING


def _alone(launcher: LauncherInfo, me: RankFacts, output: _Print) -> int:
    """Report that this process is alone although the launcher started others. Each says so, the first one at length."""
    library = MpiLibrary(me.mpi.vendor, (), None if me.mpi.path is None else Path(me.mpi.path))
    command = command_for(launcher.name, me.mpi.vendor) or str(mpirun_beside(library) or "mpirun")
    count = "" if launcher.size is None else f" -n {launcher.size}"
    finding = torn(launcher, me.mpi, f"{command}{count} python train.py")
    if launcher.rank > 0:
        size = "" if launcher.size is None else f" of {launcher.size}"
        print(f"mpidist doctor: rank {launcher.rank}{size} on {me.host} is alone, too", file=sys.stderr)
    else:
        output(JobFacts((me,)), [finding], whole=False)
    return _FOUND_SOMETHING


def _end_torn_job(job: JobFacts | None, deadline: float, output: _Print) -> NoReturn:
    """Print the report on rank 0, and end the job. MPI_Finalize would wait for ranks that cannot be reached."""
    if job is None:
        # Rank 0 prints and ends the job; should that not reach this host, this rank ends by itself.
        time.sleep(deadline)
        os._exit(_FOUND_SOMETHING)
    output(job, findings(job))
    end_job_after_output()


# Output ---------------------------------------------------------------------------------------------------------------


def _print_report(
    as_json: bool, watch: Watchdog, job: JobFacts | None, found: Sequence[Finding], *, whole: bool = True
) -> None:
    """Print the report, once. As text it is the findings alone where there is no job, or not a ``whole`` one.

    The watchdog then owes no document more.
    """
    watch.reports()
    if as_json:
        print(_document(job, found), flush=True)
    elif job is None or not whole:
        print("\n".join(findings_text(found)), flush=True)
    else:
        print(report(job, found), flush=True)


def _document_of_end(ending: Ending) -> str:
    return _document(None, [Finding(ERROR, "MPI", f"{ending.text}.", ending.command)])


def _document(job: JobFacts | None, found: Sequence[Finding]) -> str:
    """Return the report as JSON, with the names of ``mpidist.cli.doctor_facts.facts``."""
    facts = {} if job is None else dataclasses.asdict(job)
    return json_text({"findings": [dataclasses.asdict(finding) for finding in found], **facts})
