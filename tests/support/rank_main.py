"""What a rank executes for tests.support.mpirun.run: call the function, write its result, leave together."""

from __future__ import annotations

import importlib
import linecache
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mpidist  # noqa: F401 - it sets what the MPI of this machine needs, before MPI starts

if TYPE_CHECKING:
    from mpi4py import MPI

# How long a failed rank waits for the others: those that fail alike write their error too, and those that
# wait for this rank in a collective are then ended with the job.
_GRACE_SECONDS = 3.0


def main(folder: Path) -> int:
    """Run the call described in ``folder`` and return the exit status."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    private = world.Dup()
    failed = False
    try:
        reference, args = pickle.loads((folder / "call.pickle").read_bytes())
        record = pickle.dumps(("value", _function(reference)(*args)))
    except BaseException as error:
        failed = True
        record = _error_record(error)
    part = folder / f"{world.rank}.part"
    part.write_bytes(record)
    os.replace(part, folder / f"{world.rank}.pickle")
    if not MPI.Is_finalized():
        _leave(private, failed)
    return int(failed)


def _function(reference: tuple[str, str, str]) -> Callable[..., Any]:
    kind, where, name = reference
    if kind == "import":
        imported: Callable[..., Any] = attrgetter(name)(importlib.import_module(where))
        return imported
    file = f"<source of {name}>"
    linecache.cache[file] = (len(where), None, where.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": "sent_source"}
    exec(compile(where, file, "exec"), namespace)
    sent: Callable[..., Any] = namespace[name]
    return sent


def _error_record(error: BaseException) -> bytes:
    """Pickle the exception with its traceback; the text alone where the exception does not survive that."""
    text = "".join(traceback.format_exception(error))
    try:
        record = pickle.dumps(("error", (error, text)))
        pickle.loads(record)
    except Exception:
        return pickle.dumps(("error", (None, text)))
    return record


def _leave(comm: MPI.Comm, failed: bool) -> None:
    request = comm.Ibarrier()
    deadline = time.monotonic() + _GRACE_SECONDS
    while not request.Test():
        if failed and time.monotonic() > deadline:
            sys.stderr.flush()
            comm.Abort(1)
        time.sleep(0.001)
    comm.Free()


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    sys.exit(main(Path(sys.argv[1])))
