"""What is counted: a small package of which each figure is known, and the calls of this one."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from tests.house import calls, imports, source
from tests.house.__main__ import figures, main

pytestmark = pytest.mark.one_rank

ROOT = Path(__file__).resolve().parents[2]
_FILES = {
    "mpidist/__init__.py": "",
    "mpidist/high/__init__.py": '"""What is here, and what not."""',
    "mpidist/high/line.py": '''
        """One line. And more of it."""
        from typing import Any
        from mpidist.low import line

        # A comment of its own.
        class Line:
            """Say in sixteen words or more, of which there are enough, what this class could be good for."""

            _shared = 1
            """Of all lines."""

            def one(self, other: Any) -> Any:  # one at the end
                return self._two(other._two, Line._shared, super()._two, other.rows._fields, self.row._end)

            def _two(self, *text: object) -> str:
                """Return text."""
                return """
        # no comment

        """
    ''',
    "mpidist/low/__init__.py": "",
    "mpidist/low/line.py": """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from mpidist.high.line import Line
        class Line: pass
    """,
    "mpidist/low/other.py": """
        def late():
            import mpidist.beside
        from mpidist.low.line import _hidden
    """,
    "mpidist/beside.py": "from mpidist import low",
    "mpidist/other.py": "from mpidist.low.other import late\n__all__ = ['late']",
    "pyproject.toml": """
        [tool.importlinter]
        root_package = "mpidist"
        [[tool.importlinter.contracts]]
        name = "down"
        type = "layers"
        containers = ["mpidist"]
        layers = ["high", "low | beside"]
    """,
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in _FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    return tmp_path


def test_every_figure_of_a_small_package(checkout: Path) -> None:
    assert figures(checkout) == {
        "code lines": 20,
        "docstring lines": 5,
        "comment lines": 1,
        "files": 8,
        "functions": 3,
        "functions of 4 lines or fewer": 2,
        "imports upward": [
            "mpidist.beside -> mpidist.low",
            "mpidist.low.line -> mpidist.high.line",
            "mpidist.low.other -> mpidist.beside",
        ],
        "circles of files": [["mpidist.high.line", "mpidist.low.line"]],
        "files in circles": 2,
        "private accesses": [
            "high/line.py:14 other._two",
            "high/line.py:14 self.row._end",
            "low/other.py:4 mpidist.low.line._hidden",
        ],
        "private accesses of a name": 1,
        "Any": 3,
        '"what" in 10,000 words of docstrings': round(10_000 * 3 / 35, 1),
        "first sentences of more than 15 words": [
            "Say in sixteen words or more, of which there are enough, what this class could be good for."
        ],
        "class names that occur twice": ["Line"],
        "file names that occur twice": ["line"],
    }


def test_circles_are_found_however_long() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert imports.circles(edges) == [["a", "b", "c"], ["d", "e"]]


def test_rooms_beside_each_other_may_be_free() -> None:
    assert not imports._goes_up(["top", "one : (two)"], "mpidist", "mpidist.one.x", "mpidist.two")
    assert imports._goes_up(["top", "one | two"], "mpidist", "mpidist.one.x", "mpidist.two")


def test_what_is_printed(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(checkout), str(checkout), "--json"])
    assert json.loads(capsys.readouterr().out) == {str(checkout): figures(checkout)}
    main([str(checkout)])
    shown = {" ".join(line.split()[:-1]): line.split()[-1] for line in capsys.readouterr().out.splitlines()}
    assert shown["code lines"] == "20"
    assert [shown[name] for name in ("private accesses", "high", "low")] == ["3", "2", "1"]


def test_this_checkout_is_counted_whole() -> None:
    sources = source.read(ROOT)
    assert len(sources) == len(list((ROOT / "mpidist").rglob("*.py")))
    assert {edge for edges in imports.graph(sources).values() for edge in edges} <= {each.module for each in sources}


@pytest.mark.jobs
def test_calls_of_this_checkout() -> None:
    found = calls.crossings(ROOT)
    assert found["all_reduce"]["collectives"] == found["apply_gradients"]["collectives"] == 1
    for crossed, file in {"apply_gradients": "training/optimizer.py", "save": "checkpoint/checkpoint.py"}.items():
        assert file in found[crossed]["files"]
        assert len(found[crossed]["files"]) <= found[crossed]["functions"] <= found[crossed]["calls"]


def test_files_of_the_data_path_are_left_out() -> None:
    files = ["nest.py", "collectives/node/board.py", "channel/order.py", "reduce/node.py"]
    assert calls.outside_data_path(files) == ["nest.py", "reduce/node.py"]
