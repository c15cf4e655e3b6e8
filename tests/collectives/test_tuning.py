"""Tuning: what is made of timings, and measuring on the ranks at hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpidist
from mpidist import Communicator
from mpidist.arrays.streams import find_cupy
from mpidist.collectives import tuning
from mpidist.collectives.reduce.choice import place_of
from mpidist.collectives.reduce.registry import (
    GPU_PLACES,
    HOST_PLACES,
    SHIPPED,
    Row,
    Table,
    algorithms_at,
    candidates_at,
    check_table,
    gpu_names,
    host_algorithms,
    host_names,
    look_up,
)
from mpidist.collectives.reduce.tuning_file import Setup, merge, read, setup_of
from mpidist.collectives.tuning import SIZES, Timing, best_row
from mpidist.core.errors import AlgorithmError, DeviceError

pytestmark = pytest.mark.counts

SETTING = "MPIDIST_TUNING_FILE"
ELSEWHERE = Setup("some CPU, 4 cores", "some MPI 1.0", "9 nodes x 9 ranks")


def curves(**costs: tuple[float, float]) -> list[Timing]:
    """Timings of algorithms that take a start and a time per byte."""
    return [Timing(n, {name: start + n * per_byte for name, (start, per_byte) in costs.items()}) for n in SIZES]


# Deciding -------------------------------------------------------------------------------------------------------------


def test_the_crossing_is_found() -> None:
    # 10 us + n / 1e9 and 30 us + n / 4e9 s are equal at 26667 bytes.
    ((limit, low), (last, high)) = best_row(curves(small=(10e-6, 1e-9), large=(30e-6, 0.25e-9)))
    assert (low, last, high) == ("small", None, "large")
    assert limit == pytest.approx(26667, rel=0.1)
    assert limit % 1024 == 0


def test_one_that_is_always_fastest_is_alone() -> None:
    assert best_row(curves(slow=(20e-6, 1e-9), fast=(10e-6, 1e-9))) == ((None, "fast"),)


def test_an_algorithm_without_a_time_at_a_size() -> None:
    timings = [Timing(1024, {"a": 1.0, "b": 3.0}), Timing(4096, {"b": 5.0})]
    assert best_row(timings) == ((1024, "a"), (None, "b"))


def test_small_differences_make_no_entries() -> None:
    timings = [Timing(n, {"a": 1.0 + 0.03 * (k % 2), "b": 1.0 + 0.03 * (k % 3)}) for k, n in enumerate(SIZES)]
    assert len(best_row(timings)) == 1


def test_one_disturbed_size_makes_no_entries() -> None:
    timings = curves(small=(10e-6, 1e-9), large=(30e-6, 0.25e-9))
    undisturbed = best_row(timings)
    timings[2].seconds["small"] *= 2.02
    assert best_row(timings)[-2:] == undisturbed[-2:]
    timings[2].seconds["small"] /= 1.01
    timings[12].seconds["large"] *= 2.0
    assert best_row(timings)[-1] == undisturbed[-1]


@pytest.mark.one_rank
@given(st.lists(st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=3), min_size=1, max_size=len(SIZES)))
def test_any_timings_make_a_right_table(times: list[list[float]]) -> None:
    for place in HOST_PLACES:
        names = ("mpi", "hierarchical", "reduce_broadcast")
        timings = [Timing(n, dict(zip(names, at, strict=True))) for n, at in zip(SIZES, times, strict=False)]
        check_table(SHIPPED._replace(**{place: best_row(timings)}))


@pytest.mark.one_rank
@given(st.lists(st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=2), min_size=1, max_size=7))
def test_no_other_row_is_better(times: list[list[float]]) -> None:
    """Compared with every row that changes at measured sizes only."""
    timings = [Timing(n, {"a": a, "b": b}) for n, (a, b) in zip(SIZES, times, strict=False)]

    def cost(names: str) -> float:
        changes = sum(one != other for one, other in pairwise(names))
        lost = sum(np.log(t.seconds[name] / min(t.seconds.values())) for t, name in zip(timings, names, strict=True))
        return lost + tuning._LEAST_GAIN * changes

    every = [format(k, f"0{len(timings)}b").replace("0", "a").replace("1", "b") for k in range(2 ** len(timings))]
    row: Row = best_row(timings)
    assert cost("".join(look_up(row, t.nbytes) for t in timings)) == pytest.approx(min(map(cost, every)))


def test_candidates_are_algorithms() -> None:
    assert {name for place in (*HOST_PLACES, *GPU_PLACES) for name in candidates_at(place)} <= {
        *host_names(),
        *gpu_names(),
    }
    assert candidates_at("several_nodes") == ("mpi", "hierarchical", "leaders")


# Measuring ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SIZES", (1 << 10, 1 << 16))
    monkeypatch.setattr(tuning, "_CALLS_IN_GROUP", 2)


@pytest.mark.min_ranks(2)
@pytest.mark.usefixtures("few_sizes")
def test_tuning_measures_every_candidate_and_says_how_far_it_is(comm: Communicator) -> None:
    told: list[str] = []
    tuned = tuning.run(None, 0.05, told.append)
    node = comm._channel.node
    assert tuned.place == place_of(node)
    assert tuned.setup == setup_of(node)
    assert [timing.nbytes for timing in tuned.timings] == [1 << 10, 1 << 16]
    for timing in tuned.timings:
        assert set(timing.seconds) == set(candidates_at(tuned.place))
        assert all(0 < seconds < 10 for seconds in timing.seconds.values())
    check_table(tuned.table)
    assert comm.all_gather_object(tuned) == [tuned] * comm.size
    if comm.rank:
        assert told == []
    else:
        first = told.index("first look at 1 KiB")
        assert told[:first] == ([] if node.is_alone else ["messages between nodes"])
        assert told[first + 2].startswith("round 1, ")


@pytest.mark.min_ranks(2)
@pytest.mark.usefixtures("few_sizes")
@pytest.mark.parametrize("by", ["argument", "setting"])
def test_the_table_is_kept_in_the_file_of_rank_0_and_taken_from_there(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comm: Communicator
) -> None:
    path = tmp_path / "tuning.json"
    setup = setup_of(comm._channel.node)
    merge(path, ELSEWHERE, SHIPPED)
    if by == "setting":
        monkeypatch.setenv(SETTING, str(path))
    table = mpidist.tune(path if by == "argument" else None, seconds=0.05)
    assert comm.all_gather_object(table) == [table] * comm.size
    assert read(path) == ({ELSEWHERE: SHIPPED, setup: table} if comm.rank == 0 else {ELSEWHERE: SHIPPED})
    monkeypatch.setenv(SETTING, str(path))
    with Communicator() as tuned:
        assert tuned._engine.table == table


@pytest.mark.min_ranks(2)
@pytest.mark.usefixtures("few_sizes")
def test_rows_of_other_places_stay_as_they_are_in_the_file(tmp_path: Path, comm: Communicator) -> None:
    setup, place = setup_of(comm._channel.node), place_of(comm._channel.node)
    rows = [((77, "mpi"), (None, "reduce_broadcast"))] * 2
    network = SHIPPED.between_nodes._replace(latency=1.0)
    before = Table(*rows, network, *[((77, "nccl"), (None, "staged"))] * 2)
    merge(tmp_path / "t", setup, before)
    table = mpidist.tune(tmp_path / "t", seconds=0.05)
    measured = {place, "between_nodes"} if place == "several_nodes" else {place}
    for row in Table._fields:
        assert (getattr(table, row) == getattr(before, row)) == (row not in measured)


@pytest.mark.min_ranks(2)
@pytest.mark.usefixtures("few_sizes")
def test_a_candidate_that_does_not_work_is_left_out(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    if not comm._channel.node.is_alone:
        pytest.skip("hierarchical is a candidate on one node")

    def make(site: object) -> None:
        raise AlgorithmError("no room")

    entry = host_algorithms.get("hierarchical")
    assert entry is not None
    monkeypatch.setitem(host_algorithms, "hierarchical", replace(entry, make=make))
    tuned = tuning.run(None, 0.05)
    assert all("hierarchical" not in timing.seconds for timing in tuned.timings)
    assert "hierarchical" not in dict(getattr(tuned.table, tuned.place)).values()


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("wrong", ["content", "folder"])
def test_a_file_that_cannot_be_kept_is_an_error_on_all_ranks_before_anything_is_measured(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comm: Communicator
) -> None:
    path = tmp_path / "t" if wrong == "content" else tmp_path / "missing" / "t"
    if wrong == "content" and comm.rank == 0:
        path.write_text("{}")
    monkeypatch.setattr(tuning, "_Measuring", None)
    with pytest.raises(ValueError, match='no list "tables"' if wrong == "content" else "may write") as caught:
        mpidist.tune(path)
    assert comm.all_gather_object(str(caught.value)) == [str(caught.value)] * comm.size


@pytest.mark.min_ranks(2)
@pytest.mark.usefixtures("few_sizes")
def test_a_file_that_is_spoilt_meanwhile_is_an_error_on_all_ranks(tmp_path: Path, comm: Communicator) -> None:
    def spoil(_: str) -> None:
        (tmp_path / "t").write_text("{}")

    with pytest.raises(ValueError, match='no list "tables"'):
        tuning.run(tmp_path / "t", 0.05, spoil)


@pytest.mark.min_ranks(2)
def test_large_sizes_are_left_out_where_time_is_short(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_LARGEST_ALWAYS_MEASURED", 2 << 10)
    tuned = tuning.run(None, 1e-6)
    assert [timing.nbytes for timing in tuned.timings] == [1 << 10, 2 << 10]


def test_one_rank_alone_has_nothing_to_compare(comm: Communicator, caplog: pytest.LogCaptureFixture) -> None:
    if comm.size > 1:
        pytest.skip("there are several ranks")
    assert mpidist.tune("/nowhere/tuning.json") == SHIPPED
    assert "measured nothing" in caplog.text


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds is .* a number above 0"):
        mpidist.tune(seconds=seconds)


@pytest.mark.min_ranks(2)
@pytest.mark.usefixtures("few_sizes")
@pytest.mark.parametrize("fake_gpus", [{"devices": 6}], indirect=True)
def test_tuning_for_arrays_on_gpus(fake_gpus: Any, comm: Communicator) -> None:
    place = place_of(comm._channel.node, "gpu")
    tuned = tuning.run(None, 0.05, device=f"gpu:{comm.rank}")
    assert tuned.place == place
    assert set(tuned.timings[0].seconds) == set(algorithms_at(place))
    for row in Table._fields:
        measured = (place,) if place == "one_node_gpu" else (place, "between_nodes")
        assert row in measured or getattr(tuned.table, row) == getattr(SHIPPED, row)
    with fake_gpus.cuda.Device(comm.rank), Communicator(table=tuned.table) as communicator:
        assert communicator.all_reduce("SUM", fake_gpus.ones(3)).get().tolist() == [comm.size] * 3


def test_tuning_for_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    find_cupy.cache_clear()
    try:
        with pytest.raises(DeviceError, match="need CuPy, which is not installed"):
            mpidist.tune(device="gpu")
    finally:
        find_cupy.cache_clear()
