"""A rank of ``mpidist.launch_processes``."""

from __future__ import annotations

import pickle
from pathlib import Path

from mpidist.cli.function_job import CALL, path_of_outcome
from mpidist.core.files import replacing
from mpidist.parameter_server.pickling import PickledError, pack, pack_error
from mpidist.topology.launchers import read_launcher


def main(place: str) -> int:
    """Make the call in a folder, write down its outcome, and return the exit status."""
    folder, launcher = Path(place), read_launcher()
    rank = 0 if launcher is None else launcher.rank
    outcome: bytes | PickledError
    try:
        fn, args, kwargs = pickle.loads((folder / CALL).read_bytes())
        outcome = pack(fn(*args, **kwargs), lambda _: None, f"the result of rank {rank}")
    except BaseException as error:  # SystemExit, too: the one who called waits for an outcome
        outcome = pack_error(error, lambda _: None)
    with replacing(path_of_outcome(folder, rank)) as descriptor, open(descriptor, "wb", closefd=False) as file:
        file.write(pickle.dumps(outcome))
    return int(isinstance(outcome, PickledError))
