"""CompositeVariable: one value that is kept in several variables, as optimizers and checkpoints see it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from mpidist.core.enums import VariableAggregation, VariableSynchronization
from mpidist.core.protocols import StrategyLike
from mpidist.values.component import Assignable
from mpidist.values.variable import Variable


class CompositeVariable(Assignable):
    """A variable whose parts are variables of their own.

    Optimizers update its parts, each by its part of the gradient; a checkpoint holds it as one array, and so an
    optimizer's slots of it.
    """

    synchronization: VariableSynchronization
    aggregation: VariableAggregation

    @property
    def variables(self) -> list[Variable]:
        """The parts, in order."""
        raise NotImplementedError

    @property
    def distribute_strategy(self) -> StrategyLike:
        """The strategy that the parts were created under."""
        return self.variables[0].distribute_strategy

    def cut(self, value: object) -> list[Any]:
        """Return the parts' shares of a value of this shape.

        It is an array, IndexedSlices, or a distributed value of them.
        """
        raise NotImplementedError

    def like(self, variables: Sequence[Variable], name: str) -> CompositeVariable:
        """Return a composite of ``variables``, which have the shapes of this one's parts."""
        raise NotImplementedError


# What optimizers and checkpoints take for a variable.
AnyVariable: TypeAlias = Variable | CompositeVariable


def parts_of(variable: AnyVariable) -> list[Variable]:
    """Return the variables that hold the value of ``variable``: its parts, or itself."""
    return variable.variables if isinstance(variable, CompositeVariable) else [variable]


def cut_for(variable: AnyVariable, value: object) -> list[Any]:
    """Return the shares of ``value``, of the shape of ``variable``, that belong to ``parts_of(variable)``."""
    return variable.cut(value) if isinstance(variable, CompositeVariable) else [value]


def wholes_of(variables: Iterable[AnyVariable]) -> list[AnyVariable]:
    """Return each of ``variables`` once, with composites in place of their parts."""
    return list(dict.fromkeys(_whole_of(variable) for variable in variables))


def _whole_of(variable: AnyVariable) -> AnyVariable:
    whole = variable.whole if isinstance(variable, Variable) else None
    return whole if isinstance(whole, CompositeVariable) else variable
