"""Before a variable is there: its arguments, its initial value and its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import DTypeLike

from mpidist.arrays.convert import is_keras_layer, is_torch_module, is_torch_optimizer
from mpidist.arrays.dtypes import Array, as_dtype, check_transportable
from mpidist.core.options import VariableAggregation, VariableSynchronization
from mpidist.values.component import Assignable
from mpidist.values.placement import array_of, place_of

# What to do instead, where a variable was to be made of something that has many.
_GRADIENTS = 'in strategy.run, context.all_reduce("MEAN", [p.grad for p in module.parameters()])'
_MODELS: tuple[tuple[Callable[[object], bool], str, str], ...] = (
    (
        is_torch_module,
        "a torch module",
        "[mpidist.Variable(p) for p in module.parameters()], one for each parameter, or keep the module's own "
        f"parameters and reduce their gradients: {_GRADIENTS}",
    ),
    (
        is_torch_optimizer,
        "a torch optimizer",
        "an optimizer of mpidist.optimizers for variables, or keep the torch optimizer and reduce the gradients before "
        f"its step(): {_GRADIENTS}",
    ),
    (is_keras_layer, "a Keras layer", "[mpidist.Variable(w) for w in layer.get_weights()], one for each weight"),
)


def variable_arguments(
    initial_value: Any = None,
    trainable: bool | None = None,
    dtype: DTypeLike | None = None,
    name: str | None = None,
    shape: Sequence[int] | None = None,
    constraint: Callable[[Array], object] | None = None,
    synchronization: VariableSynchronization = VariableSynchronization.AUTO,
    aggregation: VariableAggregation = VariableAggregation.NONE,
) -> dict[str, Any]:
    """Check the arguments as far as no strategy is needed, and fill in the defaults."""
    if initial_value is None:
        raise ValueError("Variable was given no initial_value; expected a number, an array or a callable")
    _check_is_no_model(initial_value)
    try:
        synchronization = VariableSynchronization(synchronization)
        aggregation = VariableAggregation(aggregation)
    except ValueError as error:
        raise ValueError(
            f"{error}; expected members of mpidist.VariableSynchronization "
            f"({', '.join(how.name for how in VariableSynchronization)}) and of mpidist.VariableAggregation "
            f"({', '.join(how.name for how in VariableAggregation)}), such as mpidist.VariableAggregation.MEAN"
        ) from None
    if synchronization == VariableSynchronization.NONE:
        raise ValueError(
            "synchronization is VariableSynchronization.NONE, which no strategy offers; use AUTO, ON_WRITE or ON_READ"
        )
    if synchronization == VariableSynchronization.AUTO:
        synchronization = VariableSynchronization.ON_WRITE
    return {
        "initial_value": initial_value,
        "trainable": synchronization != VariableSynchronization.ON_READ if trainable is None else trainable,
        "dtype": dtype,
        "name": name,
        "shape": shape,
        "constraint": constraint,
        "synchronization": synchronization,
        "aggregation": aggregation,
    }


def _check_is_no_model(initial_value: object) -> None:
    """Raise TypeError for modules and optimizers, which have many values.

    They can often be called, as functions that make a value can.
    """
    for is_one, name, instead in _MODELS:
        if is_one(initial_value):
            raise TypeError(
                f"initial_value is {name}, a {type(initial_value).__name__}; expected a number, an array or a function "
                f"that returns one: use {instead}"
            )


def initial_array(
    initial_value: object, dtype: DTypeLike | None, shape: Sequence[int] | None, aggregation: object
) -> Array:
    """Evaluate and check an initial value.

    Raises:
        TypeError: It is no array of numbers or bools.
        ValueError: It has another shape than ``shape``, or its mean cannot be formed in its dtype.
    """
    value = initial_value() if callable(initial_value) else initial_value
    array = value.as_array() if isinstance(value, Assignable) else array_of(value, "initial_value")
    if dtype is not None:
        array = place_of(array).casts(array, as_dtype(dtype))
    check_transportable(array.dtype, "Variable")
    if shape is not None and tuple(shape) != array.shape:
        raise ValueError(f"initial_value has shape {array.shape}; expected shape={tuple(shape)}, as given")
    if aggregation == VariableAggregation.MEAN and array.dtype.kind in "iub":
        raise ValueError(
            f"aggregation MEAN with dtype {array.dtype}: a mean need not be an integer; "
            "use a floating dtype, SUM or ONLY_FIRST_REPLICA"
        )
    return array


class VariableNames:
    """The names of a strategy's variables, in order of creation.

    The order is the same on all ranks.

    A rank that lists its variables in another order than the others would add up gradients of different variables. So
    their labels travel with the gradients, and no two variables of a strategy have the same label.

    >>> names = VariableNames()
    >>> [names.label(name) for name in ("kernel", "bias", "kernel")]
    ['kernel', 'bias', 'kernel (number 2 of this name)']
    """

    def __init__(self) -> None:
        self._unnamed = 0
        self._taken: Counter[str] = Counter()

    def default(self) -> str:
        """Return the name of the next unnamed variable, as TensorFlow 1 counts them.

        >>> names = VariableNames()
        >>> names.default()
        'Variable'
        >>> names.took_default()
        >>> names.default()
        'Variable_1'
        """
        return f"Variable_{self._unnamed}" if self._unnamed else "Variable"

    def took_default(self) -> None:
        """Note that a variable has the name ``default()``.

        Its creation could have failed, on all ranks.
        """
        self._unnamed += 1

    def label(self, name: str) -> str:
        """Return a label that no other variable has, and note the name."""
        self._taken[name] += 1
        return name if self._taken[name] == 1 else f"{name} (number {self._taken[name]} of this name)"
