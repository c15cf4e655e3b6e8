"""Comparing: predictions beside what was measured, and their error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.measuring.rows import OURS, Row
from benchmarks.measuring.sizes import MIB, size_text
from benchmarks.predicting.reductions import LEADERS, Prediction, predicted
from mpidist.collectives.reduce.cost_model import Network
from mpidist.collectives.reduce.registry import wire_algorithms

# The most that a prediction may be off, from so many bytes on.
BARS = ((MIB, 0.15), (0, 0.3))
_FORCED = "algorithm="


class Compared(NamedTuple):
    """One measured all-reduce beside its prediction."""

    prediction: Prediction
    """Of the algorithm that ran."""
    variant: str
    """Of the row: how the ranks were placed."""
    measured: float
    """Seconds, the median."""
    chosen: str
    """The algorithm that the model would have taken."""

    @property
    def error(self) -> float:
        """By how much of the measured time the prediction is longer."""
        return self.prediction.seconds / self.measured - 1

    @property
    def bar(self) -> float:
        """The largest error that is let pass."""
        return next(bar for size, bar in BARS if self.prediction.nbytes >= size)


def compared(rows: Iterable[Row], nodes: int, network: Network) -> tuple[list[Compared], list[str]]:
    """Return mpidist's all-reduces of a run on so many nodes beside their predictions.

    Beside them, what was left out, with the reason.
    """
    found, left_out = [], []
    for row in rows:
        if row.operation != "all_reduce" or row.by != OURS:
            continue
        reason = _problem(row, nodes)
        if reason is None:
            found.append(_beside(row, network, nodes))
        else:
            left_out.append(f"{row.variant}, {row.size} bytes, {row.algorithm}: {reason}")
    return found, left_out


def _problem(row: Row, nodes: int) -> str | None:
    """Return why a row cannot be predicted, None where it can."""
    if nodes < 2:
        return "it was measured on one node"
    if row.ranks % nodes or "uneven" in row.variant:
        return "nodes have different numbers of ranks"
    if "wire_dtype=" in row.variant:
        return "the model has no 16-bit wire"
    return None if row.algorithm in (LEADERS, *wire_algorithms.costs) else "the model does not know that algorithm"


def _beside(row: Row, network: Network, nodes: int) -> Compared:
    place = network, nodes, row.ranks // nodes, row.size
    chosen = row.algorithm if _FORCED in row.variant else predicted(*place).algorithm
    return Compared(predicted(*place, algorithm=row.algorithm), row.variant, row.median / 1e6, chosen)


def summary(all_compared: Sequence[Compared]) -> list[str]:
    """Return, for sizes with one bar each, how many predictions pass it and the largest error."""
    lines, upper = [], None
    for size, bar in BARS:
        errors = [abs(each.error) for each in all_compared if each.bar == bar]
        if errors:
            passed = sum(error <= bar for error in errors)
            sizes = f"from {size_text(size)}" if upper is None else f"below {size_text(upper)}"
            lines.append(
                f"{sizes}: {passed} of {len(errors)} within {bar:.0%}, largest error {max(errors):.1%}, "
                f"median {sorted(errors)[len(errors) // 2]:.1%}"
            )
        upper = size
    return lines
