"""The programs of all pages that need PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.programs import Program, follow, programs_with

pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")

pytestmark = [pytest.mark.torch, pytest.mark.one_rank, pytest.mark.jobs, pytest.mark.timeout(300)]


@pytest.mark.parametrize("program", programs_with("torch"), ids=str)
def test_a_program(program: Program, tmp_path: Path) -> None:
    follow(program, tmp_path)
