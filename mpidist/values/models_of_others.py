"""What is said where a variable is to be made of a module, layer or optimizer of another library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpidist.arrays.convert import is_keras_layer, is_torch_module, is_torch_optimizer

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
    (
        is_keras_layer,
        "a Keras layer",
        "[mpidist.Variable(w) for w in layer.get_weights()], one for each weight",
    ),
)


def check_is_no_model(initial_value: Any) -> None:
    """Raise TypeError for what has many values, and can often be called, as functions that make a value can."""
    for is_one, name, instead in _MODELS:
        if is_one(initial_value):
            raise TypeError(
                f"initial_value is {name}, a {type(initial_value).__name__}; expected a number, an array or a function "
                f"that returns one: use {instead}"
            )
