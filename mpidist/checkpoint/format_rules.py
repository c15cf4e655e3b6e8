"""Check manifest.json, headers of safetensors files and notes against tables of rules."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpidist.core.options import VariableAggregation, VariableSynchronization

Rule = Callable[[object], bool]

# How deep a key, and the state of an iterator, may be nested: they are read and written recursively.
DEEPEST = 100
NUMPY_DTYPES = {
    np.dtype(code).name: np.dtype(code) for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
}
# Those that arrays and variables may have beside NumPy's own.
ML_DTYPES = ("bfloat16", "float8_e5m2")
SAFETENSORS_NAMES = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8", "uint16": "U16",
    "uint32": "U32", "uint64": "U64", "float16": "F16", "float32": "F32", "float64": "F64",
}  # fmt: skip

_END_OF_COUNTS = 1 << 63
# NumPy has no arrays of more, whether they have elements or not.
_MOST_DIMENSIONS = 32 if np.__version__.startswith("1.") else 64
_END_OF_ELEMENTS = _END_OF_COUNTS // max(dtype.itemsize for dtype in NUMPY_DTYPES.values())


class DamagedCheckpointError(ValueError):
    """A checkpoint was truncated or altered, or files of it are missing; restore another one."""


# Rules ------------------------------------------------------------------------------------------------------------


def _is_text(value: object) -> bool:
    return type(value) is str


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _END_OF_COUNTS


def _is_time(value: object) -> bool:
    return _is_count(value) or (type(value) is float and math.isfinite(value))


def _is_plain(value: object) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def is_key(value: object) -> bool:
    """Return whether ``value`` is the key of a part of a checkpoint."""
    return type(value) is str and value.count("/") < DEEPEST


def is_state(value: object, depth: int = 0) -> bool:
    """Return whether ``value`` is the state of an iterator, in types that JSON has."""
    if isinstance(value, (list, dict)) and depth < DEEPEST:
        return all(is_state(inner, depth + 1) for inner in (value.values() if isinstance(value, dict) else value))
    return _is_plain(value)


def _is_shape(value: object) -> bool:
    return (
        isinstance(value, list)
        and all(map(_is_count, value))
        and len(value) <= _MOST_DIMENSIONS
        and math.prod(max(1, extent) for extent in value) < _END_OF_ELEMENTS
    )


def _is_container(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    kind, content = value
    if kind != "dict":
        return kind in ("list", "tuple") and _is_count(content)
    # Keys are text: names that are one as text would be one place.
    is_named = isinstance(content, list) and all(type(name) in (str, int, bool) for name in content)
    return is_named and len({str(name) for name in content}) == len(content)


def _is_one_of(*values: str | None) -> Rule:
    return lambda value: (value is None or type(value) is str) and value in values


def _matches(pattern: str) -> Rule:
    return lambda value: type(value) is str and re.fullmatch(pattern, value) is not None


def _list_of(rule: Rule) -> Rule:
    return lambda value: isinstance(value, list) and all(map(rule, value))


def _dict_of(rule: Rule, key_rule: Rule = _is_text) -> Rule:
    return lambda value: isinstance(value, dict) and all(map(key_rule, value)) and all(map(rule, value.values()))


def _tuple_of(*rules: Rule) -> Rule:
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(rules)
        and all(rule(part) for rule, part in zip(rules, value, strict=True))
    )


def _are_links(value: object) -> bool:
    """Return whether each link leads to a key that leads no further."""
    if not isinstance(value, dict) or not all(map(is_key, (*value, *value.values()))):
        return False
    prefixes = ("/".join(to.split("/")[: end + 1]) for to in value.values() for end in range(to.count("/") + 1))
    return all(prefix not in value for prefix in prefixes)


def _record(rules: Mapping[str, Rule]) -> Rule:
    return lambda value: (
        isinstance(value, dict) and value.keys() == rules.keys() and all(rules[name](value[name]) for name in rules)
    )


def _either(*rules: Rule) -> Rule:
    return lambda value: any(rule(value) for rule in rules)


# Tables -----------------------------------------------------------------------------------------------------------

# Of the directory of the checkpoint, and never of another.
_is_file_name = _matches(r"data(-[0-9]{5,10}-of-[0-9]{5,10})?\.safetensors")
FILE = _record({"bytes": _is_count, "crc32": _matches("[0-9a-f]{8}")})
_PART = _record({"file": _is_file_name, "start": _is_count, "stop": _is_count})
_TENSOR = {
    "shape": _is_shape,
    "dtype": _is_one_of(*NUMPY_DTYPES, *ML_DTYPES),
    "stored_as": _is_one_of("tensor", "bytes"),
    "synchronization": _is_one_of(None, *VariableSynchronization.__members__),
    "aggregation": _is_one_of(None, *VariableAggregation.__members__),
}
# In version 1 a tensor is in one file.
_ANY_TENSOR = _either(_record({**_TENSOR, "parts": _list_of(_PART)}), _record({**_TENSOR, "file": _is_file_name}))
_MANIFEST: dict[str, Rule] = {
    "sequence": _is_count,
    "number": _is_count,
    "tensors": _dict_of(_ANY_TENSOR, is_key),
    "values": _dict_of(is_state, is_key),
    "containers": _dict_of(_is_container, is_key),
    "iterators": _list_of(is_key),
    "files": _dict_of(FILE, _is_file_name),
    "saved_at": _is_time,
    "kept": _either(_is_one_of(None), _tuple_of(_is_time, _list_of(_is_text))),
    "writer": _either(_is_one_of(None), _tuple_of(_is_text, _is_count)),
    "is_shared": lambda value: type(value) is bool,
    "run_calls": _is_count,
    "classes": _dict_of(_is_text, is_key),
    "links": _are_links,
}
# What the manifests of all versions have.
_REQUIRED = ("sequence", "number", "tensors", "values")
HEADER_ENTRY = _record({
    "dtype": _is_one_of(*SAFETENSORS_NAMES.values()),
    "shape": _is_shape,
    "data_offsets": _tuple_of(_is_count, _is_count),
})  # fmt: skip


# Checks -----------------------------------------------------------------------------------------------------------


def parse(data: bytes | bytearray, source: str) -> Any:
    """Return the content of a JSON text.

    Raises:
        DamagedCheckpointError: It is none, or gives one name twice.
    """
    try:
        return json.loads(data.decode(), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{source} is damaged: it cannot be read: {error}") from error


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a name stands there twice")
    return content


def check_manifest(content: dict[str, Any], source: str) -> None:
    """Raise DamagedCheckpointError unless a manifest keeps all rules; further names do not count."""
    for name, rule in _MANIFEST.items():
        is_right = rule(content[name]) if name in content else name not in _REQUIRED
        check(is_right, name, content, source)
    values, iterators = content["values"], content.get("iterators", ())
    check(values.keys() >= set(iterators), "iterators", content, source)
    replaceable = values.keys() - set(iterators)
    check(all(_is_plain(values[key]) for key in replaceable), "values", content, source)


def check(is_right: bool, name: str, content: Mapping[str, object], source: str) -> None:
    """Raise DamagedCheckpointError unless the value under ``name`` is right."""
    if not is_right:
        found = reprlib.repr(content[name]) if name in content else "missing"
        raise DamagedCheckpointError(
            f"{source} is damaged: its {name!r} is {found}; expected what Checkpoint.save() wrote, unchanged"
        )
