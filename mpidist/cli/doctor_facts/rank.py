"""The facts that a rank knows of itself once MPI has started."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path

import mpi4py
import numpy as np

from mpidist.cli.doctor_facts import machine
from mpidist.cli.doctor_facts.facts import MpiFacts, RankFacts
from mpidist.collectives.node import native
from mpidist.core.settings import SETTINGS
from mpidist.core.version import __version__
from mpidist.topology import import_mpi
from mpidist.topology.environments import read_batch_system, read_launcher
from mpidist.topology.mpi_library import library_of, loaded_library
from mpidist.topology.slurm_lists import expand_hostlist

_PREFIX = "MPIDIST_"


def facts_of_this_rank() -> RankFacts:
    """Return the facts of this rank; local."""
    system = read_batch_system()
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIX)}
    return RankFacts(
        host=socket.gethostname(),
        machine=machine.identity(),
        launcher=read_launcher(),
        mpi=mpi_facts(),
        software={
            "Python": platform.python_version(),
            "NumPy": np.__version__,
            "mpi4py": mpi4py.__version__,
            "mpidist": __version__,
        },
        cores=machine.cores(),
        shared_memory=machine.shared_memory(),
        gpus=machine.gpus(),
        interfaces=machine.interfaces(),
        settings=settings,
        wrong_settings=_wrong_settings(),
        unknown_settings=tuple(name for name in settings if name not in SETTINGS),
        batch_system=None if system is None else system.name,
        job_hosts=hosts_of_job(os.environ),
        without_core=_without_core(),
    )


def mpi_facts() -> MpiFacts:
    """Return the facts of the MPI library of this process."""
    mpi = import_mpi()
    library = library_of(mpi.Get_library_version(), loaded_library())
    levels = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")
    # The constants rise in this order, and libraries number them differently.
    numbers = (mpi.THREAD_SINGLE, mpi.THREAD_FUNNELED, mpi.THREAD_SERIALIZED, mpi.THREAD_MULTIPLE)
    return MpiFacts(
        vendor=library.vendor,
        name=str(library),
        path=None if library.path is None else str(library.path),
        thread_level=levels[numbers.index(mpi.Query_thread())],
        size=mpi.COMM_WORLD.Get_size(),
        rank=mpi.COMM_WORLD.Get_rank(),
    )


def _wrong_settings() -> dict[str, str]:
    wrong = {}
    for name, setting in SETTINGS.items():
        try:
            setting.read()
        except ValueError as error:
            wrong[name] = str(error)
    return wrong


def _without_core() -> str:
    try:
        return native.why_not() or ""
    except (RuntimeError, ValueError) as error:
        return str(error)


def hosts_of_job(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts that the batch system gave the job, or none.

    None of them where it is another system, or lists them in another way.
    """
    system = read_batch_system(environ)
    value = "" if system is None else environ.get(system.hosts, "")
    if system is None or not value:
        return ()
    # It only serves to name a host that is silent, so what cannot be read is left out.
    with contextlib.suppress(ValueError, OSError):
        if system.name == "Slurm":
            return tuple(expand_hostlist(value))
        if system.name == "PBS":
            return tuple(dict.fromkeys(Path(value).read_text().split()))
    return ()
