"""The programs of all pages that need JAX."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.programs import Program, follow, programs_with

pytest.importorskip("jax", reason="JAX is missing: pip install '.[jax]'")

pytestmark = [pytest.mark.jax, pytest.mark.one_rank, pytest.mark.jobs, pytest.mark.timeout(300)]


@pytest.mark.parametrize("program", programs_with("jax"), ids=str)
def test_a_program(program: Program, tmp_path: Path) -> None:
    follow(program, tmp_path)
