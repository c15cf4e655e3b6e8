"""Draw a rank that keeps others waiting, from traces and report: ``python docs/draw_hang.py``."""

from __future__ import annotations

import json
import re
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from drawing import BLUE, GREY, LETTER, ORANGE, PICTURES, Picture, run

PICTURE = PICTURES / "hang.svg"
RANKS = 4
PROGRAM = """
import time

import mpidist
import numpy as np

comm = mpidist.Communicator()
for step in range(3):
    if comm.rank == 1 and step == 2:
        time.sleep(2)  # reads its data
    comm.all_reduce("SUM", np.ones(5))
"""
ENVIRONMENT = {"MPIDIST_WARN_AFTER": "1"}
_LEFT, _WIDTH = 60, 640


def drawn(events: list[dict[str, Any]], report: str) -> str:
    """Return the picture of the spans of all ranks, and what one of them printed."""
    spans = [event for event in events if event["ph"] == "X"]
    calls = [span for span in spans if span["name"].startswith("all_reduce")]
    begin = min(span["ts"] for span in calls)
    last = max(span["args"]["number"] for span in calls)
    end = max(span["ts"] + span["dur"] for span in calls)
    scale = _WIDTH / (end - begin)
    picture = Picture("A rank that comes late, and the report that names it", 720)
    for rank in range(RANKS):
        y = 24.0 + rank * 30
        picture.text(8, y + 15, f"rank {rank}")
        picture.box(_LEFT, y, _WIDTH, 22, GREY)
        for span in calls + [span for span in spans if span["name"] == "wait for others"]:
            if span["pid"] == rank and span["ts"] >= begin:
                fill = ORANGE if span["name"] == "wait for others" else BLUE
                picture.box(_LEFT + (span["ts"] - begin) * scale, y, max(2.0, span["dur"] * scale), 22, fill, fill)
    waits_since = min(span["ts"] for span in calls if span["args"]["number"] == last)
    reported = _LEFT + (waits_since + 1e6 * float(ENVIRONMENT["MPIDIST_WARN_AFTER"]) - begin) * scale
    picture.line(reported, 18, reported, 144, "#cf222e")
    picture.text(reported, 14, "the report", "middle")
    for second in range(round((end - begin) / 1e6) + 1):
        picture.text(_LEFT + second * 1e6 * scale, 158, f"{second} s", "small")
    picture.legend(_LEFT, 182, {"in an all-reduce": BLUE, "waits for others": ORANGE, "the program": GREY})
    y = 208.0
    for line in report.splitlines():
        for piece in textwrap.wrap(line, round(700 / LETTER * 0.85), subsequent_indent="    ", drop_whitespace=False):
            picture.text(8 + 6 * (len(piece) - len(piece.lstrip())), y, piece.strip(), "code small")
            y += 14
    picture.box(4, 194, 712, y - 202, "none", GREY)
    return picture.svg()


def report_in(printed: str) -> str:
    """Return the report, without what differs from machine to machine: folders, host, process."""
    lines = [line for line in printed.splitlines() if line.startswith(("mpidist: ranks", "  rank"))]
    return re.sub(r"\S*/\w+\.py", "train.py", "\n".join(line.split(" (process ")[0] for line in lines))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as traces:
        done = run(PROGRAM, RANKS, MPIDIST_TRACE=traces, **ENVIRONMENT)
        merged = json.loads(Path(traces, "trace-merged.json").read_text())
    PICTURE.write_text(drawn(merged["traceEvents"], report_in(done.stderr)))
