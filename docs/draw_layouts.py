"""Draw four replicas in three layouts, as jobs print them: ``python docs/draw_layouts.py``."""

from __future__ import annotations

import json

from drawing import BLUE, PICTURES, Picture, run

PICTURE = PICTURES / "layouts.svg"
REPLICAS = 4
RANKS = (1, 2, 4)
PROGRAM = """
import json
import sys

import mpidist

devices = [f"cpu:{k}" for k in range(int(sys.argv[1]))]
strategy = mpidist.MultiWorkerMirroredStrategy(devices=devices)
values = strategy.run(lambda: mpidist.get_replica_context().replica_id_in_sync_group)
local = [int(value) for value in strategy.experimental_local_results(values)]
total = float(strategy.reduce("SUM", values, axis=None))
with mpidist.Communicator() as comm:
    layout = comm.all_gather_object([local, total])
if mpidist.rank() == 0:
    print(json.dumps(layout))
"""
_STRATEGIES = (
    'MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1", "cpu:2", "cpu:3"])',
    'MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])',
    "MultiWorkerMirroredStrategy()",
)


def drawn(outputs: list[str]) -> str:
    """Return the picture of what the job printed on 1, 2 and 4 ranks."""
    picture = Picture("Four replicas on one rank, on two and on four: the same numbers", 720)
    y = 8.0
    for output, ranks, strategy in zip(outputs, RANKS, _STRATEGIES, strict=True):
        picture.text(8, y + 14, strategy, "bold code")
        width = (704 - 8 * (ranks - 1)) / ranks
        layout = json.loads(output)
        for rank, (replicas, _) in enumerate(layout):
            x = 8 + rank * (width + 8)
            picture.box(x, y + 24, width, 64)
            picture.text(x + 8, y + 40, f"rank {rank}")
            inner = (width - 8 * (len(replicas) + 1)) / len(replicas)
            for place, replica in enumerate(replicas):
                picture.box(x + 8 + place * (inner + 8), y + 48, inner, 32, "#dbe6fa", BLUE)
                picture.text(x + 8 + place * (inner + 8) + inner / 2, y + 68, f"replica {replica}", "middle")
        (total,) = {total for _, total in layout}
        picture.text(712, y + 14, f"sum of their numbers: {total:g}", "end small")
        y += 104
    return picture.svg()


if __name__ == "__main__":
    PICTURE.write_text(drawn([run(PROGRAM, ranks, str(REPLICAS // ranks)).stdout for ranks in RANKS]))
