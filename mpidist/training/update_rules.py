"""The optimizers: SGD, RMSprop, Adam and AdamW."""

from __future__ import annotations

import math

import numpy as np

from mpidist.arrays.convert import to_array
from mpidist.arrays.dtypes import Array
from mpidist.training.optimizer import LearningRate, Optimizer, compute_dtype, current
from mpidist.values import IndexedSlices, Variable
from mpidist.values.composite import AnyVariable


class SGD(Optimizer):
    """Gradient descent (tf.keras.optimizers.SGD): ``v -= learning_rate * g``.

    With momentum: ``m = momentum * m - learning_rate * g`` and ``v += m``; with Nesterov momentum
    ``v += momentum * m - learning_rate * g``. Sparse gradients touch only their rows without momentum; with
    momentum they act as the dense array they stand for, so the momentum of all rows decays.

    Args:
        learning_rate: A number, or a function of the step that returns one.
        momentum: From 0 to below 1.
        nesterov: Whether to look ahead along the momentum.
        name: For the names of its variables.

    Raises:
        ValueError: ``momentum`` out of range.
        TypeError: A learning rate that is neither number nor function.

    >>> v = Variable([1.0, 2.0])
    >>> SGD(learning_rate=0.5).apply_gradients([([1.0, 1.0], v)])
    >>> v.numpy()
    array([0.5, 1.5])
    """

    def __init__(
        self, learning_rate: LearningRate = 0.01, momentum: float = 0.0, nesterov: bool = False, name: str = "SGD"
    ) -> None:
        super().__init__(learning_rate, name)
        self.momentum = check_fraction("momentum", momentum)
        self.nesterov = bool(nesterov)
        self.slot_names = ("momentum",) if self.momentum else ()

    @property
    def touches_only_rows(self) -> bool:
        """See ``Optimizer``."""
        return not self.momentum

    def update_variable(self, variable: Variable, gradient: Array, learning_rate: float, step: int) -> None:
        """See ``Optimizer.update_variable``."""
        dtype = compute_dtype(variable)
        # A Python float would make float64 of a 0-d float32 array before NumPy 2.
        move = to_array(dtype.type(learning_rate) * gradient.astype(dtype, copy=False))
        if not self.momentum:
            subtract(variable, move)
            return
        slot = self.get_slot(variable, "momentum")
        factor = dtype.type(self.momentum)
        velocity = to_array(factor * current(slot) - move)
        slot.assign(velocity)
        subtract(variable, to_array(move - factor * velocity if self.nesterov else -velocity))

    def update_sparse(self, variable: Variable, gradient: IndexedSlices, learning_rate: float, step: int) -> None:
        """See ``Optimizer.update_sparse``."""
        if self.momentum or compute_dtype(variable) != variable.dtype:
            super().update_sparse(variable, gradient, learning_rate, step)
            return
        rows = variable.dtype.type(learning_rate) * gradient.values
        variable.scatter_sub(IndexedSlices(rows, gradient.indices, gradient.dense_shape))


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

    def _averaged(self, slot: AnyVariable, value: Array) -> Array:
        """Take ``value`` into the running average that a slot holds, and return the average."""
        number = slot.dtype.type
        average = to_array(number(self.rho) * current(slot) + number(1 - self.rho) * value)
        slot.assign(average)
        return average


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
        """Update the moments, and return the step to subtract, in the compute dtype."""
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


def subtract(variable: Variable, delta: Array) -> None:
    """Subtract ``delta``, which is of the variable's compute dtype, from the variable's copy."""
    if delta.dtype == variable.dtype:
        variable.assign_sub(delta)
    else:
        variable.assign((current(variable).astype(delta.dtype) - delta).astype(variable.dtype))


def check_fraction(name: str, value: float) -> float:
    """Return a hyper-parameter that must lie in [0, 1).

    Raises:
        ValueError: It does not.
    """
    if not 0 <= value < 1:
        raise ValueError(f"{name} is {value!r}; expected a number from 0 to below 1")
    return float(value)


def check_positive(name: str, value: float) -> float:
    """Return a hyper-parameter that must be more than 0.

    Raises:
        ValueError: It is not.
    """
    if not value > 0:
        raise ValueError(f"{name} is {value!r}; expected a number of more than 0")
    return float(value)
