"""The programs of all pages run; those with PyTorch, Keras and JAX do in tests/torch, tests/keras and tests/jax."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.programs import Program, follow, programs_with

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs]


@pytest.mark.parametrize("program", programs_with(None), ids=str)
def test_with_numpy(program: Program, tmp_path: Path) -> None:
    follow(program, tmp_path)


@pytest.mark.parametrize("program", programs_with("cupy"), ids=str)
def test_with_cupy_on_a_stand_in(program: Program, tmp_path: Path) -> None:
    follow(program, tmp_path)
