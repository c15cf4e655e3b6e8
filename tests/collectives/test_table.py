"""Tables of algorithms: their JSON and back, what is refused, and how they read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.collectives.reduce.registry import (
    GPU_PLACES,
    HOST_PLACES,
    Row,
    algorithms_at,
    gpu_algorithms,
    host_algorithms,
)
from mpidist.collectives.reduce.table import (
    SHIPPED,
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
    names = st.sampled_from(algorithms_at(place))
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
    assert {*HOST_PLACES, *GPU_PLACES, "between_nodes"} == set(Table._fields)
    assert algorithms_at("between_nodes") == ("halving_doubling", "pairwise", "ring")
    assert algorithms_at("one_node") == ("hierarchical", "mpi", "reduce_broadcast")
    assert algorithms_at("several_nodes") == ("hierarchical", "leaders", "mpi", "reduce_broadcast")
    assert algorithms_at("one_node_gpu") == ("nccl", "staged")
    assert algorithms_at("several_nodes_gpu") == ("hierarchical", "nccl", "staged")


def test_a_name_is_registered_once() -> None:
    for registry in (host_algorithms, gpu_algorithms):
        entry = registry.get(registry.names[0])
        assert entry is not None
        with pytest.raises(ValueError, match="expected a new name"):
            registry.register(entry)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([[None, "fastest"]], 'algorithms out of .*mpi.*, not "fastest"'),
        ([[None, "staged"]], 'algorithms out of .*, not "staged"'),
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
    with pytest.raises(ValueError, match=r"has \[\]; expected one_node, several_nodes"):
        table_from_json([], "here")


def test_a_table_made_by_hand_is_checked() -> None:
    check_table(None)
    with pytest.raises(TypeError, match="table is 'ring'; expected None, or what mpidist.tune"):
        check_table("ring")
    with pytest.raises(ValueError, match="table: one_node is .*algorithms out of"):
        check_table(SHIPPED._replace(one_node=((None, "ring"),)))


def test_text() -> None:
    assert row_text(SHIPPED.several_nodes) == "up to 64 KiB leaders, above hierarchical"
    assert row_text(((None, "mpi"),)) == "mpi at any size"
    assert table_text(SHIPPED, "one_node") == "hierarchical at any size"
    between = "between nodes, slices: up to 64 KiB halving_doubling, above ring"
    assert table_text(SHIPPED, "several_nodes") == f"up to 64 KiB leaders, above hierarchical; {between}"
