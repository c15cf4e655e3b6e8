"""The pages of the documentation as they lie in the checkout."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.ranks.jobs import ROOT

PAGES = [ROOT / "README.md", ROOT / "slurm/README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def programs(page: str | Path) -> list[str]:
    """Return the blocks of Python in a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
