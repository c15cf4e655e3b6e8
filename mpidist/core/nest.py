"""Nested structures: lists, tuples, named tuples, dicts and attrs classes, with anything else as leaves.

Dict entries are visited in the order of their sorted keys, so that ranks which built the same dict in another
order still agree. A rebuilt structure has the type and the key order of its model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard, TypeVar, cast

Structure = TypeVar("Structure")

# What stands for a leaf in the text of a structure.
LEAF = "*"
_FLAT = re.compile(r"\[[*, ]*\]|\([*, ]*\)")

_BRANCHES = (list, tuple, dict)


class _KindOfType(dict[type, bool]):
    """A memo of the types whose values are structures. It is asked for every leaf of every step."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = is_structure = issubclass(kind, _BRANCHES) or hasattr(kind, "__attrs_attrs__")
        return is_structure


_is_structure = _KindOfType()


def is_nest(value: object) -> bool:
    """Return whether ``value`` is a structure rather than a leaf."""
    return _is_structure[type(value)]


def _keys(mapping: dict[Any, object]) -> list[Any]:
    try:
        return sorted(mapping)
    except TypeError:
        return sorted(mapping, key=lambda key: (type(key).__name__, repr(key)))


def _children(nest: Any) -> list[tuple[object, Any]]:
    """Return ``(key, child)`` pairs of one level, in visiting order."""
    if isinstance(nest, dict):
        return [(key, nest[key]) for key in _keys(nest)]
    if isinstance(nest, (list, tuple)):
        return list(enumerate(nest))
    return [(a.name, getattr(nest, a.name)) for a in type(nest).__attrs_attrs__]


def _rebuild(like: Any, children: list[Any]) -> Any:
    """Return a structure of ``like``'s type with ``children`` given in visiting order."""
    if isinstance(like, dict):
        by_key = dict(zip(_keys(like), children, strict=True))
        if type(like) is dict:
            return {key: by_key[key] for key in like}
        # A copy keeps what a subclass knows beside its entries, as a defaultdict its factory.
        rebuilt = copy.copy(like)
        rebuilt.update(by_key)
        return rebuilt
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*children)
    if isinstance(like, tuple):
        # A subclass may be for one kind of items alone, as torch.Size is for sizes.
        return tuple(children)
    if isinstance(like, list):
        return type(like)(children)
    rebuilt = copy.copy(like)
    for attribute, child in zip(type(like).__attrs_attrs__, children, strict=True):
        object.__setattr__(rebuilt, attribute.name, child)
    return rebuilt


def flatten(nest: object) -> list[Any]:
    """Return the leaves of ``nest`` in visiting order; a leaf gives a list of itself.

    >>> flatten({"b": [1, 2], "a": (3,)})
    [3, 1, 2]
    """
    if not is_nest(nest):
        return [nest]
    if _is_flat_list(nest):
        return list(nest)
    return [leaf for _, child in _children(nest) for leaf in flatten(child)]


def _is_flat_list(nest: object) -> TypeGuard[list[object]]:
    """Return whether it is a list of leaves, as most nests are.

    It is looked at by kinds, for there may be many.
    """
    return type(nest) is list and not any([_is_structure[kind] for kind in {*map(type, nest)}])


def flatten_with_path(nest: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(path, leaf)`` in visiting order. Paths look like ``"['a'][0]"``; that of a lone leaf is empty."""
    if not is_nest(nest):
        yield path, nest
        return
    for key, child in _children(nest):
        yield from flatten_with_path(child, f"{path}[{key!r}]")


def pack_like(structure: Structure, leaves: Iterable[object]) -> Structure:
    """Return ``structure`` with its leaves replaced, in visiting order, by ``leaves``.

    Raises:
        ValueError: There are more or fewer leaves than the structure has.

    >>> pack_like({"b": [0, 0], "a": (0,)}, "xyz")
    {'b': ['y', 'z'], 'a': ('x',)}
    """
    leaves = list(leaves)
    count = len(flatten(structure))
    if len(leaves) != count:
        raise ValueError(f"{len(leaves)} leaves for a structure of {count}")
    supply = iter(leaves)

    def build(like: object) -> object:
        if not is_nest(like):
            return next(supply)
        return _rebuild(like, [build(child) for _, child in _children(like)])

    return cast("Structure", build(structure))


def assert_same_structure(first: object, second: object, path: str = "") -> None:
    """Raise ValueError unless both have the same types, lengths and keys, leaf against leaf."""
    where = f" at {path}" if path else ""
    if is_nest(first) != is_nest(second) or (is_nest(first) and type(first) is not type(second)):
        raise ValueError(
            f"structures differ{where}: {type(first).__name__} against {type(second).__name__}; "
            "expected the same nest everywhere"
        )
    if not is_nest(first) or (_is_flat_list(first) and _is_flat_list(second) and len(first) == len(second)):
        return
    ones, others = _children(first), _children(second)
    if [key for key, _ in ones] != [key for key, _ in others]:
        raise ValueError(
            f"structures differ{where}: {[key for key, _ in ones]} against {[key for key, _ in others]}; "
            "expected the same keys or lengths everywhere"
        )
    for (key, one), (_, other) in zip(ones, others, strict=True):
        assert_same_structure(one, other, f"{path}[{key!r}]")


def map_structure(fn: Callable[..., object], *nests: object) -> Any:
    """Apply ``fn`` to corresponding leaves of ``nests`` and return a structure like the first.

    Raises:
        ValueError: The structures differ.

    >>> map_structure(lambda x, y: x + y, {"a": 1, "b": (2,)}, {"a": 10, "b": (20,)})
    {'a': 11, 'b': (22,)}
    """
    first = nests[0]
    for other in nests[1:]:
        assert_same_structure(first, other)

    def build(*parts: object) -> object:
        if not is_nest(parts[0]):
            return fn(*parts)
        columns = zip(*(_children(part) for part in parts), strict=True)
        return _rebuild(parts[0], [build(*(child for _, child in column)) for column in columns])

    return build(*nests)


def flat_kind(structure: str) -> int | None:
    """Return the kind of a structure.

    0 is an array, 1 a list of arrays, 2 a tuple of arrays, None anything else.

    >>> flat_kind("*"), flat_kind("[*, *]"), flat_kind("(*)"), flat_kind("[*, (*)]")
    (0, 1, 2, None)
    """
    if structure in ("", LEAF):
        return 0
    return {"[": 1, "(": 2}[structure[0]] if _FLAT.fullmatch(structure) else None


def describe(nest: object) -> str:
    """Return the structure as text, leaves as ``*``, for ranks to compare.

    >>> describe({"a": [1, 2], "b": 3})
    "{'a': [*, *], 'b': *}"
    """
    if not is_nest(nest):
        return LEAF
    if isinstance(nest, dict):
        return "{" + ", ".join(f"{key!r}: {describe(child)}" for key, child in _children(nest)) + "}"
    inner = ", ".join(describe(child) for _, child in _children(nest))
    if isinstance(nest, list):
        return f"[{inner}]"
    return f"({inner})" if type(nest) is tuple else f"{type(nest).__name__}({inner})"
