"""Which GPUs Slurm shows to each rank, and which of them mpidist gives to it; then another program in the same ranks.

Arguments: a folder, and the program with its own.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
from pathlib import Path

import mpidist

with mpidist.MultiWorkerMirroredStrategy() as strategy, mpidist.Communicator() as ranks:
    found = {
        "host": socket.gethostname(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "taken": list(strategy.extended.worker_devices),
        "replicas": strategy.num_replicas_in_sync,
    }
    Path(sys.argv[1], f"{ranks.rank}.json").write_text(json.dumps(found))
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
