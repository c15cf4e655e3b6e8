"""Tables of algorithms: JSON, validation and text."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.collectives.reduce.cost_model import Network
from mpidist.collectives.reduce.registry import (
    GPU_PLACES,
    HOST_PLACES,
    SHIPPED,
    Row,
    Table,
    algorithms_at,
    check_table,
    gpu_algorithms,
    host_algorithms,
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


PLACES = (*HOST_PLACES, *GPU_PLACES)
networks = st.builds(Network, **dict.fromkeys(Network._fields, st.floats(1e-12, 1e12)))
tables = st.builds(Table, between_nodes=networks, **{place: rows(place) for place in PLACES})


@given(tables)
def test_json_and_back(table: Table) -> None:
    check_table(table)
    assert table_from_json(json.loads(json.dumps(table_to_json(table))), "here") == table


def test_the_shipped_table_is_valid() -> None:
    check_table(SHIPPED)
    assert {*PLACES, "between_nodes"} == set(Table._fields)
    assert algorithms_at("between_nodes") == ("halving_doubling", "pairwise", "ring")
    assert algorithms_at("one_node") == ("hierarchical", "mpi", "reduce_broadcast")
    assert algorithms_at("several_nodes") == ("hierarchical", "leaders", "mpi", "reduce_broadcast")
    assert algorithms_at("one_node_gpu") == ("nccl", "staged")
    assert algorithms_at("several_nodes_gpu") == ("hierarchical", "nccl", "staged")


def test_a_name_is_registered_once() -> None:
    for registry in (host_algorithms, gpu_algorithms):
        entry = registry.get(registry.names[0])
        assert entry is not None
        with pytest.raises(ValueError, match="exists already. Use a new name"):
            registry.register(entry)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([[None, "fastest"]], 'Replace "fastest" by one of the algorithms .*mpi'),
        ([[None, ["mpi"]]], r'Replace \["mpi"\] by one of the algorithms'),
        ([[10, "mpi"]], "null, which matches any size, as the last size"),
        ([[20, "mpi"], [10, "hierarchical"], [None, "mpi"]], "rising sizes in bytes"),
        ([[0, "mpi"], [None, "mpi"]], "rising sizes in bytes"),
        ([[True, "mpi"], [None, "mpi"]], "rising sizes in bytes"),
        ([[1.5, "mpi"], [None, "mpi"]], "rising sizes in bytes"),
        ([], "pairs of a largest size and an algorithm"),
        ("mpi", "pairs of a largest size and an algorithm"),
        ([["mpi"]], "pairs of a largest size and an algorithm"),
    ],
)
def test_a_wrong_row(row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^tuning\.json, table 1: several_nodes is .*{message}"):
        table_from_json({**table_to_json(SHIPPED), "several_nodes": row}, "tuning.json, table 1")


@pytest.mark.parametrize(
    "costs",
    [
        [[None, "ring"]],
        {},
        {**SHIPPED.between_nodes._asdict(), "gap": 1.0},
        *({**SHIPPED.between_nodes._asdict(), "latency": wrong} for wrong in (0.0, -1.0, "1", None, True, math.inf)),
    ],
)
def test_wrong_costs_between_nodes(costs: Any) -> None:
    with pytest.raises(ValueError, match=r"^here: between_nodes is .*must have latency, overhead, .* above 0$"):
        table_from_json({**table_to_json(SHIPPED), "between_nodes": costs}, "here")


def test_a_row_that_is_missing_and_one_too_many() -> None:
    few = table_to_json(SHIPPED)
    del few["one_node"]
    expected = f". The rows must be {', '.join(Table._fields)}$"
    left = ", ".join(sorted(set(Table._fields) - {"one_node"}))
    with pytest.raises(ValueError, match=f"^here has {left}{expected}"):
        table_from_json(few, "here")
    with pytest.raises(ValueError, match=f"has .*, two_nodes{expected}"):
        table_from_json({**table_to_json(SHIPPED), "two_nodes": []}, "here")
    with pytest.raises(ValueError, match=r"has \[\]. The rows must be one_node, several_nodes"):
        table_from_json([], "here")


def test_a_table_made_by_hand_is_checked() -> None:
    check_table(None)
    with pytest.raises(TypeError, match="table is 'ring'. Pass None or the result of mpidist.tune"):
        check_table("ring")
    with pytest.raises(ValueError, match="table: one_node is .*one of the algorithms"):
        check_table(SHIPPED._replace(one_node=((None, "ring"),)))


def test_text() -> None:
    assert row_text(SHIPPED.several_nodes) == "up to 64 KiB leaders, above hierarchical"
    network = SHIPPED.between_nodes._replace(latency=3e-6, overhead=1e-6, bandwidth=12.5e9)
    text = table_text(SHIPPED._replace(between_nodes=network), "several_nodes")
    assert text.endswith("; between nodes 4 us a message, 1.25e+04 MB/s a node")
