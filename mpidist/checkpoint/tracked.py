"""TrackedObjects: the objects of a Checkpoint, and how the ranks save and restore them together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpidist.arrays.convert import Array
from mpidist.checkpoint.agreement import Agreement, extended_of
from mpidist.checkpoint.alignment import align, give_shape
from mpidist.checkpoint.collecting import collect
from mpidist.checkpoint.leaves import Leaves
from mpidist.checkpoint.manifest import Manifest
from mpidist.checkpoint.restoring import Read, check_fit_of_all, fill, read_newest, restore_iterators
from mpidist.checkpoint.saving import Save, SaveOptions
from mpidist.checkpoint.status import LoadStatus, Waiting
from mpidist.checkpoint.storage import Found, checkpoints_in
from mpidist.core.context import get_replica_context, get_strategy, has_strategy, in_scope_of, outside
from mpidist.core.protocols import StrategyLike


class TrackedObjects:
    """What a Checkpoint, its manager and others work with; most methods are collective.

    Args:
        objects: By name.

    Attributes:
        objects: By name, as the program has set them.
        save_counter: Number of saves so far, those before a restore included.
        run_calls: Counted by PreemptionCheckpointHandler, in all runs of the program.
    """

    def __init__(self, objects: dict[str, Any]) -> None:
        self.objects = objects
        self.save_counter = 0
        self.run_calls = 0
        # The last sequence number in each directory.
        self._sequences: dict[Path, int] = {}
        self._unsettled: Save | None = None
        self._waiting: Waiting | None = None
        self._last_leaves = collect(objects)

    def set(self, name: str, value: Any) -> None:
        """Let ``value`` be the object of a name, if a checkpoint can hold it."""
        collect({name: value})
        self.objects[name] = value

    def strategy(self, method: str) -> StrategyLike:
        """Return the strategy that the objects are saved or restored under, after checking the context."""
        return _strategy_of(self.collect("using"), method)

    def collect(self, action: str) -> Leaves:
        """Return all parts."""
        with self.shared_errors(action):
            self._last_leaves = leaves = collect(self.objects)
        return leaves

    def collect_to_save(self, action: str) -> Leaves:
        """Return all parts, and what is waiting for parts that are yet to come."""
        leaves = self.collect(action)
        with self.shared_errors(action):
            if self._waiting is not None:
                self._waiting.look_at_all()
                self._waiting.add_to(leaves)
            leaves.check_given()
        return leaves

    @contextmanager
    def shared_errors(self, action: str) -> Iterator[None]:
        """Let the other ranks learn of what goes wrong in the block on this one, before it meets them."""
        try:
            yield
        except Exception as error:
            # Lists and dicts may have changed on this rank alone; the others are those of the last time.
            strategy = _strategy_of(self._last_leaves, f"{action} a checkpoint")
            extended_of(strategy)._announce(error, action)
            raise

    # Saving -------------------------------------------------------------------------------------------------------

    def save(self, path: Path, number: int, options: SaveOptions) -> str:
        """Save a checkpoint, or begin to, and return its path on the chief."""
        leaves = self.collect_to_save("saving")
        strategy = _strategy_of(leaves, "save()")
        agreement = Agreement(strategy, "saving", f"checkpoint {path}")
        with in_scope_of(strategy):
            save = Save(agreement, leaves, path, options)
            save.start(lambda: self._next_sequence(path.parent), number, self.run_calls)
            if options.is_async:
                self._unsettled = save
                save.counter_before = self.save_counter
            else:
                save.settle()
        self.save_counter = number
        return save.path

    def wait(self) -> None:
        """Settle the save that a thread writes."""
        unsettled = self._unsettled
        if unsettled is None:
            return
        _check_context("wait()")
        self._unsettled = None
        try:
            unsettled.settle()
        except BaseException:
            self.save_counter = unsettled.counter_before
            raise

    def _next_sequence(self, directory: Path) -> int:
        if directory not in self._sequences:
            found = checkpoints_in(directory).checkpoints
            self._sequences[directory] = found[-1][1].sequence if found else 0
        self._sequences[directory] += 1
        return self._sequences[directory]

    # Restoring ----------------------------------------------------------------------------------------------------

    def restore_newest(self, find: Callable[[], Found], directory: str) -> tuple[LoadStatus | None, dict[str, str]]:
        """Restore the newest checkpoint that is whole, of those that ``find`` finds; see :meth:`restore`."""
        return self.restore(lambda: read_newest(find), f"the latest checkpoint of {directory}")

    def restore(self, read: Callable[[], Read | None], subject: str) -> tuple[LoadStatus | None, dict[str, str]]:
        """Return the status, None where there is no checkpoint, and the checkpoints that could not be used.

        Args:
            read: Called on the chief.
            subject: Says what is restored, for messages.
        """
        self.wait()
        leaves = self.collect("restoring")
        strategy = _strategy_of(leaves, "restore()")
        agreement = Agreement(strategy, "restoring", subject)
        arrays: dict[str, Array] = {}

        def read_on_chief() -> Any:
            answer = read()
            if answer is None:
                return None
            arrays.update(answer.arrays)
            return str(answer.path), answer.manifest.to_json(), answer.unusable

        with in_scope_of(strategy):
            answer = agreement.chief_does(read_on_chief)
            if answer is None:
                return None, {}
            path, content, unusable = answer
            manifest = Manifest.from_json(content, path)
            aligned = align(manifest, leaves)
            check_fit_of_all(agreement, leaves, aligned, path, arrays)
            restore_iterators(agreement, leaves, aligned.manifest)
            if give_shape(leaves, aligned.manifest):
                leaves = collect(self.objects)
            filled = fill(agreement, leaves, aligned, arrays)
        if self._waiting is not None:
            self._waiting.end()
        self._waiting = Waiting(path, self.objects, manifest, filled.waiting) if filled.waiting else None
        self.save_counter, self.run_calls = manifest.number, manifest.run_calls
        status = LoadStatus(path, filled.missing, filled.unused, filled.deferred, self._waiting, filled.is_any)
        return status, unusable

    def warn_of_unusable(self, unusable: dict[str, str], used: str) -> None:
        """Let the chief say which checkpoints were passed over, at the line that called the method around this."""
        if unusable and self.strategy("restore()").extended.should_checkpoint:
            reasons = "; ".join(f"{path} ({reason})" for path, reason in unusable.items())
            warnings.warn(f"checkpoints that cannot be used: {reasons}; restored {used} instead", stacklevel=3)


def _check_context(method: str) -> None:
    if has_strategy() and get_replica_context() is not None:
        raise RuntimeError(f"Checkpoint.{method} was called inside strategy.run(); call it outside, on every rank")


def _strategy_of(leaves: Leaves, method: str) -> StrategyLike:
    _check_context(method)
    with outside():
        default = get_strategy()
    strategies = {v.distribute_strategy for v in leaves.variables.values()} - {default}
    if has_strategy():
        strategies.add(get_strategy())
    if len(strategies) > 1:
        names = sorted(type(strategy).__name__ for strategy in strategies)
        raise ValueError(
            f"Checkpoint.{method} involves the strategies {names}; expected variables of one strategy, the current "
            "one: make a checkpoint for each"
        )
    strategy = strategies.pop() if strategies else default
    extended_of(strategy)._require_checkpoints(method if method[0].isupper() else f"Checkpoint.{method}")
    return strategy
