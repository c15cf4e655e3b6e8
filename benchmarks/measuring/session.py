"""Session: what all operations of one run share: communicators, gloo, the clock's budget, and the results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mpidist
from benchmarks.measuring import components
from benchmarks.measuring.gloo import Gloo
from benchmarks.measuring.rows import GLOO, Figure, Row, make_row
from benchmarks.measuring.timing import Case, Measured, measure
from mpidist.core.options import CommunicationOptions

if TYPE_CHECKING:
    from mpi4py import MPI

_LARGEST_SHARE_OF_MEMORY = 0.7


class Session:
    """One run of the suite (collective: make it on every rank).

    Args:
        base: The ranks that take part.
        seconds: About how long one point (an operation at a size) is measured.
        algorithm: Forces one of mpidist's algorithms; None leaves the choice to it.
        with_gloo: Whether to measure gloo too, if torch is installed.
        progress: Shows on rank 0 what is being measured.

    Attributes:
        bare: Duplicate communicator of the bare calls.
        comm: mpidist's communicator.
        components: Communicators that prefer a component of the MPI; see ``components``.
        gloo: See ``Gloo``.
        rows, figures: The results, the same on every rank.
        skipped: Points that were left out, with the reason.
    """

    def __init__(
        self,
        base: MPI.Intracomm,
        *,
        seconds: float = 0.5,
        algorithm: str | None = None,
        with_gloo: bool = True,
        progress: bool = True,
    ) -> None:
        self.bare = base.Dup()
        self.rank, self.ranks = self.bare.rank, self.bare.size
        self.options = CommunicationOptions(algorithm=algorithm)
        self.comm = mpidist.Communicator(self.bare, options=self.options)
        self.components = components.communicators(base)
        self.gloo = Gloo(self.bare, with_gloo)
        self.seconds = seconds
        self.rows: list[Row] = []
        self.figures: list[Figure] = []
        self.skipped: list[str] = [] if self.gloo.available else [f"gloo: {self.gloo.reason}"]
        absent = [name for name in components.NAMES if name not in self.components]
        self.skipped += [f"mpi, {name}: this MPI has no such component" for name in absent]
        self._shows = progress and self.rank == 0

    @classmethod
    def without_gloo(cls, base: MPI.Intracomm, seconds: float) -> Session:
        """Return a session for what gloo and those components have no part in, and that shows nothing (collective)."""
        session = cls(base, seconds=seconds, with_gloo=False, progress=False)
        session.skipped.clear()
        return session

    def renew(self) -> None:
        """Take a new communicator of mpidist, so that the memory of the last one is free again (collective)."""
        self.comm.close()
        self.comm = mpidist.Communicator(self.bare, options=self.options)

    def measure(self, operation: str, cases: Sequence[Case], **described: Any) -> None:
        """Time ``cases`` beside each other and keep a row of each (collective).

        Gloo's come after the others, by themselves: its threads would still be at work while the next is timed.

        Args:
            operation: See ``Row``.
            cases: What is timed.
            described: size, count, dtype, op of the rows.
        """
        measured = measure(self.bare, [case for case in cases if case.by != GLOO], self.seconds)
        of_gloo = [case for case in cases if case.by == GLOO and self.gloo.available]
        if of_gloo:
            with self.gloo.connected():
                measured += measure(self.bare, of_gloo, self.seconds)
        for one in measured:
            self.add_row(operation, one.case.variant, one, **described)

    def add_row(self, operation: str, variant: str, one: Measured, **described: Any) -> None:
        """Keep the row of what was measured; see :meth:`measure`."""
        found: dict[str, Any] = {"calls": one.calls, "wrong": one.wrong, "algorithm": one.algorithm}
        self.rows.append(make_row(operation, variant, one.case.by, one.times, ranks=self.ranks, **found, **described))

    def has_memory_for(self, nbytes: int, what: str) -> bool:
        """Whether every rank may take ``nbytes`` at once; where not, notes that ``what`` was skipped (collective)."""
        from mpi4py import MPI

        node = self.bare.Split_type(MPI.COMM_TYPE_SHARED)
        fits = nbytes * node.size < _LARGEST_SHARE_OF_MEMORY * available_memory()
        node.Free()
        agreed: bool = self.bare.allreduce(fits, op=MPI.LAND)
        if not agreed:
            self.skipped.append(f"{what}: {nbytes >> 20} MiB per rank are more than the memory that is free")
        return agreed

    def last_algorithm(self) -> str:
        """Return which algorithm the last all-reduce of mpidist took, "-" where it does not say."""
        return algorithm_of(self.comm)

    @contextmanager
    def progress_over(self, points: int) -> Iterator[Callable[[str], None]]:
        """Provide what to call with the name of each of ``points`` points; on rank 0 it moves a progress bar."""
        bar_type = _progress_bar() if self._shows else None
        if bar_type is None:
            yield lambda _: None
            return
        # No thread that wakes up now and then: it would do so while something is timed.
        bar_type.monitor_interval = 0
        with bar_type(total=points, file=sys.stderr, leave=False, dynamic_ncols=True, disable=None) as bar:

            def advance(name: str) -> None:
                bar.set_postfix_str(name, refresh=False)
                bar.update()

            yield advance

    def close(self) -> None:
        """Give everything back (collective)."""
        self.comm.close()
        for comm in (*self.components.values(), self.bare):
            comm.Free()


def _progress_bar() -> Any:
    """Return tqdm, None where it is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm


def algorithm_of(comm: Any) -> str:
    """Return which algorithm the last all-reduce of ``comm`` took, "-" where it does not say."""
    return getattr(comm, "last_algorithm", None) or "-"


def algorithm_in(strategy: mpidist.Strategy) -> str:
    """Return which algorithm the last all-reduce of a strategy took, "-" where it does not say."""
    return algorithm_of(getattr(strategy.extended, "_comm", None))


def available_memory() -> int:
    """Return how many bytes this machine can still give."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/meminfo has no line MemAvailable; the benchmarks need Linux 3.14 or newer")
