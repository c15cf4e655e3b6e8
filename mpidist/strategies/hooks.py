"""StrategyHooks: what a strategy has to provide; those that raise NotImplementedError here it has to fill in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from mpidist.arrays.convert import Array
from mpidist.cluster_resolver import ClusterResolver
from mpidist.collectives.watch.step_agreement import StepAgreement
from mpidist.core.context import Frame
from mpidist.core.enums import ReduceOp
from mpidist.core.options import CommunicationOptions
from mpidist.input import InputWorkers
from mpidist.values import Variable
from mpidist.values.placement import Place
from mpidist.values.variable_names import VariableNames

if TYPE_CHECKING:
    from mpidist.strategies.extended import StrategyExtended
    from mpidist.strategies.replica_context import ReplicaContext
    from mpidist.strategies.strategy import Strategy


class StrategyHooks:
    """The facts of a strategy, which anyone may ask, and the hooks, which do the work of its public methods.

    Args:
        strategy: The strategy it belongs to.
    """

    _cluster_resolver: ClusterResolver | None = None
    # Whether values are PerReplica even with one replica on a rank (ranks then differ in their numbers).
    _wraps_lone_replica = False
    # What is current in its scopes and merge functions; None for the host alone.
    _first_gpu: Place | None = None

    _is_central = False

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._frame = Frame(strategy)
        self._variable_names = VariableNames()

    # Facts ----------------------------------------------------------------------------------------------------

    @property
    def local_replica_ids(self) -> tuple[int, ...]:
        """Global ids of the replicas of this rank. Extension."""
        raise NotImplementedError

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Devices of the replicas of this rank."""
        raise NotImplementedError

    @property
    def worker_devices_by_replica(self) -> tuple[tuple[str, ...], ...]:
        """Devices of each replica of this rank."""
        return tuple((device,) for device in self.worker_devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Devices that variables are put on."""
        return self.worker_devices

    @property
    def experimental_require_static_shapes(self) -> bool:
        """False: shapes may change from step to step."""
        return False

    @property
    def experimental_between_graph(self) -> bool:
        """Whether several ranks run the program; always true of a CentralStorageStrategy, as in TensorFlow."""
        return self._spans_ranks()

    @property
    def experimental_should_init(self) -> bool:
        """True: every rank initializes its variables."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank writes checkpoints. Reading ON_READ variables still takes all ranks."""
        return True

    @property
    def should_save_summary(self) -> bool:
        """Whether this rank writes summaries."""
        return self.should_checkpoint

    # Hooks ----------------------------------------------------------------------------------------------------

    @property
    def _num_replicas_in_sync(self) -> int:
        raise NotImplementedError

    def _require_checkpoints(self, method: str) -> None:
        """Raise RuntimeError where this rank takes no part in checkpoints; those of most strategies all do."""

    def _in_multi_worker_mode(self) -> bool:
        return False

    def _spans_ranks(self) -> bool:
        """Whether several ranks run the program."""
        return self._in_multi_worker_mode()

    def _use_merge_call(self) -> bool:
        """Whether reductions in replica context need the other local replicas to be collected first."""
        return len(self.local_replica_ids) > 1

    def _get_replica_id_in_sync_group(self, local_replica_id: int) -> int:
        return self.local_replica_ids[local_replica_id]

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return self.local_replica_ids.index(replica_id_in_sync_group)

    def _create_variable(self, **kwargs: Any) -> Variable:
        raise NotImplementedError

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        raise NotImplementedError

    def _batch_reduce_to(
        self,
        op: ReduceOp,
        pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None,
        structure: str = "",
    ) -> list[Any]:
        """Reduce many values; ``structure`` says what they belong to, which all ranks must agree on."""
        raise NotImplementedError

    def _gather_to_implementation(
        self, leaves: Sequence[Any], axis: int, structure: str, options: CommunicationOptions | None = None
    ) -> list[Any]:
        raise NotImplementedError

    def _gather_bytes(self, data: Array, doing: str) -> Array:
        """Return the bytes of all ranks, one after the other (collective); ``doing`` is the same on all.

        Args:
            data: A vector of uint8; of any length, which may differ from rank to rank.
            doing: Says what for.
        """
        del doing
        return data

    def _broadcast_to(self, tensor: Any, destinations: Any, root: int) -> Any:
        raise NotImplementedError

    def _broadcast_from_first(self, value: Any, doing: str = "") -> Any:
        raise NotImplementedError

    def _replica_ctx_all_reduce(
        self, ctx: ReplicaContext, op: ReduceOp, value: Any, options: CommunicationOptions | None, out: Any
    ) -> Any:
        raise NotImplementedError

    def _replica_ctx_all_reduce_async(
        self, ctx: ReplicaContext, op: ReduceOp, value: Any, options: CommunicationOptions | None, out: Any
    ) -> Any:
        raise NotImplementedError

    def _replica_ctx_all_gather(
        self, ctx: ReplicaContext, value: Any, axis: int, options: CommunicationOptions | None
    ) -> Any:
        raise NotImplementedError

    def _input_workers(self) -> InputWorkers:
        raise NotImplementedError

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        raise NotImplementedError

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any) -> Any:
        raise NotImplementedError

    def _experimental_distribute_values_from_function(self, value_fn: Callable[..., Any]) -> Any:
        raise NotImplementedError

    def _empty(self, shape: int | Sequence[int], dtype: Any, device: str) -> Any:
        raise NotImplementedError

    def _apply_gradients(self, optimizer: Any, summed: Iterable[tuple[list[Any], list[Variable]]]) -> None:
        """Update variables by summed gradients, with ``optimizer`` (a mpidist.training.Optimizer), in update context.

        Args:
            optimizer: Whose slots exist.
            summed: Gradients and their variables, as they come in.
        """
        optimizer.update_copies(summed)

    def _shared_errors(self, doing: str) -> AbstractContextManager[None]:
        """Return a block around rank-local work whose errors every rank should learn of."""
        del doing
        return nullcontext()

    def _step_agreement(self) -> StepAgreement:
        """Return what lets the ranks agree on a step (collective over the ranks of the strategy)."""
        return StepAgreement(None)

    def _agree_on(self, text: Callable[[], str]) -> None:
        """Return once all ranks of the strategy have said the same (collective); else raise MismatchError.

        Args:
            text: Called where there are other ranks; says what is being done, and with what.
        """

    def _changing(self, label: str, what: str, checksum: Callable[[], int]) -> AbstractContextManager[None]:
        """Return a block that changes what the ranks have in common, for each by itself; they compare it afterwards.

        Args:
            label: What is changed, the same on all ranks.
            what: How, as in "assign of variable 'w'".
            checksum: Called where other ranks have copies of their own.
        """
        del label, what, checksum
        return nullcontext()

    def _done(self, label: str, what: str, checksum: Callable[[], int]) -> None:
        """Have the ranks compare what each has done by itself, where there is no state to be compared; see above."""

    def _distributed(self, value: Any) -> Any:
        """Return the components of a variable as a distributed value; other values unchanged."""
        return value.value() if isinstance(value, Variable) else value

    def _announce(self, error: Exception, doing: str) -> None:
        """Tell the other ranks of an error that is about to be raised in place of a collective."""

    def _copy_for(self, strategy: Strategy) -> StrategyExtended:
        raise NotImplementedError

    def _close(self) -> None:
        """Free what is held."""
