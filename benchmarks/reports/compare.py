"""The comparison of two result files: how many times as fast each row of the second is."""

from __future__ import annotations

from benchmarks.measuring.sizes import size_text
from benchmarks.reports.files import Results
from benchmarks.reports.text import aligned

# What makes times of two runs comparable.
_SAME = ("cpu", "cores", "system", "mpi", "ranks", "nodes")


def compare(first: Results, second: Results) -> str:
    """Return the table of what both runs measured: times in microseconds, and first / second.

    A ratio above 1 says that the second run was faster. What only one of them measured is listed below.
    """
    differs = [name for name in _SAME if first.machine.get(name) != second.machine.get(name)]
    parts = [f"# {name} differs: {first.machine.get(name)} and {second.machine.get(name)}" for name in differs]
    old, new = {row.key: row for row in first.rows}, {row.key: row for row in second.rows}
    lines = [
        (
            *(a.operation, a.by, a.variant, size_text(a.size)),
            *(f"{a.median:.2f}", f"{b.median:.2f}", f"{a.median / b.median:.2f}"),
            *(a.algorithm, b.algorithm),
        )
        for key, a in old.items()
        if (b := new.get(key)) is not None
    ]
    header = ("operation", "by", "variant", "size", "first", "second", "ratio", "algorithm", "second's")
    left = ("operation", "by", "variant", "algorithm", "second's")
    parts.append(aligned(header, lines, left))
    old_figures, new_figures = {f.key: f for f in first.figures}, {f.key: f for f in second.figures}
    figures = [
        (*key, f"{a.value:.4g}", f"{new_figures[key].value:.4g}", a.unit)
        for key, a in old_figures.items()
        if key in new_figures
    ]
    if figures:
        parts += ["", aligned(("operation", "figure", "first", "second", "unit"), figures, ("operation", "figure"))]
    parts += _only("first", [*old, *old_figures], [*new, *new_figures])
    parts += _only("second", [*new, *new_figures], [*old, *old_figures])
    return "\n".join(parts)


def _only(which: str, here: list[tuple[object, ...]], there: list[tuple[object, ...]]) -> list[str]:
    return [f"# only in the {which}: {' '.join(map(str, key))}" for key in here if key not in set(there)]
