"""Draw which replica gets which rows, as a job prints it: ``python docs/draw_dealing.py``."""

from __future__ import annotations

import json

from drawing import BLUE, GREEN, GREY, ORANGE, PICTURES, Picture, run

PICTURE = PICTURES / "dealing.svg"
RANKS = 2
PROGRAM = """
import json

import mpidist

devices = ["cpu:0", "cpu:1"]
policies = mpidist.AutoShardPolicy
with mpidist.MultiWorkerMirroredStrategy(devices=devices) as strategy, mpidist.Communicator() as comm:
    dealt = {}
    for name, batch, options in (
        ("the default", 4, {}),
        ('assignment="block"', 4, {"assignment": "block"}),
        ("AutoShardPolicy.OFF", 7, {"auto_shard_policy": policies.OFF}),
    ):
        dataset = mpidist.Dataset.range(15).batch(batch).with_options(**options)
        parts = strategy.experimental_distribute_dataset(dataset)
        steps = [[rows.tolist() for rows in strategy.experimental_local_results(step)] for step in parts]
        dealt[f"Dataset.range(15).batch({batch}), {name}"] = comm.all_gather_object(steps)
if mpidist.rank() == 0:
    print(json.dumps(dealt))
"""
_FILLS = (BLUE, ORANGE, GREEN, GREY)
_CELL = 22


def drawn(output: str) -> str:
    """Return the picture of what the job printed."""
    picture = Picture("Rows of global batches, and the replicas that take them", 720)
    y = 8.0
    for title, ranks in json.loads(output).items():
        picture.text(8, y + 14, title, "bold code")
        rows = [
            (f"rank {rank}, replica {2 * rank + own}", [step[own] for step in steps])
            for rank, steps in enumerate(ranks)
            for own in (0, 1)
        ]
        widest = max(len(part) for _, parts in rows for part in parts)
        for step in range(len(rows[0][1])):
            picture.text(130 + step * (widest * _CELL + 14), y + 30, f"step {step + 1}", "small")
        for replica, (name, parts) in enumerate(rows):
            top = y + 36 + replica * (_CELL + 3)
            picture.text(8, top + 15, name)
            for step, part in enumerate(parts):
                x = 130 + step * (widest * _CELL + 14)
                picture.box(x, top, widest * _CELL, _CELL, "#ffffff")
                for place, row in enumerate(part):
                    picture.box(x + place * _CELL, top, _CELL, _CELL, _FILLS[replica])
                    picture.text(x + (place + 0.5) * _CELL, top + 15, str(row), "middle")
        y += 36 + 4 * (_CELL + 3) + 14
    return picture.svg()


if __name__ == "__main__":
    PICTURE.write_text(drawn(run(PROGRAM, RANKS).stdout))
