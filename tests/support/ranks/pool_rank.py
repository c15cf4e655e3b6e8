"""What a rank of the warm pool executes: it waits for functions, calls them and sends back what they came to."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import mpidist


def main(address: str) -> None:
    """Carry out what comes from the socket at ``address`` until its other end closes."""
    from mpi4py import MPI

    from tests.support.ranks.leaks import Inventory
    from tests.support.ranks.outcomes import outcome_of

    # Made once: what starts with the first communicator of all ranks is there before the first inventory.
    mpidist.Communicator().close()
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(address)
        connection = Connection(end.detach())
    connection.send(MPI.COMM_WORLD.rank)
    environment = dict(os.environ)
    while True:
        try:
            pickled, env = connection.recv()
        except EOFError:
            return
        before, constants = Inventory(), _constants()
        os.environ.update(env)
        outcome = outcome_of(pickled)
        os.environ.clear()
        os.environ.update(environment)
        sys.stdout.flush()
        sys.stderr.flush()
        now = _constants()
        changed = [f"{name} is another" for name, value in constants.items() if now.get(name) is not value]
        changed += [f"{name} is of a test" for name, value in now.items() if _is_of_a_test(value)]
        connection.send(replace(outcome, left_behind=[*before.leaked(), *changed]))


def _is_of_a_test(value: object) -> bool:
    """Whether a test has put it into a module of mpidist, perhaps one that was not there before."""
    return (getattr(value, "__module__", None) or "").startswith(("tests.", "sent_source", "__main__"))


def _constants() -> dict[str, Any]:
    """Return what functions of tests may replace and forget: functions, classes and capital names, by dotted name."""
    return {
        f"{module_name}.{name}": value
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("mpidist.")
        for name, value in vars(module).items()
        if callable(value) or name.isupper()
    }


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    main(sys.argv[1])
