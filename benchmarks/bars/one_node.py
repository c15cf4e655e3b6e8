"""What mpidist must reach on one machine without a GPU, and whether a run reached it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.bars.comparing import figures_at_most, microseconds_more, share_of_time, times_as_fast
from benchmarks.measuring.models import MODELS, size_of
from benchmarks.measuring.rows import COPY, GLOO, MPI, OURS, Figure, Row, Verdict, find_row
from benchmarks.measuring.sizes import KIB, MIB, size_text


def verdicts(rows: Sequence[Row], figures: Sequence[Figure], ranks: int, reads_neighbours: bool) -> list[Verdict]:
    """Return the verdict of every bar for which there are results.

    Args:
        rows, figures: The results of one run on one node.
        ranks: How many took part.
        reads_neighbours: Whether the ranks could read each other's memory and were free to choose how to reduce.
    """
    alone = [*_latency(rows), *figures_at_most(figures, _FIGURE_BARS)]
    if ranks == 1:
        return alone
    return [
        *_private_all_reduce(rows, ranks, reads_neighbours),
        *_never_slower(rows),
        *_own_all_reduce(rows),
        *_resnet50(rows),
        *alone,
    ]


def _private_all_reduce(rows: Sequence[Row], ranks: int, reads_neighbours: bool) -> list[Verdict]:
    """Return the verdicts of the large sizes; the bars were set for 2 and 4 ranks."""
    if ranks not in (2, 4):
        return []
    if reads_neighbours:
        bars, where = {16 * MIB: 1.5 if ranks == 2 else 1.3, 64 * MIB: 3.0}, "neighbours' memory readable"
    else:
        bars, where = {16 * MIB: 1.3, 64 * MIB: 2.3}, "neighbours' memory not used"
    found = []
    for size, bar in bars.items():
        bare = find_row(rows, "all_reduce", MPI, size=size)
        ours = find_row(rows, "all_reduce", OURS, "out=", size)
        found += times_as_fast(f"all_reduce, private, {size // MIB} MiB, {where}: as fast as MPI", bare, ours, bar)
    if ranks == 2 and reads_neighbours:
        copy = find_row(rows, "all_reduce", COPY, size=64 * MIB)
        ours = find_row(rows, "all_reduce", OURS, "out=", 64 * MIB)
        found += share_of_time("all_reduce, private, 64 MiB: time of one copy", ours, copy, 1.5)
    return found


def _never_slower(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for size in _sizes(rows):
        what = f"all_reduce, private, {size_text(size)}"
        bare, ours = find_row(rows, "all_reduce", MPI, size=size), find_row(rows, "all_reduce", OURS, "out=", size)
        if size >= 256 * KIB:
            found += times_as_fast(f"{what}: as fast as MPI", bare, ours, 1.0)
        else:
            found += microseconds_more(f"{what}: over the bare call", ours, bare, 10.0)
    return found


def _sizes(rows: Sequence[Row]) -> list[int]:
    return sorted({row.size for row in rows if row.operation == "all_reduce"})


def _own_all_reduce(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for size in _sizes(rows):
        if size >= MIB:
            ours = find_row(rows, "all_reduce", OURS, "own", size)
            bare, copy = find_row(rows, "all_reduce", MPI, size=size), find_row(rows, "all_reduce", COPY, size=size)
            found += times_as_fast(f"all_reduce, own arrays, {size_text(size)}: as fast as MPI", bare, ours, 5.0)
            found += share_of_time(f"all_reduce, own arrays, {size_text(size)}: time of one copy", ours, copy, 1.0)
    return found


def _resnet50(rows: Sequence[Row]) -> list[Verdict]:
    size = size_of(MODELS["resnet50"]())
    bare = find_row(rows, "batch", MPI, "one call per array", size)
    gloo = find_row(rows, "batch", GLOO, size=size)
    found = []
    for variant, name, bars in (("own", "own arrays", (5.0, 10.0)), ("out=", "private", (1.5, 3.0))):
        ours = find_row(rows, "batch", OURS, variant, size)
        what = f"gradients of ResNet-50, {name}: as fast as"
        found += times_as_fast(f"{what} one MPI call per array", bare, ours, bars[0])
        found += times_as_fast(f"{what} gloo in 25 MiB buckets", gloo, ours, bars[1])
    return found


def _latency(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    empty = find_row(rows, "run", OURS)
    if empty is not None:
        found.append(Verdict("strategy.run of an empty function", empty.median, 5.0, False, "us", "-"))
    bare, ours = find_row(rows, "scalar_all_reduce", MPI), find_row(rows, "scalar_all_reduce", OURS)
    return found + microseconds_more("ctx.all_reduce of one number: over the bare call", ours, bare, 10.0)


# operation, name of the figure, what is told, the bar (at most).
_FIGURE_BARS = (
    ("memory", "beyond_arrays", "memory of an all-reduce beyond its arrays, per node, in packed sizes", 2.0),
    ("memory", "central_storage", "CentralStorageStrategy: variables on all ranks, in copies of each", 1.1),
    ("memory", "growth", "growth of memory over all steps, MiB per rank", 1.0),
    ("memory", "dev_shm_growth", "growth of /dev/shm over all steps, MiB", 1.0),
    ("start", "import", "import mpidist, seconds", 0.3),
    ("start", "cupy_imported", "CuPy imported with it", 0.0),
    ("guard", "added_4_KiB", "the guard, added to an all-reduce of 4 KiB", 0.5),
    ("guard", "ratio_1_MiB", "all-reduce of 1 MiB with the guard, of one without", 1.02),
)
