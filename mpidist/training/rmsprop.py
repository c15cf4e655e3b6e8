"""RMSprop: steps divided by a running root mean square of the gradients."""

from __future__ import annotations

import numpy as np

from mpidist.arrays.convert import Array, to_array
from mpidist.training.optimizer import LearningRate, Optimizer
from mpidist.training.update_tools import check_fraction, check_positive, compute_dtype, current, subtract
from mpidist.values import Variable


class RMSprop(Optimizer):
    """RMSprop (tf.keras.optimizers.RMSprop; Hinton's lecture 6 of "Neural Networks for Machine Learning").

    ``s = rho * s + (1 - rho) * g**2`` and ``v -= learning_rate * g / sqrt(s + epsilon)``. Centered: with
    ``a = rho * a + (1 - rho) * g`` the root is of ``s - a**2 + epsilon``. With momentum the step is added to
    ``m = momentum * m + step``, and ``v -= m``. Sparse gradients act as the dense array they stand for, so all
    averages decay.

    Args:
        learning_rate: A number, or a function of the step that returns one.
        rho: Decay of the averages, from 0 to below 1.
        momentum: From 0 to below 1.
        epsilon: Keeps the denominator from 0, more than 0.
        centered: Whether to divide by the estimated standard deviation instead.
        name: For the names of its variables.

    Raises:
        ValueError: A parameter out of range.
        TypeError: A learning rate that is neither number nor function.

    >>> v = Variable([1.0, 2.0])
    >>> RMSprop(learning_rate=0.1, rho=0.75).apply_gradients([([1.0, -1.0], v)])
    >>> v.numpy().round(6)
    array([0.8, 2.2])
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        name: str = "RMSprop",
    ) -> None:
        super().__init__(learning_rate, name)
        self.rho = check_fraction("rho", rho)
        self.momentum = check_fraction("momentum", momentum)
        self.epsilon = check_positive("epsilon", epsilon)
        self.centered = bool(centered)
        also = {"momentum": self.momentum, "average_gradient": self.centered}
        self.slot_names = ("velocity", *(slot for slot, is_needed in also.items() if is_needed))

    def update_variable(self, variable: Variable, gradient: Array, learning_rate: float, step: int) -> None:
        """See ``Optimizer.update_variable``."""
        dtype = compute_dtype(variable)
        number = dtype.type
        gradient = gradient.astype(dtype, copy=False)
        spread = self._averaged(self.get_slot(variable, "velocity"), np.square(gradient))
        if self.centered:
            spread = spread - np.square(self._averaged(self.get_slot(variable, "average_gradient"), gradient))
        move = to_array(number(learning_rate) * gradient / np.sqrt(spread + number(self.epsilon)))
        if self.momentum:
            slot = self.get_slot(variable, "momentum")
            move = to_array(number(self.momentum) * current(slot) + move)
            slot.assign(move)
        subtract(variable, move)

    def _averaged(self, slot: Variable, value: Array) -> Array:
        """Take ``value`` into the running average that a slot holds, and return the average."""
        number = slot.dtype.type
        average = to_array(number(self.rho) * current(slot) + number(1 - self.rho) * value)
        slot.assign(average)
        return average
