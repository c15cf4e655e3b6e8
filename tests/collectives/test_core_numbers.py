"""Numbers that the core's header and the Python beside it both have."""

from __future__ import annotations

import re

import pytest

from mpidist.collectives.channel import fast_path
from mpidist.collectives.node import core, packing
from mpidist.core.options import ReduceOp
from mpidist.native.build_library import SOURCES

pytestmark = pytest.mark.one_rank

_SHIFT = re.compile(r"^\s*(\d+)\s*<<\s*(\d+)\s*$")


def numbers_of(name: str) -> dict[str, int]:
    """Return the constants of all enumerations of a file."""
    text = re.sub(r"/\*.*?\*/", "", (SOURCES / name).read_text(), flags=re.DOTALL)
    found: dict[str, int] = {}
    for body in re.findall(r"enum \{(.*?)\}", text, flags=re.DOTALL):
        following = 0
        for entry in body.split(","):
            key, _, value = (part.strip() for part in entry.partition("="))
            if not key:
                continue
            shift = _SHIFT.match(value)
            if value and not shift and not value.isdigit() and not value.startswith("0x"):
                continue
            following = (int(shift[1]) << int(shift[2])) if shift else int(value, 0) if value else following
            found[key] = following
            following += 1
    return found


def test_the_header() -> None:
    c = numbers_of("mpidist.h")
    states = ("DONE", "NOT_YET", "MOVED", "MET", "SLICE", "CHUNK", "MISMATCH", "LOST")
    assert [getattr(core, state) for state in states] == [c[f"NC_{state}"] for state in states]
    kinds = ("ALL_REDUCE", "REDUCE_SCATTER", "ALL_GATHER")
    assert [getattr(core, f"_{kind}") for kind in kinds] == [c[f"NC_{kind}"] for kind in kinds]
    flags = ("STOP", "SHARE", "UNWANTED", "WATCH")
    assert [getattr(core, f"_{flag}") for flag in flags] == [c[f"NC_{flag}"] for flag in flags]
    for op in ReduceOp:
        assert core._OPS[op] == c["NC_SUM" if op is ReduceOp.MEAN else f"NC_{op.name}"]
    names = {"i": "I", "u": "U", "f": "F", "c": "C"}
    for (kind, size), code in core._DTYPES.items():
        if kind == "b":
            assert code == c["NC_BOOL"]
            continue
        is_long = size * (1 if kind == "f" else 0.5) > 8 and kind in "fc"
        assert code == c[("NC_LONG" if kind == "f" else "NC_CLONG") if is_long else f"NC_{names[kind]}{8 * size}"]
    assert (c["NC_U8"], c["NC_BF16"]) == (core._BYTE, core._BFLOAT16)
    assert (c["NC_INPUTS"], c["NC_PIECES"]) == (core.MOST_INPUTS, packing.MOST_PIECES)
    assert (c["NC_SHARED_BYTES"], c["NC_SMALL_ARRAY"]) == (core.SHARED_BYTES, packing.SMALL_ARRAY_BYTES)


def test_cells_of_the_fast_path() -> None:
    c = numbers_of("python.h") | numbers_of("fast_path.c")
    cells = ("_DISABLED", "_CALLS", "_LAST", "_THREAD", "_BYTES")
    keys = ("DISABLED", "CALLS", "LAST", "THREAD", "BYTES")
    assert [getattr(fast_path, cell) for cell in cells] == [c[key] for key in keys]
    assert (c["IN_CALL"], c["HANDED_OVER"]) == (fast_path._IN_CALL, fast_path._HANDED_OVER)
    assert core._KINDS["broadcast"] == c["BROADCAST"]
    assert core._IS_MEAN & c["KERNEL"] == 0
    assert 2 * len(core._OPS) <= c["OPS"]
