"""Slurm's compressed lists of hosts and of tasks per node."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.topology.slurm_lists import expand_hostlist, expand_tasks_per_node

pytestmark = pytest.mark.one_rank


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-2],m5,o[3-4,6,7-9]", ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[098-101,7]", ["n098", "n099", "n100", "n101", "n7"]),
        ("n[1-10]", [f"n{number}" for number in range(1, 11)]),
        ("r[0-1]c[2-3]", ["r0c2", "r0c3", "r1c2", "r1c3"]),
        ("gpu-a[1-2]-ib.site,login", ["gpu-a1-ib.site", "gpu-a2-ib.site", "login"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("", "''"),
        ("n[1-2", "[1-2"),
        ("n1-2]", "]"),
        ("n[1-[2-3]]", "[1-[2-3]]"),
        ("n[]", "[]"),
        ("n[1-]", "'1-'"),
        ("n[a-b]", "'a-b'"),
        ("n[1,,2]", "'1,,2'|''"),
        ("n[3-1]", "'3-1'"),
        ("n1,,n2", ",n2"),
        ("n1,", "the end"),
        (",n1", ",n1"),
        ("n1 n2", " n2"),
        ("n[1-999999999999]", "1-999999999999"),
        ("n[0-999][0-999]", r"n\[0-999\]\[0-999\]"),
        ("n[1\u0662]", "\u0662"),
        ("(null)", "'(null)'"),
        ("n[1-2],(null)", "'(null)'"),
    ],
)
def test_bad_lists_of_hosts_are_quoted(text: str, quoted: str) -> None:
    with pytest.raises(ValueError, match="list of hosts") as caught:
        expand_hostlist(text)
    assert repr(text) in str(caught.value)
    assert any(part.replace("\\", "") in str(caught.value) for part in quoted.split("|"))


@pytest.mark.parametrize(
    "text",
    [
        ",".join(f"n{number}" for number in range(70_000)),
        ",".join(f"rack{number}n[0-999]" for number in range(1200)),
        "n[" + ",".join(["0-65535"] * 1000) + "]",
        "n" + "[0-65535]" * 1000,
        "n[0-999999999999999999]",
    ],
    ids=["names", "parts", "items", "brackets", "range"],
)
def test_lists_of_too_many_hosts_end_early_with_a_short_text(text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"the list of hosts .* has more than 65536 of them") as caught:
            expand_hostlist(text)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", ["1(x70000)", ",".join(["1(x60000)"] * 1000), "999999999(x9)"])
def test_lists_of_too_many_tasks_end_early(text: str) -> None:
    with pytest.raises(ValueError, match="has more than 65536 nodes or 4194304 tasks") as caught:
        expand_tasks_per_node(text)
    assert len(str(caught.value)) < 1000


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 40), st.integers(1, 4)), min_size=1, max_size=4))
def test_a_range_has_its_numbers_with_the_padding_of_its_start(ranges: list[tuple[int, int, int]]) -> None:
    text = ",".join(f"n[{low:0{width}d}-{low + more}]" for low, more, width in ranges)
    expected = [
        f"n{number:0{max(width, len(str(low)))}d}"
        for low, more, width in ranges
        for number in range(low, low + more + 1)
    ]
    assert expand_hostlist(text) == expected


@pytest.mark.parametrize(
    ("text", "tasks"), [("3(x2),2,1", [3, 3, 2, 1]), ("4", [4]), ("2(x2)", [2, 2]), ("1,2(x1)", [1, 2])]
)
def test_tasks_per_node(text: str, tasks: list[int]) -> None:
    assert expand_tasks_per_node(text) == tasks


@pytest.mark.parametrize("text", ["", "2(x)", "2(x0)", "x2", "2,,1", "2(x2", "-1", "2 (x2)", "2(x99999999)"])
def test_bad_tasks_per_node_are_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="list of tasks per node") as caught:
        expand_tasks_per_node(text)
    assert repr(text) in str(caught.value)
