"""What optimizers refuse, and what they say then: variables of other strategies or dtypes, learning rates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

from mpidist.core.context import get_strategy, has_strategy
from mpidist.values import Variable
from mpidist.values.composite import AnyVariable

if TYPE_CHECKING:
    from mpidist.strategies import Strategy

_UNDER_ONE_STRATEGY = (
    "expected: one strategy for all; create variables and optimizer inside `with strategy.scope():` of the strategy "
    "whose run() uses them"
)


def check_is_float(variable: AnyVariable) -> None:
    """Raise TypeError unless a variable holds numbers that can change by fractions."""
    if variable.dtype.kind != "f" and variable.dtype.name != "bfloat16":
        raise TypeError(
            f"variable {variable.name!r} has dtype {variable.dtype}; an optimizer expects floating-point variables, "
            "for example mpidist.Variable(np.zeros(2)) or mpidist.Variable(0.0)"
        )


def check_schedule(schedule: Callable[..., float]) -> None:
    """Raise TypeError unless a learning rate that is a function can be called with the step."""
    try:
        signature = inspect.signature(schedule)
    except (TypeError, ValueError):
        return  # some callables of C libraries do not tell
    try:
        signature.bind(0)
    except TypeError as error:
        raise TypeError(
            f"learning_rate is the function {schedule!r}{signature}, which cannot be called with the step alone "
            f"({error}); expected a number, or a function of the step: lambda step: 0.1 * 0.99**step"
        ) from None


def strategy_of(variables: Iterable[Variable]) -> Strategy:
    """Return the strategy that all ``variables`` belong to.

    Raises:
        ValueError: They belong to several, or to another one than the current one.
    """
    firsts: dict[Strategy, Variable] = {}
    for variable in variables:
        firsts.setdefault(cast("Strategy", variable.distribute_strategy), variable)
    (strategy, first), *others = firsts.items()
    if others:
        other, odd = others[0]
        raise ValueError(
            f"the variables belong to different strategies: {first.name!r} to {_name_of(strategy)}, and {odd.name!r} "
            f"to {_name_of(other, strategy)}; {_UNDER_ONE_STRATEGY}"
        )
    current = cast("Strategy", get_strategy())
    if has_strategy() and current is not strategy:
        raise ValueError(
            f"variable {first.name!r} belongs to {_name_of(strategy)}, and {_name_of(current, strategy)} is current; "
            f"{_UNDER_ONE_STRATEGY}"
        )
    return strategy


def _name_of(strategy: Strategy, beside: Strategy | None = None) -> str:
    """Return what to call a strategy in a message that has named ``beside`` before."""
    kind = type(strategy).__name__
    if kind == "DefaultStrategy":
        return "DefaultStrategy (it was created outside of strategy.scope())"
    return f"another {kind}" if kind == type(beside).__name__ else kind
