"""Runs a program on ranks that may share a GPU: ``mpirun -n 2 python -m tests.gpu.shared_gpu_script script.py ...``."""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    from tests.gpu import machine

    machine.join()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
