"""One rank of PyTorch's own tests: runs those of distributed_test.py that are named in a file, one after the other.

    mpirun -n 4 python -m tests.torch.exam_rank NAMES RESULTS

It writes a line for each test into RESULTS and ends with the job at the first that fails, since its ranks are then no
longer in step; ``python -m tests.torch.exam`` starts the next job behind it.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path

import torch.distributed
from mpi4py import MPI

from mpidist.torch.backend import HAS_BACKENDS

FAILED = 10
# A test that takes longer hangs.
_TEST_SECONDS = 60


def main(names: Path, results: Path) -> None:
    world = MPI.COMM_WORLD
    backend = os.environ["BACKEND"]
    if backend == "mpi" and not HAS_BACKENDS:
        _stand_in_for_mpi()
    exam, distributed_test, skips = _load()
    for name in names.read_text().split():
        distributed_test.Barrier.barrier_id = 0
        if world.rank == 0:
            for file in Path(os.environ["TEMP_DIR"]).glob("*/*"):
                file.unlink()
            _write(results, name, "began")
        world.Barrier()
        faulthandler.dump_traceback_later(_TEST_SECONDS, exit=True)
        codes = world.allgather(_run(exam, name, results.with_suffix(".store"), results))
        faulthandler.cancel_dump_traceback_later()
        if world.rank == 0:
            kinds = {skips.get(code, "passed" if code == 0 else f"exit code {code}") for code in codes}
            _write(results, name, ", ".join(sorted(kinds)))
            results.with_suffix(".store").unlink(missing_ok=True)
        world.Barrier()


def _load():
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.distributed import distributed_test

    class Exam(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        pass

    # Tests of groups of some ranks ask this, and want eight ranks of all others.
    os.environ["BACKEND"] = "mpi"
    return Exam, distributed_test, {skip.exit_code: f"skipped: {skip.message}" for skip in TEST_SKIPS.values()}


def _run(exam, name: str, store: Path, results: Path) -> int:
    received, sent = multiprocessing.Pipe()
    try:
        exam._run(MPI.COMM_WORLD.rank, name, str(store), sent)
    except SystemExit as end:
        if end.code != FAILED:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            return int(end.code or 0)
        error = str(received.recv()) if received.poll() else "no traceback"
    except BaseException:
        error = traceback.format_exc()
    _write(results, name, "failed", rank=MPI.COMM_WORLD.rank, error=error)
    sys.stdout.flush()
    os._exit(1)


def _write(results: Path, name: str, result: str, **more: object) -> None:
    with results.open("a") as file:
        file.write(json.dumps({"name": name, "result": result, **more}) + "\n")


def _stand_in_for_mpi() -> None:
    """Have ``init_process_group("mpi")`` make groups of mpidist, which torch allows by itself from 2.14 on."""
    import torch.distributed.distributed_c10d as c10d

    from mpidist.collectives import Communicator
    from mpidist.torch.backend import MpidistProcessGroup

    world = Communicator()

    class ProcessGroupMPI:
        @staticmethod
        def create(ranks):
            return MpidistProcessGroup(world.group(ranks or range(world.size)), "mpi", None)

    c10d._MPI_AVAILABLE = True
    c10d.ProcessGroupMPI = ProcessGroupMPI


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
