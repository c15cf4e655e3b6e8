"""The native core's element-wise operations and its search for overlaps, against naive references in C."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.building import ADDRESSES, BASE, CLANG, GCC, PLAIN, Variant, compiled, run

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs, pytest.mark.timeout(300)]


@pytest.mark.parametrize("variant", [GCC, CLANG, BASE, ADDRESSES], ids=str)
def test_every_dtype_and_operation(variant: Variant, built: Path) -> None:
    printed = run([*compiled("check_kernels", variant, built), "1"])
    assert printed.endswith(": right\n")
    if variant is BASE:
        assert printed == "base: right\n"


def test_overlapping_arrays(built: Path) -> None:
    assert run(compiled("check_overlap", PLAIN, built)) == "right\n"


@pytest.mark.long
@pytest.mark.parametrize("variant", [GCC, CLANG], ids=str)
def test_more_numbers(variant: Variant, built: Path) -> None:
    run([*compiled("check_kernels", variant, built), "20"])
