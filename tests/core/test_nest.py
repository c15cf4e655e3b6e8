"""Nested structures."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.core import nest

pytestmark = pytest.mark.one_rank

Point = namedtuple("Point", "x y")
NESTS: Any = st.recursive(
    st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.builds(Point, inner, inner)
    ),
)


@given(NESTS)
def test_pack_like_inverts_flatten(structure: Any) -> None:
    rebuilt = nest.pack_like(structure, nest.flatten(structure))
    assert rebuilt == structure
    assert type(rebuilt) is type(structure)
    assert [leaf for _, leaf in nest.flatten_with_path(structure)] == nest.flatten(structure)


@given(NESTS)
def test_map_visits_every_leaf(structure: Any) -> None:
    doubled = nest.map_structure(lambda x: 2 * x, structure)
    assert nest.flatten(doubled) == [2 * x for x in nest.flatten(structure)]


def test_dicts_are_sorted_and_keep_their_order() -> None:
    one, other = {"b": 1, "a": 2}, {"a": 2, "b": 1}
    assert nest.flatten(one) == nest.flatten(other) == [2, 1]
    assert list(nest.map_structure(str, one)) == ["b", "a"]
    assert nest.describe(one) == nest.describe(other)
    assert isinstance(nest.map_structure(str, OrderedDict(one)), OrderedDict)
    assert nest.flatten({1: "one", "a": "letter"}) == ["one", "letter"]


def test_named_tuples_keep_their_type() -> None:
    assert nest.map_structure(lambda a, b: a + b, Point(1, [2]), Point(10, [20])) == Point(11, [22])


def test_tuples_of_one_item_type_become_plain() -> None:
    class Sizes(tuple):  # like torch.Size
        def __new__(cls, items: Any) -> Any:
            items = list(items)
            if not all(isinstance(item, int) for item in items):
                raise TypeError("expected sizes")
            return super().__new__(cls, items)

    assert nest.map_structure(str, Sizes([2, 3])) == ("2", "3")


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([1], (1,), "list against tuple"),
        ([1, 2], [1], "keys or lengths"),
        ({"a": 1}, {"b": 1}, r"\['a'\] against \['b'\]"),
        ({"a": [1]}, {"a": 1}, r"at \['a'\]: list against int"),
        (Point(1, 2), (1, 2), "Point against tuple"),
    ],
)
def test_different_structures_raise(first: Any, second: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nest.map_structure(lambda a, b: a, first, second)


def test_wrong_number_of_leaves_raises() -> None:
    with pytest.raises(ValueError, match="3 leaves for a structure of 2"):
        nest.pack_like([0, 0], [1, 2, 3])


def test_paths_name_the_leaves() -> None:
    assert dict(nest.flatten_with_path({"a": [1, {"b": 2}]})) == {"['a'][0]": 1, "['a'][1]['b']": 2}
    assert nest.describe(Point(1, [2, (3,)])) == "Point(*, [*, (*)])"


def test_registered_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pair:
        def __init__(self, left: Any, right: Any) -> None:
            self.parts = [left, right]

    assert nest.flatten([Pair(1, 2)])[0].parts == [1, 2]
    monkeypatch.setattr(nest, "_KINDS", [*nest._KINDS])
    kind = nest.NestKind(
        lambda of: of is Pair,
        lambda pair: list(zip(("left", "right"), pair.parts, strict=True)),
        lambda _, parts: Pair(*parts),
    )
    nest.register(kind)
    pair = Pair({"b": 1, "a": 2}, [3])
    assert nest.registered_kind(pair) is kind
    assert nest.registered_kind([pair]) is nest.registered_kind(1) is None
    assert nest.flatten([pair, 4]) == [2, 1, 3, 4]
    assert nest.map_structure(lambda x: 2 * x, (pair,))[0].parts == [{"b": 2, "a": 4}, [6]]
    assert nest.pack_like(pair, "xyz").parts == [{"b": "y", "a": "x"}, ["z"]]
    assert [path for path, _ in nest.flatten_with_path(pair)] == ["['left']['a']", "['left']['b']", "['right'][0]"]
    assert nest.describe(pair) == "Pair(left: {'a': *, 'b': *}, right: [*])"
    with pytest.raises(ValueError, match="structures differ: Pair against list"):
        nest.assert_same_structure(pair, [1])
