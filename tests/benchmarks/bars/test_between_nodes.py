"""The bars between nodes, and what is known about the wire; these need no lab."""

from __future__ import annotations

import pytest

from benchmarks.bars.between_nodes import SIZE, verdicts
from benchmarks.measuring.rows import Figure, Row
from benchmarks.measuring.wire import Sent, bits_per_second, floor_seconds
from benchmarks.suite.cluster_jobs import NODES, jobs
from tests.benchmarks.support import row

pytestmark = pytest.mark.one_rank

MIB = 1 << 20
FLOOR_US = floor_seconds(NODES, SIZE, 1e9) * 1e6


def judge(rows: list[Row], figures: list[Figure] | None = None, rate: float | None = 1e9) -> dict[str, bool]:
    return {verdict.what: verdict.met for verdict in verdicts(rows, figures or [], NODES, rate)}


def all_reduce(by: str, variant: str, median: float) -> Row:
    return row("all_reduce", by, variant, SIZE, median, algorithm="some")


@pytest.mark.parametrize("placement", ["block", "round-robin", "uneven"])
def test_the_floor(placement: str) -> None:
    name = f"64 MiB, {placement}: time of the floor"
    assert judge([all_reduce("mpidist", placement, 1.07 * FLOOR_US)]) == {name: True}
    assert judge([all_reduce("mpidist", placement, 1.09 * FLOOR_US)]) == {name: False}
    assert judge([all_reduce("mpidist", placement, FLOOR_US)], rate=None) == {}


def test_bytes_sent() -> None:
    for mib, met in ((96.0, True), (99.0, False)):
        figure = Figure("sent", "mpidist, block, 64 MiB, most by a node", mib, "MiB", "some")
        assert judge([], [figure]) == {"64 MiB, block: data sent by a node, of the least possible": met}


@pytest.mark.parametrize(("placement", "bar"), [("block", 2.5), ("round-robin", 2.5), ("block, HAN off", 1.35)])
def test_as_fast_as_mpi(placement: str, bar: float) -> None:
    for times, met in ((bar + 0.01, True), (bar - 0.01, False)):
        rows = [all_reduce("mpi", placement, times * 1e6), all_reduce("mpidist", placement, 1e6)]
        assert judge(rows, rate=None) == {f"64 MiB, {placement}: as fast as MPI": met}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_the_wire(dtype: str) -> None:
    for share, met in ((0.59, True), (0.61, False)):
        half = all_reduce("mpidist", f"block, wire_dtype={dtype}", share * 1e6)
        found = judge([all_reduce("mpidist", "block", 1e6), half], rate=None)
        assert found == {f"64 MiB, block, {dtype} on the wire: time of float32": met}


def test_overlap_counts_where_the_products_take_longer() -> None:
    figure = Figure("overlap", "2x1, share of communication hidden", 0.91, "", "some")
    for computation, expected in ((101.0, [True]), (99.0, [])):
        rows = [
            row("overlap", "mpidist", "2x1, communication", SIZE, 100.0),
            row("overlap", "alone", "2x1, computation", SIZE, computation),
        ]
        assert [verdict.met for verdict in verdicts(rows, [figure], 2, 1e9)] == expected


def test_headers_are_taken_off_per_packet() -> None:
    before = Sent(1000, 10)
    # Two frames full of data and an acknowledgement.
    assert Sent(1000 + 2 * 1514 + 66, 13).data_since(before) == 2 * 1448


def test_rates() -> None:
    assert [bits_per_second(text) for text in ("200mbit", "1.5gbit", "64kbit")] == [2e8, 1.5e9, 64e3]
    with pytest.raises(ValueError, match=r"rate is '1g'; expected .* such as 1gbit"):
        bits_per_second("1g")


def test_sizes_beside_the_bars_are_a_job_of_their_own() -> None:
    assert [job.placement for job in jobs("", "")] == ["block", "block, HAN off", "round-robin", "uneven", "2x1"]
    (*_, last) = jobs("4K,1M", "mpi,ring")
    assert last.measures[:4] == ("--sizes", "4K,1M", "--algorithms", "mpi,ring")
