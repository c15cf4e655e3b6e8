"""CentralStorageStrategy in jobs of their own: its numbers, its memory, and what jobs leave behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.experimental import CentralStorageStrategy
from tests.support.ranks.jobs import run_alone, run_script
from tests.support.ranks.pool import run

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

REPLICAS = 4
LAYOUTS = {"1 x 4": (4,), "4 x 1": (1, 1, 1, 1), "2 x 2": (2, 2), "1 + 3": (1, 3)}


# Numbers ------------------------------------------------------------------------------------------------------------


def trained(strategy: Any) -> dict[str, Any]:
    """Use everything that makes numbers of variables."""
    from mpidist import VariableAggregation as Aggregation

    out: dict[str, Any] = {}
    random = np.random.default_rng(3)
    start = random.normal(size=(6, 3))
    rows, labels = random.normal(size=(64, 6)), random.normal(size=(64, 3))
    kinds = {
        "sgd": mpidist.optimizers.SGD(0.1),
        "momentum": mpidist.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        "adam": mpidist.optimizers.Adam(0.01),
        "rmsprop": mpidist.optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    }
    with strategy.scope():
        weights = {name: mpidist.Variable(start, name=name) for name in kinds}
        table = mpidist.Variable(np.ones((REPLICAS + 1, 2)), aggregation=Aggregation.SUM)
        mean = mpidist.Variable(np.zeros(3), aggregation=Aggregation.MEAN)
        first = mpidist.Variable(0.0, aggregation=Aggregation.ONLY_FIRST_REPLICA)
        loss = mpidist.metrics.Mean()

    def step(batch: Any) -> Any:
        x, y = batch
        context = mpidist.get_replica_context()
        i = context.replica_id_in_sync_group
        for name, weight in weights.items():
            error = x @ np.asarray(weight) - y
            kinds[name].apply_gradients([(2 * x.T @ error / 16, weight)])
            loss.update_state((error**2).sum(axis=-1))
        slices = mpidist.IndexedSlices(np.full((2, 2), 0.5 + i), np.array([i, i + 1]), (REPLICAS + 1, 2))
        table.scatter_add(slices)
        kinds["sgd"].apply_gradients([(slices, table)])
        mean.assign_add(context.all_reduce("SUM", y.sum(axis=0)) * i)
        first.assign(float(i + 7))
        return np.asarray(mean) * 2 + i

    data = mpidist.Dataset.from_tensor_slices((rows, labels)).batch(16)
    for _ in range(2):
        for batch in strategy.experimental_distribute_dataset(data):
            result = strategy.run(step, args=(batch,))
    out["sum"] = strategy.reduce("SUM", result, axis=None)
    out["gathered"] = strategy.gather(result, axis=0)
    out["mean of a variable"] = strategy.reduce("MEAN", table, axis=0)
    out["loss"] = loss.result()
    out |= {name: weight.numpy() for name, weight in weights.items()}
    out |= {"table": table.numpy(), "mean": mean.numpy(), "first": first.numpy()}
    for name, optimizer in kinds.items():
        out |= {f"{name} {k}": variable.numpy() for k, variable in enumerate(optimizer.variables)}
    return out


def both(local: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    from mpi4py import MPI

    devices = [f"cpu:{k}" for k in range(local[MPI.COMM_WORLD.rank])]
    results = []
    for kind in (CentralStorageStrategy, mpidist.MirroredStrategy):
        with kind(devices) as strategy:
            assert strategy.num_replicas_in_sync == REPLICAS
            results.append(trained(strategy))
    return results[0], results[1]


@pytest.fixture(scope="module")
def in_one_process() -> dict[str, Any]:
    return run(both, 1, (REPLICAS,), timeout=60)[0][1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_numbers_are_those_of_mirrored_replicas(layout: str, in_one_process: dict[str, Any]) -> None:
    local = LAYOUTS[layout]
    for central, mirrored in run(both, len(local), local, timeout=90):
        assert central.keys() == mirrored.keys() == in_one_process.keys()
        for key, value in central.items():
            # A metric's total is one here, and a sum of the replicas' own there.
            if key != "loss":
                np.testing.assert_array_equal(value, mirrored[key], err_msg=key)
            np.testing.assert_allclose(value, in_one_process[key], rtol=1e-12, atol=1e-14, err_msg=key)


def seen_while_written(steps: int) -> int:
    """Assign large arrays of one number, and look at them at once; ranks look for different times."""
    with CentralStorageStrategy() as strategy:
        with strategy.scope():
            large = mpidist.Variable(np.zeros(500_000))
        rank = strategy.extended.local_replica_ids[0]
        wrong = 0
        for step in range(1, steps + 1):
            large.assign(np.full(500_000, float(step)))
            for _ in range(1 + (rank + step) % 3):
                view = np.asarray(large)
                wrong += int(view[0] != step or view.min() != step or view.max() != step)
        return wrong


def test_nobody_sees_what_is_half_written() -> None:
    assert run(seen_while_written, 3, 40, timeout=90) == [0, 0, 0]


# Memory -------------------------------------------------------------------------------------------------------------


def own_memory() -> int:
    """Return the bytes of this process; those that k processes share count as a k-th part in each."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def copies_held(kind: str) -> float:
    """Return how many copies of variables and slots all ranks hold together."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    strategy = CentralStorageStrategy() if kind == "central" else mpidist.MirroredStrategy()
    with strategy:
        with strategy.scope():
            mpidist.Variable(np.zeros(1 << 18)).assign(np.ones(1 << 18))  # what is set up once
            before = own_memory()
            weights = [mpidist.Variable(lambda n=n: np.ones(n << 18)) for n in (1, 2, 5)]
            weights += [mpidist.Variable(np.ones(1000)) for _ in range(20)]
            optimizer = mpidist.optimizers.Adam(0.1)
            optimizer.build(weights)
        for variable in (*weights, *optimizer.variables):
            variable.assign(np.asarray(variable) + np.ones((), variable.dtype))
            assert np.asarray(variable).min() >= 1
        world.Barrier()  # a page is shared by those that have looked at it
        held = world.allreduce(own_memory() - before)
        total = sum(np.asarray(variable).nbytes for variable in (*weights, *optimizer.variables))
    return held / total


@pytest.mark.long
def test_memory_of_four_ranks() -> None:
    # The allocator gives freed arrays back at once.
    env = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    central, mirrored = (run_alone(copies_held, 4, kind, env=env, timeout=120)[0] for kind in ("central", "mirrored"))
    assert 0.99 < central <= 1.1
    assert mirrored > 3.99


def held_after(times: int) -> tuple[list[Any], list[Any]]:
    """Make strategies and variables over and over again; return what is held before and after."""

    def use(strategy: Any) -> None:
        with strategy.scope():
            variables = [mpidist.Variable(np.ones(2000 * k)) for k in range(20)]
        variables[-1].assign_add(variables[-1])

    def held() -> list[Any]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        return [sum("/dev/shm/mpidist" in line for line in maps), len(os.listdir("/proc/self/fd"))]

    with CentralStorageStrategy() as kept:
        use(kept)
        before = held()
        for _ in range(times):
            use(kept)
            with CentralStorageStrategy() as strategy:
                use(strategy)
        with kept.scope():
            many = [mpidist.Variable(0.0) for _ in range(100)]
        assert held() == [before[0] + 100, before[1]]
        del many
        return before, held()


def test_dropped_variables_give_their_memory_back() -> None:
    for before, after in run_alone(held_after, 2, 5):
        assert before == after


KILLED = """
import os, pathlib, signal, sys
import numpy as np
import mpidist
strategy = mpidist.experimental.CentralStorageStrategy()
with strategy.scope():
    variable = mpidist.Variable(np.zeros(100_000), aggregation=mpidist.VariableAggregation.SUM)
rank = strategy.extended.local_replica_ids[0]
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
for step in range(10):
    if rank == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    strategy.run(lambda: variable.assign_add(np.ones(100_000)))
"""


def test_a_killed_rank_leaves_no_files(tmp_path: Path) -> None:
    job = run_script(KILLED, 3, str(tmp_path))
    assert job.returncode != 0
    pids = [path.name for path in tmp_path.iterdir()]
    assert len(pids) == 3
    assert not [path for pid in pids for path in Path("/dev/shm").glob(f"mpidist-{pid}-*")]


# Where it is not for ------------------------------------------------------------------------------------------------


def refused_on_several_nodes() -> list[str]:
    from mpi4py import MPI

    texts = []
    for communicator in (None, MPI.COMM_WORLD):
        try:
            CentralStorageStrategy(communicator=communicator).close()
        except ValueError as error:
            texts.append(str(error))
    with CentralStorageStrategy(communicator=MPI.COMM_SELF) as alone:
        assert alone.num_replicas_in_sync == 1
    return texts


def test_several_nodes() -> None:
    for texts in run(refused_on_several_nodes, 2, ranks_per_node=1):
        assert len(texts) == 2
        assert "2 ranks on 2 nodes" in texts[0]
        for text in texts:
            assert "MultiWorkerMirroredStrategy" in text
            assert "ParameterServerStrategy" in text
