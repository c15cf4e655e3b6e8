"""The current strategy and replica context of each thread, and their interfaces.

| in                           | get_strategy | has_strategy | get_replica_context | in_cross_replica_context |
|------------------------------|--------------|--------------|---------------------|--------------------------|
| no scope                     | default      | False        | default context     | False                    |
| ``default.run(fn)``          | default      | False        | default context     | False                    |
| ``with s.scope()``           | s            | True         | None                | True                     |
| ``s.run(fn)``                | s            | True         | context i           | False                    |
| merge_fn, update function    | s            | True         | None                | True                     |

The default strategy registers itself when its module is imported, on first use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from mpidist.core.lazy import imported
from mpidist.core.options import ReduceOp

Result = TypeVar("Result")
Value = TypeVar("Value")
# Arguments of a function that replicas call. In distributed values, each replica has a part.
Args = tuple[object, ...]
Kwargs = dict[str, object]


# The part of the strategies that lower modules use --------------------------------------------------------------------


class ReplicaContextLike(Protocol):
    """A ``mpidist.strategies.ReplicaContext``."""

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
        """The strategy of the replica."""

    def merge_call(
        self, merge_fn: Callable[..., Result], args: Sequence[object] = (), kwargs: dict[str, object] | None = None
    ) -> Result:
        """Run ``merge_fn`` once for all local replicas, in cross-replica context."""

    def meet(self, call: tuple[object, ...], merge_fn: Callable[..., Result], args: Args, kwargs: Kwargs) -> Result:
        """Run ``merge_call``. ``call`` must be equal on all local replicas."""

    def all_reduce(self, reduce_op: ReduceOp | str, value: Value) -> Value:
        """Reduce over all replicas."""

    def all_reduce_async(self, reduce_op: ReduceOp | str, value: object) -> Any:
        """Start to reduce over all replicas, and return a handle whose ``wait()`` returns the result."""


class StrategyLike(Protocol):
    """A ``mpidist.strategies.Strategy``."""

    @property
    def extended(self) -> Any:
        """The interface for library writers, a ``mpidist.strategies.StrategyExtended``."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose values are combined."""

    def scope(self) -> AbstractContextManager[object]:
        """Enter the strategy's scope."""


Strategy = TypeVar("Strategy", bound=StrategyLike)


# The stack of each thread ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Frame:
    """One entry of the stack. Without ``replica_context`` it is a cross-replica context."""

    strategy: StrategyLike
    replica_context: ReplicaContextLike | None = None
    update_replica_id: int | None = None


# The stacks of all threads. An ended thread's stack stays until its number is reused.
_stack_of_thread: dict[int, dict[str, Any]] = {}


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.global_frame: Frame | None = None
        self.creators: list[Callable[..., object]] = []
        _stack_of_thread[threading.get_ident()] = vars(self)


_stack = _Stack()
_default: list[Frame] = []


def register_default_strategy(strategy: StrategyLike, replica_context: ReplicaContextLike) -> None:
    """Register the strategy that :func:`get_strategy` returns outside of scopes."""
    if _default:
        raise RuntimeError("there is one default strategy; mpidist.get_strategy() returns it outside any scope")
    _default.append(Frame(strategy, replica_context))


def current_frame() -> Frame:
    """Return the innermost frame of this thread, or the default strategy's."""
    frames = _stack.frames
    if frames:
        return frames[-1]
    if not _default:
        imported("mpidist.strategies.default")
    return _default[0]


def replica_frame_elsewhere() -> Frame | None:
    """Return the frame of a replica that waits for this thread of a library.

    Returns None in threads that Python started.
    """
    # Python creates stand-ins (_DummyThread) for other threads when they query it.
    started = {of.ident for of in threading.enumerate() if not isinstance(of, threading._DummyThread)}
    if threading.get_ident() in started:
        return None
    tops = [stack["frames"][-1] for of, stack in list(_stack_of_thread.items()) if of in started and stack["frames"]]
    return next((frame for frame in tops if frame.replica_context is not None), None)


def push(frame: Frame) -> None:
    """Enter ``frame``."""
    _stack.frames.append(frame)


def pop(frame: Frame) -> None:
    """Leave ``frame``, which must be the innermost one."""
    frames = _stack.frames
    if not frames or frames[-1] is not frame:
        raise RuntimeError(
            "scope nesting error: a scope was left that is not the innermost one; "
            "leave scopes in the reverse order of entering them"
        )
    frames.pop()


def get_strategy() -> StrategyLike:
    """Return the current strategy of this thread, or the default strategy.

    >>> get_strategy().num_replicas_in_sync
    1
    """
    return current_frame().strategy


def is_default(strategy: StrategyLike) -> bool:
    """Return whether ``strategy`` is the default one."""
    return bool(_default) and strategy is _default[0].strategy


def has_strategy() -> bool:
    """Return whether the current strategy differs from the default one.

    >>> has_strategy()
    False
    """
    frames = _stack.frames
    return bool(frames) and not is_default(frames[-1].strategy)


def get_replica_context() -> ReplicaContextLike | None:
    """Return the context of the running replica, or None in cross-replica context.

    >>> get_replica_context().replica_id_in_sync_group
    0
    """
    return current_frame().replica_context


def in_cross_replica_context() -> bool:
    """Return whether code runs inside ``scope()``, a merge function or an update function.

    >>> in_cross_replica_context()
    False
    """
    return current_frame().replica_context is None


def get_loss_reduction() -> ReduceOp:
    """Return ``ReduceOp.SUM``, because losses must already be divided by the global batch size.

    >>> get_loss_reduction()
    <ReduceOp.SUM: 'SUM'>
    """
    return ReduceOp.SUM


def experimental_set_strategy(strategy: StrategyLike | None) -> None:
    """Set the current strategy of this thread without a ``with`` block.

    None sets the default strategy. Call it on every rank, because variables are created collectively afterwards. It
    replaces the strategy of an earlier call.

    Raises:
        RuntimeError: A scope is open.
    """
    frames = _stack.frames
    if len(frames) > (_stack.global_frame is not None):
        raise RuntimeError(
            "experimental_set_strategy() must not be called inside a scope, of "
            f"{type(frames[-1].strategy).__name__} here; leave the `with strategy.scope()` block first"
        )
    frames.clear()
    _stack.global_frame = None
    if strategy is not None and not is_default(strategy):
        _stack.global_frame = Frame(strategy)
        frames.append(_stack.global_frame)


@contextmanager
def scope(strategy: Strategy) -> Iterator[Strategy]:
    """Enter the cross-replica context of ``strategy``, with the rules of ``Strategy.scope``."""
    top = current_frame()
    if is_default(strategy):
        if not is_default(top.strategy):
            raise RuntimeError(
                f"the default strategy's scope must not nest inside that of {type(top.strategy).__name__}"
            )
        yield strategy
        return
    if not is_default(top.strategy):
        if top.strategy is not strategy:
            raise _mixing(top.strategy, strategy)
        if top.replica_context is not None:
            raise RuntimeError(
                "scope() requires cross-replica context, and this is inside strategy.run(); "
                "use get_replica_context().merge_call(fn) to get there"
            )
    frame = Frame(strategy)
    push(frame)
    try:
        yield strategy
    finally:
        pop(frame)


@contextmanager
def entered(frame: Frame) -> Iterator[None]:
    """Run the block inside ``frame``, in any context."""
    push(frame)
    try:
        yield
    finally:
        pop(frame)


@contextmanager
def outside() -> Iterator[None]:
    """Run the block outside of all scopes (for dataset_fn and value_fn)."""
    frames = _stack.frames
    _stack.frames = []
    try:
        yield
    finally:
        _stack.frames = frames


def in_scope_of(strategy: StrategyLike) -> AbstractContextManager[object]:
    """Return a block in the scope of ``strategy``, which may already be open."""
    is_inside = in_cross_replica_context() and get_strategy() is strategy
    return nullcontext() if is_inside else strategy.scope()


@contextmanager
def as_in_a_new_thread() -> Iterator[None]:
    """Run the block with the context of a new thread, and restore this thread's afterwards."""
    before = vars(_stack).copy()
    vars(_stack).update(frames=[], global_frame=None, creators=[])
    try:
        yield
    finally:
        vars(_stack).update(before)


def _mixing(active: StrategyLike, given: StrategyLike) -> RuntimeError:
    where = "run() or merge_call() of the default strategy; enter it there first: `with strategy.scope():`"
    if not is_default(active):
        where = f"the scope of {type(active).__name__}; build one strategy and use it throughout"
    return RuntimeError(f"mixing different strategies: {type(given).__name__} is used inside {where}")


def require_cross_replica(strategy: StrategyLike, method: str, instead: str) -> None:
    """Raise RuntimeError, with advice ``instead``, in replica context or in the scope of another strategy."""
    if may_cross_replicas(strategy):
        return
    top = current_frame()
    if top.strategy is not strategy:
        raise _mixing(top.strategy, strategy)
    raise RuntimeError(f"{method} was called in replica context, inside strategy.run(); {instead}")


def may_cross_replicas(strategy: StrategyLike) -> bool:
    """Return whether this is ``strategy``'s cross-replica context, or outside of all scopes."""
    frames = _stack.frames
    return not frames or (frames[-1].strategy is strategy and frames[-1].replica_context is None)


def require_scope(strategy: StrategyLike, method: str) -> None:
    """Raise RuntimeError outside of the cross-replica context of ``strategy``."""
    top = current_frame()
    if _stack.frames and top.strategy is not strategy:
        raise _mixing(top.strategy, strategy)
    if top.strategy is not strategy or (top.replica_context is not None and not is_default(strategy)):
        raise RuntimeError(f"{method} need to be inside `with strategy.scope()`")


def require_replica(context: ReplicaContextLike, method: str) -> None:
    """Raise RuntimeError unless ``context`` is the current replica context."""
    top = current_frame()
    if top.strategy is not context.strategy:
        raise RuntimeError(
            f"{method} requires the replica context of {type(context.strategy).__name__}, and the current "
            f"strategy is {type(top.strategy).__name__}; call it in the function given to strategy.run()"
        )
    if top.replica_context is not context:
        raise RuntimeError(
            f"{method} requires the replica context it belongs to; "
            "call it in the function given to strategy.run(), on mpidist.get_replica_context()"
        )


@contextmanager
def variable_creator_scope(variable_creator: Callable[..., object]) -> Iterator[None]:
    """Pass the creation of variables in the block through ``variable_creator(next_creator, **kwargs)``.

    >>> import mpidist
    >>> def name_it(next_creator, **kwargs):
    ...     return next_creator(**{**kwargs, "name": "named"})
    >>> with variable_creator_scope(name_it):
    ...     mpidist.Variable(1.0).name
    'named'
    """
    # Bound here, because Python may end an abandoned block in another run or thread.
    creators = _stack.creators
    creators.append(variable_creator)
    try:
        yield
    finally:
        creators.remove(variable_creator)


def variable_creators() -> list[Callable[..., object]]:
    """Return the active creators of this thread, outermost first."""
    return _stack.creators
