"""What mpidist must reach on one machine without a GPU, and whether a run reached it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.bars.comparing import figures_at_most, microseconds_more, share_of_time, times_as_fast
from benchmarks.measuring.models import MODELS, size_of
from benchmarks.measuring.rows import (
    COPY,
    GLOO,
    IN_CONTEXT,
    IN_PLACE,
    MPI,
    OURS,
    Figure,
    Row,
    Verdict,
    find_row,
    states_of,
)
from benchmarks.measuring.sizes import KIB, MIB, size_text

# Sizes, buffers of mpidist and of MPI, and at least how many times as fast.
_ALL_REDUCE = (
    (4, KIB, "new", "private", 1.0),
    (4 * KIB, 256 * KIB, "new", "private", 1.5),
    (MIB, 4 * MIB, "out=", "private", 1.2),
    (MIB, 4 * MIB, "own", "private", 2.0),
    (16 * MIB, 16 * MIB, "out=", "private", 1.6),
    (64 * MIB, 64 * MIB, "out=", "private", 2.6),
    (64 * MIB, 64 * MIB, "own", "private", 5.0),
    (4, 16 * MIB, IN_PLACE, IN_PLACE, 1.0),
    (64 * MIB, 64 * MIB, IN_PLACE, IN_PLACE, 2.0),
)
# Buffers, and at most how many times of a copy 64 MiB take.
_OF_ONE_COPY = (("out=", 1.5), ("own", 0.75))
# Buffers of mpidist, each beside what MPI has: private ones, and for a broadcast in place.
_MOVED = ("out=", IN_PLACE, "new")
_MOVEMENT_SHARE, _SMALL_MOVEMENT, _SMALL = 1.05, 1.5, 64
_CONTEXT_US = 1.0
# Whom parts of a training step are compared with, and at most how many times as long they take.
_TRAINING = {
    "step": (MPI, 1.10),
    "apply_gradients": (MPI, 1.24),
    "strategy.reduce": (MPI, 1.33),
    "assign": (COPY, 1.58),
}


def verdicts(rows: Sequence[Row], figures: Sequence[Figure], ranks: int, reads_neighbours: bool) -> list[Verdict]:
    """Return the verdict of every bar for which there are results; those of collectives were set for 2 and 4 ranks.

    Args:
        rows, figures: The results of one run on one node.
        ranks: How many took part.
        reads_neighbours: Whether the ranks could read each other's memory, which the bars of movement ask for.
    """
    found = []
    for state, of_state in states_of(rows).items():
        judged = _run(of_state)
        if ranks == 2 and reads_neighbours:
            judged = [*_movement(of_state), *judged]
        if ranks == 2:
            judged = [*_training(of_state), *judged]
        if ranks in (2, 4):
            judged = [*_all_reduce(of_state), *_in_context(of_state), *_resnet50(of_state), *judged]
        found += [each if state == "-" else replace(each, what=f"{state}: {each.what}") for each in judged]
    return [*found, *figures_at_most(figures, _FIGURE_BARS)]


def _sizes(rows: Sequence[Row], operation: str) -> list[int]:
    return sorted({row.size for row in rows if row.operation == operation})


def _all_reduce(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for least, most, variant, theirs, bar in _ALL_REDUCE:
        for size in _sizes(rows, "all_reduce"):
            if least <= size <= most:
                bare = find_row(rows, "all_reduce", MPI, theirs, size)
                ours = find_row(rows, "all_reduce", OURS, variant, size)
                found += times_as_fast(f"all_reduce, {variant}, {size_text(size)}: as fast as MPI", bare, ours, bar)
    copy = find_row(rows, "all_reduce", COPY, size=64 * MIB)
    for variant, bar in _OF_ONE_COPY:
        ours = find_row(rows, "all_reduce", OURS, variant, 64 * MIB)
        found += share_of_time(f"all_reduce, {variant}, 64 MiB: time of one copy", ours, copy, bar)
    return found


def _in_context(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for size in _sizes(rows, IN_CONTEXT):
        bare, ours = (find_row(rows, IN_CONTEXT, by, size=size) for by in (MPI, OURS))
        found += microseconds_more(f"ctx.all_reduce, {size_text(size)}: over MPI", ours, bare, _CONTEXT_US)
    return found


def _movement(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for operation in ("all_gather", "reduce_scatter", "broadcast"):
        for size in _sizes(rows, operation):
            bare = find_row(rows, operation, MPI, size=size)
            for variant in _MOVED:
                ours = find_row(rows, operation, OURS, variant, size)
                what = f"{operation}, {variant}, {size_text(size)}"
                if size == _SMALL:
                    found += times_as_fast(f"{what}: as fast as MPI", bare, ours, _SMALL_MOVEMENT)
                elif _SMALL < size <= 64 * MIB:
                    found += share_of_time(f"{what}: time of MPI", ours, bare, _MOVEMENT_SHARE)
    return found


def _resnet50(rows: Sequence[Row]) -> list[Verdict]:
    size = size_of(MODELS["resnet50"]())
    bare = find_row(rows, "batch", MPI, "one call per array", size)
    gloo = find_row(rows, "batch", GLOO, size=size)
    found = []
    for variant, name, bars in (("own", "own arrays", (3.3, 10.0)), ("out=", "private", (1.7, 3.0))):
        ours = find_row(rows, "batch", OURS, variant, size)
        what = f"gradients of ResNet-50, {name}: as fast as"
        found += times_as_fast(f"{what} one MPI call per array", bare, ours, bars[0])
        found += times_as_fast(f"{what} gloo in 25 MiB buckets", gloo, ours, bars[1])
    return found


def _training(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for row in rows:
        if row.by == OURS and row.operation in _TRAINING:
            by, bar = _TRAINING[row.operation]
            theirs = find_row(rows, row.operation, by, size=row.size, variant=row.variant if by == MPI else None)
            found += share_of_time(f"{row.operation}, {row.variant}: time by hand", row, theirs, bar)
    return found


def _run(rows: Sequence[Row]) -> list[Verdict]:
    empty = find_row(rows, "run", OURS)
    return [] if empty is None else [Verdict("strategy.run of an empty function", empty.median, 5.0, False, "us", "-")]


# operation, name of the figure, what is told, the bar (at most).
_FIGURE_BARS = (
    ("memory", "beyond_arrays", "memory of an all-reduce beyond its arrays, per node, in packed sizes", 2.0),
    ("memory", "central_storage", "CentralStorageStrategy: variables on all ranks, in copies of each", 1.1),
    ("memory", "growth", "growth of memory over all steps, MiB per rank", 1.0),
    ("memory", "dev_shm_growth", "growth of /dev/shm over all steps, MiB", 1.0),
    ("step", "Python calls", "", 250.0),
    ("start", "import", "import mpidist, seconds", 0.3),
    ("start", "cupy_imported", "CuPy imported with it", 0.0),
    ("guard", "added_4_KiB", "the guard, added to an all-reduce of 4 KiB", 0.5),
    ("guard", "ratio_1_MiB", "all-reduce of 1 MiB with the guard, of one without", 1.02),
)
