"""What the pictures of the docs have in common: SVG, written by hand, of what a job printed or recorded."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs/pictures"

# Of a letter of 12 pixels, on average, in pixels.
LETTER = 6.2
# Told apart also without colours: from dark to light.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#6c96e8", "#e8a33d", "#a5d6a7", "#8250df", "#d8dee4"
_STYLE = (
    "text{font:12px sans-serif;fill:#1f2328}.bold{font-weight:bold}.code{font-family:monospace}.small{font-size:10px}"
    ".middle{text-anchor:middle}.end{text-anchor:end}"
)


class Picture:
    """A picture that is put together from the top; its height is that of what is in it."""

    def __init__(self, title: str, width: int) -> None:
        self._title, self._width, self._height = title, width, 0.0
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = "#f6f8fa", edge: str = "#8c959f"
    ) -> None:
        """Draw a rectangle."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._parts.append(f'<rect {place} rx="2" fill="{fill}" stroke="{edge}"/>')
        self._height = max(self._height, y + height)

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """Write a line, whose letters stand on ``y``."""
        name = f' class="{kind}"' if kind else ""
        self._parts.append(f'<text{name} x="{x:.1f}" y="{y:.1f}">{escape(text, quote=False)}</text>')
        self._height = max(self._height, y + 4)

    def line(self, x: float, y: float, x2: float, y2: float, colour: str = "#8c959f") -> None:
        """Draw a straight line."""
        self._parts.append(f'<path d="M{x:.1f} {y:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}" stroke-dasharray="3 2"/>')
        self._height = max(self._height, y, y2)

    def curve(self, points: list[tuple[float, float]], colour: str) -> None:
        """Connect points, and mark each of them."""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self._parts.append(f'<path d="M{path}" stroke="{colour}" stroke-width="2" fill="none"/>')
        self._parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        self._height = max(self._height, *(y + 3 for _, y in points))

    def legend(self, x: float, y: float, entries: dict[str, str]) -> None:
        """Write what each colour means, in a row."""
        for text, fill in entries.items():
            self.box(x, y - 9, 10, 10, fill)
            self.text(x + 15, y, text)
            x += 15 + LETTER * len(text) + 16

    def svg(self) -> str:
        """Return the picture as a file."""
        height = round(self._height + 8)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self._width} {height}" role="img">'
        # In a dark page, too, letters are dark.
        paper = f'<rect width="{self._width}" height="{height}" fill="#ffffff"/>'
        return "\n".join(
            [
                head,
                f"<title>{escape(self._title)}</title>",
                f"<style>{_STYLE}</style>",
                paper,
                *self._parts,
                "</svg>",
                "",
            ]
        )


def run(program: str, ranks: int, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program on ranks of this machine, and return what it printed.

    Raises:
        CalledProcessError: It failed; its output has been printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "train.py")
        file.write_text(program)
        command = [sys.executable, "-m", "mpidist", "launch", "-n", str(ranks), str(file), *arguments]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
    done.check_returncode()
    return done
