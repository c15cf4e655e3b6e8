"""``python -m mpidist doctor``: examines machine, launcher and ranks, and reports problems."""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mpidist.cli.doctor.burn import run_loads
from mpidist.cli.doctor.checks import findings
from mpidist.cli.doctor.facts import ERROR, Finding, JobFacts, RankFacts
from mpidist.cli.doctor.gather import HOST_BY_HOST, UnreachableError, gather_job
from mpidist.cli.doctor.machine import facts_of_this_rank
from mpidist.cli.doctor.report import findings_text, report_text
from mpidist.cli.json_output import add_json_argument, json_text, seconds
from mpidist.core import settings
from mpidist.core.errors import LaunchError
from mpidist.topology import import_mpi
from mpidist.topology.exit import end_job_after_output
from mpidist.topology.launchers import LauncherInfo, LauncherVariableError, command_for, read_launcher
from mpidist.topology.mpi_library import MpiLibrary, loaded_library, mpi_install, mpirun_beside
from mpidist.topology.start import check_world
from mpidist.topology.watchdog import Stage, Watchdog

HELP = "look at launcher, ranks, cores, memory, GPUs and network, and say what is wrong; also under mpirun or srun"
_FOUND_SOMETHING = 1
_OWN_LAUNCHER = "python -m mpidist launch -n 2 -m mpidist doctor   # uses the launcher that belongs to the MPI library"
# Ranks start at different times, and connect to the launcher's daemons first.
_STAGE_FACTOR = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json_argument(parser)
    parser.add_argument(
        "--deadline",
        type=partial(seconds, most=3600.0),
        metavar="SECONDS",
        default=10.0,
        help="how long to wait for a message of another rank, and a sixth of the limit of each step (10)",
    )
    parser.add_argument(
        "--burn",
        type=partial(seconds, most=86400.0),
        metavar="SECONDS",
        help="also load all ranks for so long, and name nodes and ranks that are slow or compute wrong results",
    )
    parser.add_argument("--folder", metavar="DIR", help="folder that --burn writes to (that of temporary files)")


def run(arguments: argparse.Namespace) -> int:
    """Examine the job (collective); rank 0 prints the report. The status is 1 if there are findings."""
    with Watchdog() as watch:
        output = _Output(arguments, watch)
        try:
            launcher = read_launcher()
        except LauncherVariableError as error:
            return output.alone(None, Finding(ERROR, "launcher", str(error), f"unset {error.variable}"))
        output.is_first = launcher is None or launcher.rank == 0
        try:
            # The one setting that must be valid before MPI starts.
            settings.ABORT_ON_EXCEPTION.read()
        except ValueError as error:
            return output.alone(
                launcher, Finding(ERROR, "settings", str(error), f"unset {settings.ABORT_ON_EXCEPTION.name}")
            )
        try:
            output.begin(*_bad_starts(launcher))
            import_mpi()
            output.begin()
            me = facts_of_this_rank()
        except LaunchError as error:
            command = f"{mpi_install()}   # or: module load openmpi" if loaded_library() is None else _OWN_LAUNCHER
            return output.alone(launcher, Finding(ERROR, "MPI", str(error), command))
        try:
            check_world(me.mpi.size)
        except LaunchError as error:
            return output.alone(launcher, _torn(launcher, me, error))
        try:
            load = arguments.burn and partial(run_loads, seconds=arguments.burn, folder=arguments.folder)
            job = gather_job(me, output.deadline, output.begin, load, arguments.burn or 0.0)
        except UnreachableError as error:
            if error.job is None:
                # Rank 0 prints and ends the job. If that does not reach this host, this rank ends itself.
                time.sleep(output.deadline)
                os._exit(_FOUND_SOMETHING)
            output.print(error.job, findings(error.job))
            end_job_after_output()
        output.begin()
        if job is None:
            # The status of rank 0 is that of the job. Launchers end a job when a rank ends with another status than 0,
            # and drop unread output of the others.
            return 0
        found = findings(job)
        output.print(job, found)
        return _FOUND_SOMETHING if found else 0


class _Output:
    """The report of this rank. If the process ends early, the watchdog prints a report instead."""

    def __init__(self, arguments: argparse.Namespace, watch: Watchdog) -> None:
        self._as_json, self._watch = arguments.json, watch
        self.deadline: float = arguments.deadline
        self.is_first = True

    def begin(self, slow: Finding | None = None, ended: Finding | None = None, more: float = 0.0) -> None:
        """Begin a stage. Print ``slow`` and end this process if it takes too long. Print ``ended`` if it ends."""
        # Rank 0 is first, because its report ends the job.
        limit = self.deadline * (_STAGE_FACTOR if self.is_first else _STAGE_FACTOR + 1) + more
        stages = []
        if slow is not None:
            slow = dataclasses.replace(slow, text=f"{slow.text} Limit: {limit:g} s.")
            stages.append(Stage(limit, (self._early_document(slow), _line(slow))))
        # The launcher ends all ranks when one fails, so only rank 0 reports an unexpected end.
        text = "The process of rank 0 was ended before it could report. The reason may be on stderr."
        unexpected = Finding(ERROR, "MPI", text, HOST_BY_HOST)
        self._watch.begin(stages, (self._early_document(ended or unexpected), _line(ended) if ended else ""))

    def _early_document(self, finding: Finding) -> str:
        return f"{self._document(None, [finding])}\n" if self._as_json and self.is_first else ""

    def print(self, job: JobFacts | None, found: Sequence[Finding]) -> None:
        """Print the report, once. Without a job, it has only the findings."""
        self._watch.begin([])
        if self._as_json:
            print(self._document(job, found), flush=True)
        elif job is None:
            print("\n".join(findings_text(found)), flush=True)
        else:
            print(report_text(job, found), flush=True)

    def alone(self, launcher: LauncherInfo | None, finding: Finding) -> int:
        """Report why the ranks could not be examined together. Ranks above 0 do so in a line on stderr."""
        self._watch.begin([])
        if launcher is not None and launcher.rank > 0:
            print(f"mpidist doctor: rank {launcher.rank} on {socket.gethostname()}: {finding.text}", file=sys.stderr)
            # With another status launchers could end the job before rank 0 has printed.
            return 0
        self.print(None, [finding])
        return _FOUND_SOMETHING

    @staticmethod
    def _document(job: JobFacts | None, found: Sequence[Finding]) -> str:
        facts = {} if job is None else dataclasses.asdict(job)
        for rank in filter(None, facts.get("ranks", ())):
            if hasattr(rank["launcher"], "_asdict"):  # JSON would have a list
                rank["launcher"] = rank["launcher"]._asdict()
        return json_text({"findings": [dataclasses.asdict(finding) for finding in found], **facts})


def _line(finding: Finding) -> str:
    return f"mpidist doctor: {finding.text} Type: {finding.command}\n"


def _bad_starts(launcher: LauncherInfo | None) -> tuple[Finding, Finding]:
    """Return the findings if MPI does not start, and if it ends this process."""
    who = "this process" if launcher is None else f"rank {launcher.rank} ({launcher.name})"
    where = f"{who} on {socket.gethostname()}"
    slow = (
        f"MPI does not start in {where}: MPI_Init does not return. Other ranks did not start, hosts do not reach one "
        "another, or launcher and MPI library wait for each other."
    )
    ended = f"MPI ended {where} while it started. Its own message is on stderr."
    return Finding(ERROR, "MPI", slow, HOST_BY_HOST), Finding(ERROR, "MPI", ended, _OWN_LAUNCHER)


def _torn(launcher: LauncherInfo | None, me: RankFacts, error: LaunchError) -> Finding:
    """Return the finding that MPI made several worlds of the ranks."""
    if launcher is None:
        command = f"python -m mpidist launch -n {os.environ['WORLD_SIZE']} train.py"
    else:
        library = MpiLibrary(me.mpi.vendor, (), None if me.mpi.path is None else Path(me.mpi.path))
        own = command_for(launcher.name, me.mpi.vendor) or mpirun_beside(library) or "mpirun"
        command = f"{own}{'' if launcher.size is None else f' -n {launcher.size}'} python train.py"
    return Finding(ERROR, "world", str(error), command)
