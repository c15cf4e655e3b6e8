"""Run a program on pretended GPUs: ``python -m tests.support.fake_cupy [--devices N] [--jitter S] script.py ...``."""

from __future__ import annotations

import argparse
import gc
import os
import runpy
import sys

import mpidist  # noqa: F401 - it sets what the MPI of this machine needs, before MPI starts
from mpidist.collectives.channel.shutdown import shut_down
from tests.support import fake_cupy


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.fake_cupy", description=__doc__)
    parser.add_argument("--devices", type=int, default=2, help="GPUs of each process (2)")
    parser.add_argument("--jitter", type=float, default=0.0, help="seconds by which a job is late at most (0)")
    parser.add_argument("--no-nccl", action="store_true", help="pretend that NCCL is missing")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    fake_cupy.install(given.devices, given.jitter, not given.no_nccl)
    sys.argv = [given.script, *given.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(given.script)))
    runpy.run_path(given.script, run_name="__main__")
    # What the end of the process would do, while the GPUs are still there; programs need not close what they open.
    shut_down()
    gc.collect()
    fake_cupy.uninstall()


if __name__ == "__main__":
    main()
