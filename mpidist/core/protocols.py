"""The interfaces of strategies and contexts as lower rooms see them, without importing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from mpidist.core.enums import ReduceOp
from mpidist.core.options import CommunicationOptions, RunOptions

Result = TypeVar("Result")
Value = TypeVar("Value")
# Of a function that replicas call; distributed values in them stand for the part of each replica.
Args = tuple[object, ...]
Kwargs = dict[str, object]


class ReplicaContextLike(Protocol):
    """The part of a ReplicaContext that values and inputs use."""

    @property
    def replica_id_in_sync_group(self) -> int:
        """Global id of this replica."""

    @property
    def local_replica_id(self) -> int:
        """Index of this replica among those of its rank."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose values are combined."""

    @property
    def strategy(self) -> StrategyLike:
        """The strategy that the replica runs under."""

    def merge_call(
        self, merge_fn: Callable[..., Result], args: Sequence[object] = (), kwargs: dict[str, object] | None = None
    ) -> Result:
        """Run ``merge_fn`` once for all local replicas, in cross-replica context."""

    def meet(self, call: tuple[object, ...], merge_fn: Callable[..., Result], args: Args, kwargs: Kwargs) -> Result:
        """Do the work of ``merge_call``; ``call`` must be equal on all local replicas."""

    def all_reduce(self, reduce_op: ReduceOp | str, value: Value) -> Value:
        """Reduce over all replicas."""

    def all_reduce_async(self, reduce_op: ReduceOp | str, value: object) -> Any:
        """Start reducing over all replicas, and return a handle whose ``wait()`` gives the result."""


class ExtendedLike(Protocol):
    """The part of a StrategyExtended that values, inputs and training use."""

    @property
    def local_replica_ids(self) -> tuple[int, ...]:
        """Global ids of the replicas of this rank."""

    @property
    def worker_devices_by_replica(self) -> tuple[tuple[str, ...], ...]:
        """Devices of each replica of this rank."""

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank writes checkpoints."""

    @property
    def variable_names(self) -> Any:
        """The names of its variables (a VariableNames)."""

    @property
    def is_central(self) -> bool:
        """Whether each variable has one copy, which all replicas share."""

    def create_variable(self, array: Any, **properties: object) -> Any:
        """Create a variable as the strategy keeps it (collective)."""

    def reduce_pairs(
        self,
        op: ReduceOp,
        pairs: Sequence[tuple[object, object]],
        options: CommunicationOptions | None = None,
        note: str = "",
    ) -> list[Any]:
        """Reduce many values. ``note`` describes their use; all ranks must agree on it."""

    def broadcast_nest(self, value: Value, root: int = 0, note: str = "") -> Value:
        """Return, on every rank, the nest of arrays that rank ``root`` passed (collective)."""

    def shared_errors(self, doing: str) -> AbstractContextManager[None]:
        """Return a block around rank-local work whose errors every rank learns of."""

    def announce(self, error: Exception, doing: str) -> None:
        """Announce an error to the other ranks that replaces this rank's collective."""

    def step_agreement(self) -> Any:
        """Return the object by which ranks agree on a step (collective)."""

    def changing(self, label: str, what: str, checksum: Callable[[], int]) -> AbstractContextManager[None]:
        """Return a block in which each rank changes its own copy. The ranks compare the copies afterwards."""

    def done(self, label: str, what: str, checksum: Callable[[], int]) -> None:
        """Compare the ranks' results of rank-local work where there is no state to compare."""


class StrategyLike(Protocol):
    """The part of a Strategy that lower rooms use."""

    @property
    def extended(self) -> ExtendedLike:
        """The interface for library writers."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose values are combined."""

    def scope(self) -> AbstractContextManager[object]:
        """Make the strategy current."""

    def reduce(self, reduce_op: ReduceOp | str, value: Value, axis: int | tuple[int, ...] | None) -> Value:
        """Reduce a value over replicas."""

    def run(
        self,
        fn: Callable[..., Result],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
        options: RunOptions | None = None,
    ) -> Result:
        """Call ``fn`` once per local replica."""

    def experimental_local_results(self, value: Value) -> tuple[Value, ...]:
        """Return the components of this rank."""
