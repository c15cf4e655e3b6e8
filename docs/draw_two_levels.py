"""Draw an all-reduce over two nodes, from its trace: ``python docs/draw_two_levels.py``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from drawing import BLUE, GREEN, ORANGE, PICTURES, PURPLE, Picture, run

PICTURE = PICTURES / "two_levels.svg"
RANKS = 4
PROGRAM = """
import mpidist
import numpy as np

with mpidist.Communicator() as comm:
    for _ in range(50):
        comm.all_reduce("SUM", np.ones(2**21, np.float32))
"""
# Ranks of one machine, as two nodes of two.
ENVIRONMENT = {"MPIDIST_RANKS_PER_NODE": "2"}
FILLS = {"fill chunk": BLUE, "reduce chunk": ORANGE, "chunk": GREEN, "copy chunk": PURPLE}
_MEANS = {
    "fill chunk": "put into shared memory",
    "reduce chunk": "reduced inside the node",
    "chunk": "on the wire",
    "copy chunk": "copied from the node",
}
_LEFT, _WIDTH, _LANE = 110, 580, 7


def quickest(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the phases of the call that took least on its slowest rank: the others were disturbed by more."""
    spans = [event for event in events if event["ph"] == "X"]
    calls: dict[int, list[dict[str, Any]]] = {}
    for span in spans:
        if span["name"] == "all_reduce SUM":
            calls.setdefault(span["args"]["number"], []).append(span)
    call = min(calls.values(), key=lambda spans: max(span["dur"] for span in spans))
    # A rank that is through is in its next call while others are in this one.
    times = {span["pid"]: (span["ts"], span["ts"] + span["dur"]) for span in call}
    phases = [span for span in spans if span["name"] in FILLS]
    return [span for span in phases if times[span["pid"]][0] <= span["ts"] <= times[span["pid"]][1]]


def drawn(events: list[dict[str, Any]]) -> str:
    """Return the picture of the quickest call: a lane for each chunk on each rank."""
    phases = quickest(events)
    begin = min(span["ts"] for span in phases)
    end = max(span["ts"] + span["dur"] for span in phases)
    chunks = 1 + max(span["args"]["chunk"] for span in phases)
    scale = _WIDTH / (end - begin)
    picture = Picture("One all-reduce of 8 MiB on two nodes of two ranks, chunk by chunk", 720)
    for rank in range(RANKS):
        top = 10.0 + rank * (chunks * _LANE + 10)
        picture.text(8, top + 14, f"rank {rank}", "bold")
        picture.text(8, top + 28, f"node {rank // 2}, rail {rank % 2}")
        picture.text(_LEFT - 6, top + 8, "chunk 0", "end small")
        picture.text(_LEFT - 6, top + chunks * _LANE, f"{chunks - 1}", "end small")
        picture.box(_LEFT, top, _WIDTH, chunks * _LANE, "#ffffff")
        # The wire first: what a rank does itself is above.
        for span in sorted(phases, key=lambda span: span["name"] != "chunk"):
            if span["pid"] == rank:
                x, y = _LEFT + (span["ts"] - begin) * scale, top + span["args"]["chunk"] * _LANE
                fill = FILLS[span["name"]]
                picture.box(x, y, max(1.5, span["dur"] * scale), _LANE - 1, fill, fill)
    bottom = 10.0 + RANKS * (chunks * _LANE + 10)
    for part in range(5):
        picture.text(_LEFT + part * _WIDTH / 4, bottom + 6, f"{(end - begin) / 1000 * part / 4:.1f} ms", "small middle")
    found = {span["name"] for span in phases}
    picture.legend(_LEFT, bottom + 28, {text: FILLS[name] for name, text in _MEANS.items() if name in found})
    return picture.svg()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as traces:
        run(PROGRAM, RANKS, MPIDIST_TRACE=traces, **ENVIRONMENT)
        merged = json.loads(Path(traces, "trace-merged.json").read_text())
    PICTURE.write_text(drawn(merged["traceEvents"]))
