"""The programs of all pages that need Keras, on the backend that KERAS_BACKEND names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.programs import Program, follow, programs_with

pytest.importorskip("keras", reason="Keras is missing: pip install '.[keras]' torch jax")

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs, pytest.mark.timeout(300)]


@pytest.mark.parametrize("program", programs_with("keras"), ids=str)
def test_a_program(program: Program, tmp_path: Path) -> None:
    follow(program, tmp_path)
