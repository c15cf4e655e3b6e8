"""Seeds: the same numbers for the same seed, replica and key, whatever the layout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import mpidist
from mpidist.core import seed as process_seed
from mpidist.training.random import common_rng, replica_rng, set_seed
from tests.support.ranks.layouts import layouts

pytestmark = pytest.mark.counts


@pytest.fixture(autouse=True)
def _no_seed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(process_seed._State, "seed", None)
    monkeypatch.setattr(process_seed._State, "numbers", process_seed._State.numbers)
    return


def draws(key: int) -> tuple[int, int]:
    return int(common_rng(key).integers(1 << 40)), int(replica_rng(key).integers(1 << 40))


def test_numbers_depend_on_seed_replica_and_key(strategy: mpidist.Strategy) -> None:
    set_seed(3)
    results = strategy.experimental_local_results(strategy.run(lambda: draws(5)))
    again = strategy.experimental_local_results(strategy.run(lambda: draws(5)))
    other = strategy.experimental_local_results(strategy.run(lambda: draws(6)))
    assert results == again
    assert not {number for pair in results for number in pair} & {number for pair in other for number in pair}
    for replica_id, (common, own) in zip(strategy.extended.local_replica_ids, results, strict=True):
        assert common == common_rng(5).integers(1 << 40)
        assert (own == replica_rng(5).integers(1 << 40)) == (replica_id == 0)
    every = strategy.run(lambda: mpidist.get_replica_context().all_gather(_as_array(draws(5)[1]), axis=0))
    for gathered in strategy.experimental_local_results(every):
        assert len(set(gathered.tolist())) == strategy.num_replicas_in_sync


def _as_array(number: int) -> object:
    import numpy as np

    return np.array([number])


def test_the_seed_matters() -> None:
    set_seed(1)
    first = draws(0)
    set_seed(2)
    assert draws(0) != first
    set_seed(1)
    assert draws(0) == first


def test_seeds_for_pipelines_are_a_sequence() -> None:
    assert process_seed.next_seed() is None
    set_seed(1)
    first = [process_seed.next_seed() for _ in range(3)]
    assert len(set(first)) == 3
    assert all(isinstance(seed, int) and 0 <= seed < 1 << 63 for seed in first)
    set_seed(1)
    assert [process_seed.next_seed() for _ in range(3)] == first


def test_wrong_seeds() -> None:
    with pytest.raises(RuntimeError, match="set_seed"):
        common_rng(0)
    with pytest.raises(RuntimeError, match="set_seed"):
        replica_rng(0)
    with pytest.raises(ValueError, match="seed is -1"):
        set_seed(-1)
    with pytest.raises(TypeError):
        set_seed(0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", layouts("mirrored-2local"), indirect=True)
def test_no_replica_is_meant_across_replicas(strategy: mpidist.Strategy) -> None:
    set_seed(1)
    with strategy.scope():
        common_rng(0)
        with pytest.raises(RuntimeError, match="cross-replica context"):
            replica_rng(0)
