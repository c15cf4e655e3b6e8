"""Count the functions that calls of users pass through on two ranks.

``figures`` starts this file as a job. It imports no other test file, so ``mpidist`` is that of the counted checkout.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

_TIMES = 20


def figures(checkout: Path) -> dict[str, int]:
    """Return files, functions, calls and collectives of each kind of call, as rank 0 of ``checkout`` counts them."""
    from tests.support.ranks.jobs import run_script

    with tempfile.TemporaryDirectory(prefix="mpidist-house-") as folder:
        done = run_script(Path(__file__), 2, folder, env={"PYTHONPATH": str(checkout.resolve())}, timeout=120)
        if done.returncode:
            raise RuntimeError(f"the job ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
        found: dict[str, int] = json.loads(Path(folder, "found.json").read_text())
    return found


def crossed(name: str, call: Callable[[], object]) -> dict[str, int]:
    """Return the functions that every call passes through, and the lowest number of calls. A rank that waits polls."""
    import mpidist

    package, seen = f"{Path(mpidist.__file__).parent}/", list[list[tuple[str, int]]]()

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            seen[-1].append((code.co_filename.removeprefix(package), code.co_firstlineno))

    call()
    before = _collectives()
    for _ in range(_TIMES):
        seen.append([])
        sys.setprofile(profile)
        try:
            call()
        finally:
            sys.setprofile(None)
    functions = set.intersection(*map(set, seen))
    files = {file for file, _ in functions}
    return {
        f"{name}: files": len(files),
        f"{name}: files outside node/, channel/": sum(not {"node", "channel"} & {*Path(file).parts} for file in files),
        f"{name}: functions": len(functions),
        f"{name}: calls": min(map(len, seen)),
        f"{name}: collectives": (_collectives() - before) // _TIMES,
    }


def _collectives() -> int:
    """Return the number of collectives that this rank has issued."""
    return sum(getattr(each, "issued", 0) for each in gc.get_objects() if type(each).__name__ == "Executor")


def main(folder: Path) -> None:
    """Count all kinds of calls and write the figures to ``folder``."""
    import numpy as np

    import mpidist

    found: dict[str, Any] = {}
    array, gradient = np.ones(2**18, np.float32), np.ones(1000, np.float32)
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            variable = mpidist.Variable(np.zeros(1000, np.float32))
            optimizer = mpidist.optimizers.SGD(0.1)
        checkpoint = mpidist.Checkpoint(v=variable)

        def reduce() -> None:
            context = mpidist.get_replica_context()
            assert context is not None
            found.update(crossed("all_reduce", lambda: context.all_reduce("SUM", array)))

        def step() -> None:
            optimizer.apply_gradients([(gradient, variable)])

        strategy.run(reduce)
        found.update(crossed("apply_gradients", lambda: strategy.run(step)))
        found.update(crossed("save", lambda: checkpoint.save(folder / "saved")))
        with mpidist.Communicator() as comm:
            other = 1 - comm.rank

            def message() -> None:
                comm.send(gradient, other) if comm.rank == 0 else comm.recv(gradient, other)

            found.update(crossed("all_reduce_async", lambda: comm.all_reduce_async("SUM", array).wait()))
            found.update(crossed("barrier", comm.barrier))
            found.update(crossed("send", message))
        if strategy.extended.should_checkpoint:
            (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
