"""What some calls cross, counted on each rank: started by ``tests.house.calls`` with the folder to write into.

Nothing of the tests is imported here, so that ``mpidist`` is that of the checkout that is counted.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import mpidist

_PACKAGE = f"{Path(mpidist.__file__).parent}/"
_FLOATS_PER_MIB = 2**18
# More than travel in a handshake.
_PARAMETERS = 1000
_TIMES = 20


@dataclass
class _Seen:
    """What one call has crossed."""

    functions: set[tuple[str, int]] = field(default_factory=set)
    calls: int = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE):
            self.functions.add((code.co_filename.removeprefix(_PACKAGE), code.co_firstlineno))
            self.calls += 1


def crossed(call: Callable[[], object]) -> dict[str, Any]:
    """Return what ``call`` crosses after a first time: what it does every time, and the fewest calls that it makes.

    Whoever has to wait looks again and again, each time by calls; of some times one hardly waits.
    """
    call()
    before = _collectives()
    times = [_once(call) for _ in range(_TIMES)]
    functions = set.intersection(*(seen.functions for seen in times))
    return {
        "files": sorted({file for file, _ in functions}),
        "functions": len(functions),
        "calls": min(seen.calls for seen in times),
        "collectives": (_collectives() - before) // _TIMES,
    }


def _once(call: Callable[[], object]) -> _Seen:
    seen = _Seen()
    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def _collectives() -> int:
    """Return how many collectives this rank has issued, wherever a checkout has its channels."""
    return sum(
        getattr(each, "issued", 0) for each in gc.get_objects() if type(each).__name__ in ("Channel", "Executor")
    )


def main(folder: Path) -> None:
    """Write what some calls cross: reductions of 1 MiB, a step of an optimizer, a save, a barrier, a message."""
    found = {}
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            variable = mpidist.Variable(np.zeros(_PARAMETERS, np.float32))
            optimizer = mpidist.optimizers.SGD(0.1)
        array, gradient = np.ones(_FLOATS_PER_MIB, np.float32), np.ones(_PARAMETERS, np.float32)

        def reduce() -> None:
            context = mpidist.get_replica_context()
            assert context is not None
            found["all_reduce"] = crossed(lambda: context.all_reduce("SUM", array))

        def step() -> None:
            optimizer.apply_gradients([(gradient, variable)])

        strategy.run(reduce)
        found["apply_gradients"] = crossed(lambda: strategy.run(step))
        checkpoint = mpidist.Checkpoint(v=variable)
        found["save"] = crossed(lambda: checkpoint.save(folder / "saved"))
        with mpidist.Communicator() as comm:
            other = 1 - comm.rank
            found["all_reduce_async"] = crossed(lambda: comm.all_reduce_async("SUM", array).wait())
            found["barrier"] = crossed(comm.barrier)
            found["send"] = crossed(
                lambda: comm.send(gradient, other) if comm.rank == 0 else comm.recv(gradient, other)
            )
        if strategy.extended.should_checkpoint:
            (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
