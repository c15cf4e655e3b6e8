"""Tables of algorithms: their JSON and back, what is refused, and how they read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.collectives.reduce.algorithms import DEVICE_NAMES, NAMES, wires
from mpidist.collectives.reduce.table import (
    ALGORITHMS,
    SHIPPED,
    Row,
    Table,
    check_table,
    look_up,
    row_text,
    table_from_json,
    table_text,
    table_to_json,
)

pytestmark = pytest.mark.one_rank


def rows(place: str) -> st.SearchStrategy[Row]:
    """Any row that is right at a place."""
    names = st.sampled_from(ALGORITHMS[place])
    limits = st.lists(st.integers(1, 1 << 40), unique=True, max_size=4).map(sorted)
    entries = limits.flatmap(lambda found: st.tuples(*(st.tuples(st.just(limit), names) for limit in found)))
    return st.builds(lambda first, last: (*first, (None, last)), entries, names)


tables = st.builds(Table, **{place: rows(place) for place in Table._fields})


@given(tables)
def test_json_and_back(table: Table) -> None:
    check_table(table)
    assert table_from_json(json.loads(json.dumps(table_to_json(table))), "here") == table


@given(rows("one_node"), st.integers(1, 1 << 41))
def test_looking_up(row: Row, nbytes: int) -> None:
    fitting = [name for limit, name in row if limit is None or nbytes <= limit]
    assert look_up(row, nbytes) == fitting[0]


def test_the_shipped_table_is_right_and_every_place_names_algorithms_that_exist() -> None:
    check_table(SHIPPED)
    assert set(ALGORITHMS) == set(Table._fields)
    assert set(ALGORITHMS["between_nodes"]) == set(wires.NAMES)
    for place in ("one_node_readable", "one_node", "several_nodes"):
        assert set(ALGORITHMS[place]) <= set(NAMES) - set(wires.NAMES)
    for place in ("one_node_gpu", "several_nodes_gpu"):
        assert set(ALGORITHMS[place]) <= {*DEVICE_NAMES, "hierarchical"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([[None, "fastest"]], 'algorithms out of .*mpi.*, not "fastest"'),
        ([[None, "gather_reduce"]], 'algorithms out of .*, not "gather_reduce"'),
        ([[None, ["mpi"]]], r'algorithms out of .*, not \["mpi"\]'),
        ([[10, "mpi"]], "null, which is any size, as the last size"),
        ([[20, "mpi"], [10, "hierarchical"], [None, "mpi"]], "sizes in bytes that rise"),
        ([[10, "mpi"], [10, "hierarchical"], [None, "mpi"]], "sizes in bytes that rise"),
        ([[0, "mpi"], [None, "mpi"]], "sizes in bytes that rise"),
        ([[True, "mpi"], [None, "mpi"]], "sizes in bytes that rise"),
        ([[1.5, "mpi"], [None, "mpi"]], "sizes in bytes that rise"),
        ([[None, "mpi"], [None, "mpi"]], "sizes in bytes that rise"),
        ([], "pairs of a largest size and an algorithm"),
        ("mpi", "pairs of a largest size and an algorithm"),
        ([["mpi"]], "pairs of a largest size and an algorithm"),
    ],
)
def test_a_wrong_row(row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^tuning\.json, table 1: several_nodes is .*; expected {message}"):
        table_from_json({**table_to_json(SHIPPED), "several_nodes": row}, "tuning.json, table 1")


def test_a_row_that_is_missing_and_one_too_many() -> None:
    few = table_to_json(SHIPPED)
    del few["one_node"]
    expected = f"; expected {', '.join(Table._fields)}$"
    left = ", ".join(sorted(set(Table._fields) - {"one_node"}))
    with pytest.raises(ValueError, match=f"^here has {left}{expected}"):
        table_from_json(few, "here")
    with pytest.raises(ValueError, match=f"has .*, two_nodes{expected}"):
        table_from_json({**table_to_json(SHIPPED), "two_nodes": []}, "here")
    with pytest.raises(ValueError, match=r"has \[\]; expected one_node_readable"):
        table_from_json([], "here")


def test_a_table_made_by_hand_is_checked() -> None:
    check_table(None)
    with pytest.raises(TypeError, match="table is 'ring'; expected None, or what mpidist.tune"):
        check_table("ring")
    with pytest.raises(ValueError, match="table: one_node is .*algorithms out of"):
        check_table(SHIPPED._replace(one_node=((None, "neighbours"),)))


def test_text() -> None:
    assert row_text(SHIPPED.one_node_readable) == "up to 256 KiB gather_reduce, up to 2 MiB window, above neighbours"
    assert row_text(((None, "mpi"),)) == "mpi at any size"
    assert table_text(SHIPPED, "one_node") == "up to 256 KiB gather_reduce, above window"
    between = "between nodes, slices: up to 64 KiB halving_doubling, above ring"
    assert table_text(SHIPPED, "several_nodes") == f"up to 128 KiB mpi, above hierarchical; {between}"
