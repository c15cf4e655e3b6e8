"""The stack of contexts, one per thread: the current strategy and replica context.

| where                        | get_strategy | has_strategy | get_replica_context | in_cross_replica_context |
|------------------------------|--------------|--------------|---------------------|--------------------------|
| nothing active               | default      | False        | default context     | False                    |
| inside ``default.run(fn)``   | default      | False        | default context     | False                    |
| ``with s.scope()``           | s            | True         | None                | True                     |
| inside ``s.run(fn)``         | s            | True         | context i           | False                    |
| merge_fn, update function    | s            | True         | None                | True                     |

The default strategy registers itself when its module is imported, which happens on first use: this room needs no other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from mpidist.core.enums import ReduceOp
from mpidist.core.first_use import imported
from mpidist.core.protocols import ReplicaContextLike, StrategyLike

Strategy = TypeVar("Strategy", bound=StrategyLike)


class Frame:
    """One entry of the stack; ``replica_context`` None means cross-replica context."""

    __slots__ = ("replica_context", "strategy", "update_replica_id")

    def __init__(
        self,
        strategy: StrategyLike,
        replica_context: ReplicaContextLike | None = None,
        update_replica_id: int | None = None,
    ) -> None:
        self.strategy = strategy
        self.replica_context = replica_context
        self.update_replica_id = update_replica_id


# The stack of each thread by its number; that of a thread which has ended is there until another gets its number.
_stack_of_thread: dict[int, dict[str, Any]] = {}


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.global_frame: Frame | None = None
        self.creators: list[Callable[..., object]] = []
        _stack_of_thread[threading.get_ident()] = vars(self)


_stack = _Stack()
_default: list[Frame] = []
_HOME_OF_DEFAULT = "mpidist.strategies.default"


def register_default_strategy(strategy: StrategyLike, replica_context: ReplicaContextLike) -> None:
    """Make ``strategy`` the result of :func:`get_strategy` where nothing is active."""
    _default[:] = [Frame(strategy, replica_context)]


def current_frame() -> Frame:
    """Return the innermost frame of this thread, or the default strategy's."""
    frames = _stack.frames
    if frames:
        return frames[-1]
    if not _default:
        imported(_HOME_OF_DEFAULT)
    return _default[0]


def replica_frame_elsewhere() -> Frame | None:
    """Return the frame of a replica that waits for this thread, or None.

    A library has started the thread outside of Python. Of several replicas that of the thread which was the first to
    run one. None where there is none, and in other threads, which have frames of their own.
    """
    # Those that Python has started; for others it makes stand-ins when they ask for themselves.
    started = {of.ident for of in threading.enumerate() if not isinstance(of, threading._DummyThread)}
    if threading.get_ident() in started:
        return None
    tops = [stack["frames"][-1] for of, stack in list(_stack_of_thread.items()) if of in started and stack["frames"]]
    return next((frame for frame in tops if frame.replica_context is not None), None)


def push(frame: Frame) -> None:
    """Enter ``frame``."""
    _stack.frames.append(frame)


def pop(frame: Frame) -> None:
    """Leave ``frame``.

    Raises:
        RuntimeError: It is not the innermost one.
    """
    frames = _stack.frames
    if not frames or frames[-1] is not frame:
        raise RuntimeError(
            "scope nesting error: a scope was left that is not the innermost one; "
            "leave scopes in the reverse order of entering them"
        )
    frames.pop()


def get_strategy() -> StrategyLike:
    """Return the current strategy of this thread, the default strategy where none is active.

    >>> get_strategy().num_replicas_in_sync
    1
    """
    return current_frame().strategy


def is_default(strategy: StrategyLike) -> bool:
    """Return whether ``strategy`` is the default one."""
    return bool(_default) and strategy is _default[0].strategy


def has_strategy() -> bool:
    """Return whether the current strategy is another than the default one.

    >>> has_strategy()
    False
    """
    frames = _stack.frames
    return bool(frames) and not is_default(frames[-1].strategy)


def get_replica_context() -> ReplicaContextLike | None:
    """Return the context of the replica that runs, or None in cross-replica context.

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
    """Return ``ReduceOp.SUM``: losses are expected to be divided by the global batch size already.

    >>> get_loss_reduction()
    <ReduceOp.SUM: 'SUM'>
    """
    return ReduceOp.SUM


def experimental_set_strategy(strategy: StrategyLike | None) -> None:
    """Make ``strategy`` current for this thread without a ``with`` block.

    None goes back to the default. Call it on every rank (variables created afterwards are created collectively). A
    strategy that an earlier call has set is left first.

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
    """Enter the cross-replica context of ``strategy``: the rules of ``Strategy.scope``.

    Raises:
        RuntimeError: Another strategy's scope is open, or this is a replica context.
    """
    frames, top = _stack.frames, current_frame()
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
    frames.append(frame)
    try:
        yield strategy
    finally:
        pop(frame)


@contextmanager
def entered(frame: Frame) -> Iterator[None]:
    """Run the block inside ``frame``, whatever was active before."""
    _stack.frames.append(frame)
    try:
        yield
    finally:
        pop(frame)


@contextmanager
def outside() -> Iterator[None]:
    """Run the block as if no strategy were active (for dataset_fn and value_fn)."""
    frames = _stack.frames
    _stack.frames = []
    try:
        yield
    finally:
        _stack.frames = frames


def in_scope_of(strategy: StrategyLike) -> AbstractContextManager[object]:
    """Return a block in which ``strategy`` is in scope, which it may be already."""
    is_inside = in_cross_replica_context() and get_strategy() is strategy
    return nullcontext() if is_inside else strategy.scope()


@contextmanager
def as_in_a_new_thread() -> Iterator[None]:
    """Run the block as a thread begins, and leave nothing of it to the thread."""
    before = vars(_stack).copy()
    vars(_stack).update(frames=[], global_frame=None, creators=[])
    try:
        yield
    finally:
        vars(_stack).update(before)


def _mixing(active: StrategyLike, given: StrategyLike) -> RuntimeError:
    if is_default(active):
        return RuntimeError(
            f"mixing different strategies: {type(given).__name__} is used inside run() or merge_call() of the default "
            "strategy; enter it there first: `with strategy.scope():`"
        )
    return RuntimeError(
        f"mixing different strategies: {type(given).__name__} is used inside the scope of "
        f"{type(active).__name__}; build one strategy and use it throughout"
    )


def require_cross_replica(strategy: StrategyLike, method: str, instead: str) -> None:
    """Raise RuntimeError unless in ``strategy``'s cross-replica context or where nothing is active.

    Args:
        strategy: Whose method it is.
        method: Name of the method, for the message.
        instead: The call to make in replica context.
    """
    frames = _stack.frames
    if not frames:
        return
    top = frames[-1]
    if top.strategy is not strategy:
        raise _mixing(top.strategy, strategy)
    if top.replica_context is not None:
        raise RuntimeError(f"{method} was called in replica context, inside strategy.run(); {instead}")


def require_scope(strategy: StrategyLike, method: str) -> None:
    """Raise RuntimeError unless ``strategy``'s scope (or its cross-replica context) is entered."""
    top = current_frame()
    if is_default(strategy) and top.strategy is strategy:
        return
    if top.strategy is not strategy or top.replica_context is not None:
        if _stack.frames and top.strategy is not strategy:
            raise _mixing(top.strategy, strategy)
        raise RuntimeError(f"{method} need to be inside `with strategy.scope()`")


def require_replica(context: ReplicaContextLike, method: str) -> None:
    """Raise RuntimeError unless ``context`` is the replica context that is current."""
    top = current_frame()
    if top.replica_context is context:
        return
    if top.strategy is not context.strategy:
        raise RuntimeError(
            f"{method} requires the replica context of {type(context.strategy).__name__}, and the current "
            f"strategy is {type(top.strategy).__name__}; call it in the function given to strategy.run()"
        )
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
    # A block that was never left is ended whenever Python collects it, in any run or thread.
    creators = _stack.creators
    creators.append(variable_creator)
    try:
        yield
    finally:
        creators.remove(variable_creator)


def variable_creators() -> list[Callable[..., object]]:
    """Return the creators that are active in this thread, outermost first."""
    return _stack.creators
