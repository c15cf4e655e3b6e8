"""What mpidist must reach on one machine without a GPU, and whether a run reached it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from benchmarks.models import MODELS, size_of
from benchmarks.rows import COPY, GLOO, MPI, OURS, Figure, Row

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Verdict:
    """One bar and what was reached.

    Attributes:
        what: What was measured.
        figure: What came out.
        bar: What it must be: at least, or at most.
        at_least: Which of the two.
        unit: Of both; "x" for a ratio.
        algorithm: Which of mpidist's algorithms ran.
    """

    what: str
    figure: float
    bar: float
    at_least: bool
    unit: str
    algorithm: str

    @property
    def met(self) -> bool:
        """Whether the bar was reached."""
        return self.figure >= self.bar if self.at_least else self.figure <= self.bar

    def cells(self) -> tuple[str, str, str, str, str]:
        """Return what, figure, bar, met and algorithm as text."""
        bound = "at least" if self.at_least else "at most"
        verdict = "met" if self.met else "NOT MET"
        return self.what, f"{self.figure:.3g} {self.unit}", f"{bound} {self.bar:g} {self.unit}", verdict, self.algorithm

    def as_dict(self) -> dict[str, object]:
        """Return all attributes and ``met``."""
        return {**asdict(self), "met": self.met}


class _Results:
    """Looks rows up by what they measured."""

    def __init__(self, rows: Iterable[Row], figures: Iterable[Figure]) -> None:
        self._rows = list(rows)
        self._figures = list(figures)

    def sizes(self, operation: str) -> list[int]:
        """Return the sizes at which ``operation`` was measured."""
        return sorted({row.size for row in self._rows if row.operation == operation})

    def row(self, operation: str, by: str, variant: str | None = None, size: int | None = None) -> Row | None:
        """Return the row, None if it was not measured; ``variant`` and ``size`` may be left open."""
        for row in self._rows:
            same_work = row.operation == operation and size in (None, row.size)
            if same_work and row.by == by and variant in (None, row.variant):
                return row
        return None

    def figure(self, operation: str, name: str) -> Figure | None:
        """Return the figure, None if it was not measured."""
        return next((figure for figure in self._figures if figure.key == (operation, name)), None)


def verdicts(rows: Sequence[Row], figures: Sequence[Figure], ranks: int, reads_neighbours: bool) -> list[Verdict]:
    """Return the verdict of every bar for which there are results.

    Args:
        rows, figures: The results of one run on one node.
        ranks: How many took part.
        reads_neighbours: Whether the ranks could read each other's memory and were free to choose how to reduce.
    """
    results = _Results(rows, figures)
    alone = [*_latency(results), *_figures(results)]
    if ranks == 1:
        return alone
    return [
        *_private_all_reduce(results, ranks, reads_neighbours),
        *_never_slower(results),
        *_own_all_reduce(results),
        *_resnet50(results),
        *alone,
    ]


def _speedup(what: str, theirs: Row | None, ours: Row | None, bar: float) -> list[Verdict]:
    if theirs is None or ours is None:
        return []
    return [Verdict(what, theirs.median / ours.median, bar, True, "x", ours.algorithm)]


def _cost(what: str, ours: Row | None, theirs: Row | None, bar: float) -> list[Verdict]:
    if theirs is None or ours is None:
        return []
    return [Verdict(what, ours.median / theirs.median, bar, False, "x", ours.algorithm)]


def _private_all_reduce(results: _Results, ranks: int, reads_neighbours: bool) -> list[Verdict]:
    """Return the verdicts of the large sizes; the bars were set for 2 and 4 ranks."""
    if ranks not in (2, 4):
        return []
    if reads_neighbours:
        bars, where = {16 * MIB: 1.5 if ranks == 2 else 1.3, 64 * MIB: 3.0}, "neighbours' memory readable"
    else:
        bars, where = {16 * MIB: 1.3, 64 * MIB: 2.3}, "neighbours' memory not used"
    found = []
    for size, bar in bars.items():
        bare = results.row("all_reduce", MPI, size=size)
        ours = results.row("all_reduce", OURS, "out=", size)
        found += _speedup(f"all_reduce, private, {size // MIB} MiB, {where}: as fast as MPI", bare, ours, bar)
    if ranks == 2 and reads_neighbours:
        copy = results.row("all_reduce", COPY, size=64 * MIB)
        ours = results.row("all_reduce", OURS, "out=", 64 * MIB)
        found += _cost("all_reduce, private, 64 MiB: time of one copy", ours, copy, 1.5)
    return found


def _never_slower(results: _Results) -> list[Verdict]:
    found = []
    for size in results.sizes("all_reduce"):
        bare = results.row("all_reduce", MPI, size=size)
        ours = results.row("all_reduce", OURS, "out=", size)
        if bare is None or ours is None:
            continue
        if size >= 256 * KIB:
            found += _speedup(f"all_reduce, private, {size_text(size)}: as fast as MPI", bare, ours, 1.0)
        else:
            over = ours.median - bare.median
            what = f"all_reduce, private, {size_text(size)}: over the bare call"
            found.append(Verdict(what, over, 10.0, False, "us", ours.algorithm))
    return found


def _own_all_reduce(results: _Results) -> list[Verdict]:
    found = []
    for size in results.sizes("all_reduce"):
        if size >= MIB:
            ours = results.row("all_reduce", OURS, "own", size)
            bare, copy = results.row("all_reduce", MPI, size=size), results.row("all_reduce", COPY, size=size)
            found += _speedup(f"all_reduce, own arrays, {size_text(size)}: as fast as MPI", bare, ours, 5.0)
            found += _cost(f"all_reduce, own arrays, {size_text(size)}: time of one copy", ours, copy, 1.0)
    return found


def _resnet50(results: _Results) -> list[Verdict]:
    size = size_of(MODELS["resnet50"]())
    bare = results.row("batch", MPI, "one call per array", size)
    gloo = results.row("batch", GLOO, size=size)
    found = []
    for variant, name, bars in (("own", "own arrays", (5.0, 10.0)), ("out=", "private", (1.5, 3.0))):
        ours = results.row("batch", OURS, variant, size)
        found += _speedup(f"gradients of ResNet-50, {name}: as fast as one MPI call per array", bare, ours, bars[0])
        found += _speedup(f"gradients of ResNet-50, {name}: as fast as gloo in 25 MiB buckets", gloo, ours, bars[1])
    return found


def _latency(results: _Results) -> list[Verdict]:
    found = []
    empty = results.row("run", OURS)
    if empty is not None:
        found.append(Verdict("strategy.run of an empty function", empty.median, 5.0, False, "us", "-"))
    bare, ours = results.row("scalar_all_reduce", MPI), results.row("scalar_all_reduce", OURS)
    if bare is not None and ours is not None:
        over = ours.median - bare.median
        what = "ctx.all_reduce of one number: over the bare call"
        found.append(Verdict(what, over, 10.0, False, "us", ours.algorithm))
    return found


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


def _figures(results: _Results) -> list[Verdict]:
    found = []
    for operation, name, what, bar in _FIGURE_BARS:
        figure = results.figure(operation, name)
        if figure is not None:
            found.append(Verdict(what, figure.value, bar, False, figure.unit, figure.algorithm))
    return found


def size_text(size: int) -> str:
    """Return a size in the largest unit that divides it.

    >>> size_text(64 << 20), size_text(1000)
    ('64 MiB', '1000 B')
    """
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
