"""CompositeVariable: one value that is kept in several variables, as optimizers and checkpoints see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import quote

from mpidist.core.context import StrategyLike
from mpidist.core.options import VariableAggregation, VariableSynchronization
from mpidist.values.component import Assignable
from mpidist.values.variable import Variable


class CompositeVariable(Assignable):
    """A variable whose parts are variables of their own.

    Optimizers update its parts, each by its part of the gradient; a checkpoint holds it as one array, and so an
    optimizer's slots of it.
    """

    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    # Whether the program chose the name.
    is_named: bool

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


# Slots of optimizers in checkpoints -----------------------------------------------------------------------------------

_BY_PATH, _BY_NAME = "slots_by_path", "slots_by_name"
# Format versions 1 and 2 save all slots as "slots/<position>/<slot>".
_BY_POSITION = ("slots_by_position", "slots")


@dataclass(frozen=True)
class Slots:
    """All slots of an optimizer, as a part of it in a checkpoint.

    Attributes:
        of: The slots of each variable by name.
        find: Accepts a function to find restored slots later: it returns the path of each variable in the checkpoint.
    """

    of: Mapping[AnyVariable, Mapping[str, AnyVariable]]
    find: Callable[[Callable[[], Mapping[AnyVariable, str]]], None]


def slot_keys(variables: Sequence[AnyVariable], paths: Mapping[AnyVariable, str]) -> list[list[str]]:
    """Return the possible keys of each variable's slots, the first to save them.

    Keys are relative to the optimizer.

    >>> from mpidist.values import Variable
    >>> first, second = Variable(1.0), Variable(2.0, name="b")
    >>> slot_keys([first, second], {first: "model/a"})
    [['slots_by_path/model/a', 'slots_by_position/0', 'slots/0'], ['slots_by_name/b', 'slots_by_position/1', 'slots/1']]
    """
    names = Counter(variable.name for variable in variables)
    keys = []
    for position, variable in enumerate(variables):
        path = [f"{_BY_PATH}/{paths[variable]}"] if variable in paths else []
        # Two variables of one name can only be told apart by position.
        is_named = variable.is_named and names[variable.name] == 1
        name = [f"{_BY_NAME}/{quote(variable.name, safe='')}"] if is_named else []
        keys.append([*path, *name, *(f"{kind}/{position}" for kind in _BY_POSITION)])
    return keys


def is_by_position(key: str) -> bool:
    """Return whether a key is that of a slot saved by position."""
    return key.partition("/")[0] in _BY_POSITION
