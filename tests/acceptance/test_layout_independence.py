"""One program, the same numbers with n replicas as 1 x n, n x 1 and mixed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.ranks.pool import run

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

REPLICAS = 4
# Ranks and how many local replicas each has.
LAYOUTS = {"4 x 1": (1, 1, 1, 1), "2 x 2": (2, 2), "1 + 3": (1, 3), "2 + 1 + 1": (2, 1, 1)}


def program(local: tuple[int, ...]) -> dict[str, Any]:
    """Use everything that combines replicas; return what every rank can see alike."""
    import numpy as np
    from mpi4py import MPI

    import mpidist
    from mpidist import VariableAggregation as Aggregation
    from mpidist import VariableSynchronization as Synchronization

    devices = [f"cpu:{k}" for k in range(local[MPI.COMM_WORLD.rank])]
    strategy = mpidist.MultiWorkerMirroredStrategy(devices=devices)
    out: dict[str, Any] = {"n": strategy.num_replicas_in_sync}
    context = mpidist.get_replica_context
    captured = np.array([1.0, 10.0])
    with strategy.scope():
        weights = mpidist.Variable(np.arange(3.0), aggregation=Aggregation.MEAN)
        totals = mpidist.Variable(0.0, aggregation=Aggregation.SUM)
        first = mpidist.Variable(0.0, aggregation=Aggregation.ONLY_FIRST_REPLICA)
        table = mpidist.Variable(np.zeros(5), aggregation=Aggregation.SUM)
        counter = mpidist.Variable(0.0, synchronization=Synchronization.ON_READ, aggregation=Aggregation.SUM)
        average = mpidist.Variable(0.0, synchronization=Synchronization.ON_READ, aggregation=Aggregation.MEAN)

    def step(value: Any) -> Any:
        ctx = context()
        i = ctx.replica_id_in_sync_group
        noise = np.random.default_rng([1, i]).integers(0, 100, 3).astype(float)
        reduced = ctx.all_reduce("SUM", {"noise": noise, "captured": captured, "one": 1})
        merged = ctx.merge_call(lambda s, v: s.reduce("SUM", v, axis=None), args=(1.0,))
        merged_noise = ctx.merge_call(lambda s, v: s.reduce("MEAN", v, axis=0), args=(noise,))
        gathered = ctx.all_gather(np.full(i, i), axis=0)
        weights.assign_add(noise)
        totals.assign_add(2.0)
        first.assign(i + 5.0)
        table.scatter_add(mpidist.IndexedSlices(np.array([1.0, 2.0]), np.array([i, i + 1])))
        counter.assign_add(i + 1.0)
        average.assign(float(i))
        return {"r": reduced, "m": merged, "mn": merged_noise, "g": gathered, "v": value * 2, "noise": noise}

    value = strategy.experimental_distribute_values_from_function(lambda c: 3.0 * c.replica_id_in_sync_group)
    result = strategy.run(step, args=(value,))
    for key in ("m", "mn", "v", "noise"):
        out[f"sum of {key}"] = strategy.reduce("SUM", result[key], axis=None)
        out[f"mean of {key}"] = strategy.reduce("MEAN", result[key], axis=None)
    out["all reduced"] = {k: strategy.reduce("MAX", v, axis=None) for k, v in result["r"].items()}
    out["constant"] = strategy.reduce("SUM", strategy.run(lambda: 1.0), axis=None)
    out["array"] = strategy.reduce("SUM", strategy.run(lambda: captured), axis=0)
    out["gather"] = strategy.gather(result["noise"], axis=0)
    out["gathered"] = strategy.reduce("MAX", result["g"], axis=None)
    out["sparse"] = strategy.extended.reduce_to(
        "SUM", strategy.run(lambda: mpidist.IndexedSlices(np.ones(1), np.array([1]), (3,))), "cpu:0"
    ).to_dense()
    for name, variable in (("weights", weights), ("totals", totals), ("first", first), ("table", table)):
        out[name] = variable.numpy()
        copies = [component.numpy() for component in variable.values]
        assert all(np.array_equal(copy, copies[0]) for copy in copies)
    counter.assign(counter.numpy() * 2)
    out["counter"], out["average"] = counter.numpy(), average.numpy()
    batches = strategy.experimental_distribute_dataset(mpidist.Dataset.range(10).batch(4))
    out["data"] = [strategy.reduce("SUM", strategy.run(lambda x: x * x, args=(x,)), axis=0) for x in batches]
    strategy.close()
    return out


@pytest.fixture(scope="module")
def in_one_process() -> dict[str, Any]:
    return run(program, 1, (REPLICAS,), timeout=60)[0]


def test_the_program_itself(in_one_process: dict[str, Any]) -> None:
    """The numbers by slow formulas, so that not all layouts are wrong together."""
    n = REPLICAS
    noise = [np.random.default_rng([1, i]).integers(0, 100, 3).astype(float) for i in range(n)]
    expected: dict[str, Any] = {
        "n": n,
        "sum of m": n * n,
        "mean of m": n,
        "sum of noise": sum(noise),
        "mean of noise": sum(noise) / n,
        "sum of v": 6.0 * sum(range(n)),
        "constant": n,
        "array": 11.0 * n,
        "gather": np.concatenate(noise),
        "gathered": np.concatenate([np.full(i, i) for i in range(n)]),
        "sparse": np.array([0.0, n, 0.0]),
        "weights": np.arange(3.0) + sum(noise) / n,
        "totals": 2.0 * n,
        "first": 5.0,
        "table": np.array([1.0, 3.0, 3.0, 3.0, 2.0]),
        "counter": 2.0 * sum(range(1, n + 1)),
        "average": sum(range(n)) / n,
        "data": [14, 126, 145],
    }
    for key, value in expected.items():
        np.testing.assert_allclose(in_one_process[key], value, rtol=1e-14, err_msg=key)
    np.testing.assert_allclose(in_one_process["all reduced"]["noise"], sum(noise))
    np.testing.assert_allclose(in_one_process["all reduced"]["captured"], [n, 10.0 * n])
    assert in_one_process["all reduced"]["one"] == n


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_of_every_layout_gets_the_same(layout: str, in_one_process: dict[str, Any]) -> None:
    local = LAYOUTS[layout]
    for rank, found in enumerate(run(program, len(local), local, timeout=60)):
        assert found.keys() == in_one_process.keys()
        for key, value in in_one_process.items():
            if isinstance(value, dict):
                for name in value:
                    np.testing.assert_array_equal(found[key][name], value[name], err_msg=f"rank {rank} {key} {name}")
            else:
                np.testing.assert_array_equal(found[key], value, err_msg=f"rank {rank} {key}")


def test_two_virtual_nodes_give_the_same(in_one_process: dict[str, Any]) -> None:
    for found in run(program, 4, (1, 1, 1, 1), timeout=60, ranks_per_node=2):
        np.testing.assert_array_equal(found["weights"], in_one_process["weights"])
        np.testing.assert_array_equal(found["gather"], in_one_process["gather"])
