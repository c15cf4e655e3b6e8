"""Nested structures: lists, tuples, named tuples, dicts and attrs classes, with anything else as leaves.

Other classes, such as JAX's, become structures by :func:`register`. Dict entries are visited in the order of their
sorted keys, so that ranks agree even if they built the same dict in another order. A rebuilt structure has the type and
the key order of its model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeGuard, TypeVar, cast

Structure = TypeVar("Structure")

LEAF = "*"
"""The text of a leaf in the description of a structure."""
_FLAT = re.compile(r"\[[*, ]*\]|\([*, ]*\)")


class NestKind(NamedTuple):
    """A kind of structures."""

    # Whether the values of a type are of this kind.
    covers: Callable[[type], bool]
    # Pairs of key and child of one level, in visiting order. A key may be a path, as in ``a/0/b``.
    children: Callable[[Any], list[tuple[object, Any]]]
    # A structure like a given one, with other children.
    rebuild: Callable[[Any, list[Any]], Any]


def _keys(mapping: dict[Any, object]) -> list[Any]:
    try:
        return sorted(mapping)
    except TypeError:
        return sorted(mapping, key=lambda key: (type(key).__name__, repr(key)))


def _rebuilt_dict(like: dict[Any, Any], children: list[Any]) -> Any:
    by_key = dict(zip(_keys(like), children, strict=True))
    if type(like) is dict:
        return {key: by_key[key] for key in like}
    # A copy keeps other state of a subclass, such as the factory of a defaultdict.
    rebuilt = copy.copy(like)
    rebuilt.update(by_key)
    return rebuilt


def _rebuilt_tuple(like: Any, children: list[Any]) -> Any:
    # A subclass without field names may accept one type of items only, such as torch.Size.
    return type(like)(*children) if hasattr(like, "_fields") else tuple(children)


def _rebuilt_attrs(like: Any, children: list[Any]) -> Any:
    rebuilt = copy.copy(like)
    for attribute, child in zip(type(like).__attrs_attrs__, children, strict=True):
        object.__setattr__(rebuilt, attribute.name, child)
    return rebuilt


def _numbered(nest: Iterable[object]) -> list[tuple[object, object]]:
    return list(enumerate(nest))


_BUILT_IN = (
    NestKind(lambda of: issubclass(of, dict), lambda nest: [(key, nest[key]) for key in _keys(nest)], _rebuilt_dict),
    NestKind(lambda of: issubclass(of, tuple), _numbered, _rebuilt_tuple),
    NestKind(lambda of: issubclass(of, list), _numbered, lambda like, children: type(like)(children)),
    NestKind(
        lambda of: hasattr(of, "__attrs_attrs__"),
        lambda nest: [(a.name, getattr(nest, a.name)) for a in type(nest).__attrs_attrs__],
        _rebuilt_attrs,
    ),
)
_KINDS = [*_BUILT_IN]


class _KindOfType(dict[type, NestKind | None]):
    """A cache of the kinds of types, None for leaves. Every leaf of every step looks its type up."""

    def __missing__(self, of: type) -> NestKind | None:
        self[of] = found = next((kind for kind in _KINDS if kind.covers(of)), None)
        return found


_kind_of_type = _KindOfType()


def register(kind: NestKind) -> None:
    """Register a further kind of structures, in this process."""
    _KINDS.append(kind)
    _kind_of_type.clear()


def registered_kind(value: object) -> NestKind | None:
    """Return the registered kind of a structure. None for any other value."""
    kind = _kind_of_type[type(value)]
    return None if kind in _BUILT_IN else kind


def is_nest(value: object) -> bool:
    """Return whether ``value`` is a structure, not a leaf."""
    return _kind_of_type[type(value)] is not None


def flatten(nest: object) -> list[Any]:
    """Return the leaves of ``nest`` in visiting order. For a leaf, a list of itself.

    >>> flatten({"b": [1, 2], "a": (3,)})
    [3, 1, 2]
    """
    kind = _kind_of_type[type(nest)]
    if kind is None:
        return [nest]
    if _is_flat_list(nest):
        return list(nest)
    return [leaf for _, child in kind.children(nest) for leaf in flatten(child)]


def _is_flat_list(nest: object) -> TypeGuard[list[object]]:
    """Return whether it is a list of leaves, like most nests. Checks each type once, because lists may be long."""
    return type(nest) is list and not any([_kind_of_type[of] for of in {*map(type, nest)}])


def flatten_with_path(nest: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(path, leaf)`` in visiting order. Paths look like ``"['a'][0]"``, and are empty for a lone leaf."""
    kind = _kind_of_type[type(nest)]
    if kind is None:
        yield path, nest
        return
    for key, child in kind.children(nest):
        yield from flatten_with_path(child, f"{path}[{key!r}]")


def pack_like(structure: Structure, leaves: Iterable[object]) -> Structure:
    """Return ``structure`` with its leaves replaced, in visiting order, by ``leaves``.

    >>> pack_like({"b": [0, 0], "a": (0,)}, "xyz")
    {'b': ['y', 'z'], 'a': ('x',)}
    """
    leaves = list(leaves)
    count = len(flatten(structure))
    if len(leaves) != count:
        raise ValueError(f"{len(leaves)} leaves for a structure of {count}")
    supply = iter(leaves)

    def build(like: object) -> object:
        kind = _kind_of_type[type(like)]
        if kind is None:
            return next(supply)
        return kind.rebuild(like, [build(child) for _, child in kind.children(like)])

    return cast("Structure", build(structure))


def assert_same_structure(first: object, second: object, path: str = "") -> None:
    """Raise ValueError unless both have the same types, lengths and keys, leaf against leaf."""
    where = f" at {path}" if path else ""
    kind = _kind_of_type[type(first)]
    if is_nest(first) != is_nest(second) or (kind is not None and type(first) is not type(second)):
        raise ValueError(
            f"structures differ{where}: {type(first).__name__} against {type(second).__name__}; "
            "expected the same nest everywhere"
        )
    if kind is None or (_is_flat_list(first) and _is_flat_list(second) and len(first) == len(second)):
        return
    ones, others = kind.children(first), kind.children(second)
    if [key for key, _ in ones] != [key for key, _ in others]:
        raise ValueError(
            f"structures differ{where}: {[key for key, _ in ones]} against {[key for key, _ in others]}; "
            "expected the same keys or lengths everywhere"
        )
    for (key, one), (_, other) in zip(ones, others, strict=True):
        assert_same_structure(one, other, f"{path}[{key!r}]")


def map_structure(fn: Callable[..., object], *nests: object) -> Any:
    """Apply ``fn`` to corresponding leaves of ``nests``, and return a structure like the first.

    >>> map_structure(lambda x, y: x + y, {"a": 1, "b": (2,)}, {"a": 10, "b": (20,)})
    {'a': 11, 'b': (22,)}
    """
    first = nests[0]
    for other in nests[1:]:
        assert_same_structure(first, other)

    def build(*parts: object) -> object:
        kind = _kind_of_type[type(parts[0])]
        if kind is None:
            return fn(*parts)
        columns = zip(*(kind.children(part) for part in parts), strict=True)
        return kind.rebuild(parts[0], [build(*(child for _, child in column)) for column in columns])

    return build(*nests)


def flat_kind(structure: str) -> int | None:
    """Return 0 for one array, 1 for a list, 2 for a tuple, else None.

    >>> flat_kind("*"), flat_kind("[*, *]"), flat_kind("(*)"), flat_kind("[*, (*)]")
    (0, 1, 2, None)
    """
    if structure in ("", LEAF):
        return 0
    return {"[": 1, "(": 2}[structure[0]] if _FLAT.fullmatch(structure) else None


def describe(nest: object) -> str:
    """Return the structure as text, with leaves as ``*``, for ranks to compare.

    >>> describe({"a": [1, 2], "b": 3})
    "{'a': [*, *], 'b': *}"
    """
    kind = _kind_of_type[type(nest)]
    if kind is None:
        return LEAF
    children = kind.children(nest)
    if isinstance(nest, dict):
        return "{" + ", ".join(f"{key!r}: {describe(child)}" for key, child in children) + "}"
    if kind not in _BUILT_IN:
        # Structures of one registered type may have different keys.
        inside = ", ".join(f"{key}: {describe(child)}" for key, child in children)
        return f"{type(nest).__name__}({inside})"
    inner = ", ".join(describe(child) for _, child in children)
    if isinstance(nest, list):
        return f"[{inner}]"
    return f"({inner})" if type(nest) is tuple else f"{type(nest).__name__}({inner})"
