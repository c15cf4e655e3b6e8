"""Adam: steps scaled by running moments of the gradients; AdamW, whose variables also decay by themselves."""

from __future__ import annotations

import math

import numpy as np

from mpidist.arrays.convert import Array, to_array
from mpidist.training.optimizer import LearningRate, Optimizer
from mpidist.training.update_tools import check_fraction, check_positive, compute_dtype, current, subtract
from mpidist.values import Variable


class Adam(Optimizer):
    """Adam (tf.keras.optimizers.Adam; Kingma and Ba, https://arxiv.org/abs/1412.6980).

    ``m += (1 - beta_1) * (g - m)``, ``s += (1 - beta_2) * (g**2 - s)``, and with t updates so far, this one
    included, ``v -= learning_rate * sqrt(1 - beta_2**t) / (1 - beta_1**t) * m / (sqrt(s) + epsilon)``: epsilon is
    the paper's "epsilon hat". Sparse gradients act as the dense array they stand for, so all moments decay.

    Args:
        learning_rate: A number, or a function of the step that returns one.
        beta_1: Decay of the mean, from 0 to below 1.
        beta_2: Decay of the mean square, from 0 to below 1.
        epsilon: Keeps the denominator from 0, more than 0.
        name: For the names of its variables.

    Raises:
        ValueError: A parameter out of range.
        TypeError: A learning rate that is neither number nor function.

    >>> v = Variable([1.0, 2.0])
    >>> Adam(learning_rate=0.1).apply_gradients([([1.0, -1.0], v)])
    >>> v.numpy().round(6)
    array([0.9, 2.1])
    """

    slot_names = ("m", "s")

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        name: str = "Adam",
    ) -> None:
        super().__init__(learning_rate, name)
        self.beta_1 = check_fraction("beta_1", beta_1)
        self.beta_2 = check_fraction("beta_2", beta_2)
        self.epsilon = check_positive("epsilon", epsilon)

    def update_variable(self, variable: Variable, gradient: Array, learning_rate: float, step: int) -> None:
        """See ``Optimizer.update_variable``."""
        subtract(variable, self._move(variable, gradient, learning_rate, step))

    def _move(self, variable: Variable, gradient: Array, learning_rate: float, step: int) -> Array:
        """Update the moments, and return what is to be subtracted from the variable, in its compute dtype."""
        dtype = compute_dtype(variable)
        number = dtype.type
        gradient = gradient.astype(dtype, copy=False)
        mean, mean_square = self.get_slot(variable, "m"), self.get_slot(variable, "s")
        mean.assign_add(to_array(number(1 - self.beta_1) * (gradient - current(mean))))
        mean_square.assign_add(to_array(number(1 - self.beta_2) * (np.square(gradient) - current(mean_square))))
        count = step + 1
        rate = learning_rate * math.sqrt(1 - self.beta_2**count) / (1 - self.beta_1**count)
        denominator = np.sqrt(current(mean_square)) + number(self.epsilon)
        return to_array(number(rate) * current(mean) / denominator)


class AdamW(Adam):
    """Adam with decoupled weight decay (tf.keras.optimizers.AdamW; https://arxiv.org/abs/1711.05101).

    As ``Adam``, and each update takes ``learning_rate * weight_decay * v`` off the variable as well, of the value
    before the update: the moments know nothing of the decay. Variables without a gradient do not decay; those that
    should not, such as biases, are for another optimizer. Sparse gradients act as the dense array they stand for.

    Args:
        learning_rate: A number, or a function of the step that returns one.
        weight_decay: Share of the variable, times the learning rate, that an update takes off, from 0.
        beta_1: Decay of the mean, from 0 to below 1.
        beta_2: Decay of the mean square, from 0 to below 1.
        epsilon: Keeps the denominator from 0, more than 0.
        name: For the names of its variables.

    Raises:
        ValueError: A parameter out of range.
        TypeError: A learning rate that is neither number nor function.

    >>> v = Variable([1.0, 2.0])
    >>> AdamW(learning_rate=0.1, weight_decay=0.5).apply_gradients([([1.0, -1.0], v)])
    >>> v.numpy().round(6)
    array([0.85, 2.  ])
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        name: str = "AdamW",
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, name)
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay is {weight_decay!r}; expected a number from 0")
        self.weight_decay = float(weight_decay)

    def _move(self, variable: Variable, gradient: Array, learning_rate: float, step: int) -> Array:
        move = super()._move(variable, gradient, learning_rate, step)
        share = move.dtype.type(learning_rate * self.weight_decay)
        return to_array(move + share * current(variable).astype(move.dtype, copy=False))
