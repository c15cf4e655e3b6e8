"""The structure of the library keeps to the bars of CONTRIBUTING.md, as ``python -m tests.house`` counts it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.house import calls
from tests.house.__main__ import main
from tests.house.source import figures

pytestmark = pytest.mark.one_rank
ROOT = Path(__file__).resolve().parents[2]
_CALLS = {
    "all_reduce: files outside node/, channel/": 9,
    "apply_gradients: files": 10,
    "save: files": 23,
    "save: calls": 300,
    "save: collectives": 2,
}
_FILES = {
    "high.py": '''
        """One line. And more of it."""
        from mpidist.low import Line, _hidden

        # A comment of its own.
        class Wide:
            """Say in sixteen words or more, of which there are enough, what this class could be good for."""

            def one(self, other: Any):  # a comment at the end
                return self._two(other._two, Wide._shared, super()._two, other.rows._fields, self.row._end)
    ''',
    "low.py": """
        def late():
            import mpidist.high
        class Line: pass
    """,
    "other/low.py": "class Line: pass",
}


def test_bars() -> None:
    found = figures(ROOT)
    for name in (
        "circles of files",
        "class names that occur twice",
        "file names that occur twice",
        "first sentences of more than 15 words",
    ):
        assert found[name] == [], name
    assert len(found["private accesses"]) < 30, found["private accesses"]
    assert found["Any"] < 500


@pytest.mark.jobs
def test_calls_pass_through_few_files() -> None:
    # On a busy machine a late rank makes the other one pass through more files.
    found = [calls.figures(ROOT) for _ in range(3)]
    assert all(min(each[name] for each in found) <= bar for name, bar in _CALLS.items()), found


def test_figures_of_a_small_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in _FILES.items():
        (tmp_path / "mpidist" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mpidist" / name).write_text(textwrap.dedent(text))
    private = ["high.py:3 mpidist.low._hidden", "high.py:10 other._two", "high.py:10 self.row._end"]
    assert figures(tmp_path) == {
        "code lines": 8,
        "docstring lines": 2,
        "comment lines": 1,
        "files": 3,
        "functions": 2,
        "circles of files": [["mpidist.high", "mpidist.low"]],
        "private accesses": private,
        "Any": 1,
        "first sentences of more than 15 words": [
            "Say in sixteen words or more, of which there are enough, what this class could be good for."
        ],
        "class names that occur twice": ["Line"],
        "file names that occur twice": ["low"],
    }
    main([str(tmp_path)])
    assert capsys.readouterr().out.split()[:4] == [str(tmp_path)[-19:], "code", "lines", "8"]
