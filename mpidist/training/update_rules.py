"""The rules of SGD, RMSprop, Adam and AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.training.optimizer import LearningRate, Optimizer, Row, compute_dtype
from mpidist.values import IndexedSlices, Variable


class SGD(Optimizer):
    """Gradient descent (tf.keras.optimizers.SGD): ``v -= learning_rate * g``.

    With momentum: ``m = momentum * m - learning_rate * g`` and ``v += m``; with Nesterov momentum
    ``v += momentum * m - learning_rate * g``. Without momentum, sparse gradients change only their rows. With momentum
    they act as the dense array, so the momentum of all rows decays.

    Args:
        learning_rate: A number, or a function of the step that returns one.
        momentum: From 0 to below 1.
        nesterov: Whether to use Nesterov momentum.
        name: Prefix of the names of its variables.

    Raises:
        ValueError: ``momentum`` is out of range.
        TypeError: ``learning_rate`` is neither a number nor a function of the step.

    >>> v = Variable([1.0, 2.0])
    >>> SGD(learning_rate=0.5).apply_gradients([([1.0, 1.0], v)])
    >>> v.numpy()
    array([0.5, 1.5])
    """

    def __init__(
        self, learning_rate: LearningRate = 0.01, momentum: float = 0.0, nesterov: bool = False, name: str = "SGD"
    ) -> None:
        super().__init__(learning_rate, name)
        self.momentum = _fraction("momentum", momentum)
        self.nesterov = bool(nesterov)
        self.slot_names = self.needed_slots

    @property
    def needed_slots(self) -> tuple[str, ...]:
        """See ``Optimizer``."""
        return ("momentum",) if self.momentum else ()

    @property
    def touches_only_rows(self) -> bool:
        """See ``Optimizer``."""
        return not self.momentum

    def update_rows(self, rows: Iterable[Row], learning_rate: float, step: int) -> None:
        """See ``Optimizer.update_rows``."""
        for array, gradient, *slots in rows:
            number = array.dtype.type
            # A Python float would make float64 of a 0-d float32 array before NumPy 2.
            move = number(learning_rate) * gradient
            if not self.momentum:
                array -= move
                continue
            (velocity,) = slots
            velocity *= number(self.momentum)
            velocity -= move
            if self.nesterov:
                array -= move - number(self.momentum) * velocity
            else:
                array += velocity

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
    ``m = momentum * m + step``, and ``v -= m``. Sparse gradients act as the dense array, so all averages decay.

    Args:
        learning_rate: A number, or a function of the step that returns one.
        rho: Decay of the averages, from 0 to below 1.
        momentum: From 0 to below 1.
        epsilon: Term that keeps the denominator from 0, more than 0.
        centered: Whether to divide by the estimated standard deviation instead.
        name: Prefix of the names of its variables.

    Raises:
        ValueError: A parameter is out of range.
        TypeError: ``learning_rate`` is neither a number nor a function of the step.

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
        self.rho = _fraction("rho", rho)
        self.momentum = _fraction("momentum", momentum)
        self.epsilon = _positive("epsilon", epsilon)
        self.centered = bool(centered)
        self.slot_names = self.needed_slots

    @property
    def needed_slots(self) -> tuple[str, ...]:
        """See ``Optimizer``."""
        also = {"momentum": self.momentum, "average_gradient": self.centered}
        return ("velocity", *(slot for slot, is_needed in also.items() if is_needed))

    def update_rows(self, rows: Iterable[Row], learning_rate: float, step: int) -> None:
        """See ``Optimizer.update_rows``."""
        for array, gradient, velocity, *others in rows:
            number = array.dtype.type

            def average(slot: Array, value: Array, rho: float = self.rho) -> None:
                slot *= slot.dtype.type(rho)
                slot += slot.dtype.type(1 - rho) * value

            average(velocity, np.square(gradient))
            spread = velocity
            if self.centered:
                average(others[-1], gradient)
                spread = spread - np.square(others[-1])
            move = number(learning_rate) * gradient / np.sqrt(spread + number(self.epsilon))
            if self.momentum:
                others[0] *= number(self.momentum)
                others[0] += move
                move = others[0]
            array -= move


class Adam(Optimizer):
    """Adam (tf.keras.optimizers.Adam; Kingma and Ba, https://arxiv.org/abs/1412.6980).

    ``m += (1 - beta_1) * (g - m)``, ``s += (1 - beta_2) * (g**2 - s)``, and after t updates, this one included,
    ``v -= learning_rate * sqrt(1 - beta_2**t) / (1 - beta_1**t) * m / (sqrt(s) + epsilon)``. Epsilon is the paper's
    "epsilon hat". Sparse gradients act as the dense array, so all moments decay.

    Args:
        learning_rate: A number, or a function of the step that returns one.
        beta_1: Decay of the mean, from 0 to below 1.
        beta_2: Decay of the mean square, from 0 to below 1.
        epsilon: Term that keeps the denominator from 0, more than 0.
        name: Prefix of the names of its variables.

    Raises:
        ValueError: A parameter is out of range.
        TypeError: ``learning_rate`` is neither a number nor a function of the step.

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
        self.beta_1 = _fraction("beta_1", beta_1)
        self.beta_2 = _fraction("beta_2", beta_2)
        self.epsilon = _positive("epsilon", epsilon)

    def update_rows(self, rows: Iterable[Row], learning_rate: float, step: int) -> None:
        """See ``Optimizer.update_rows``."""
        count, decay = step + 1, learning_rate * self._decay
        rate = learning_rate * math.sqrt(1 - self.beta_2**count) / (1 - self.beta_1**count)
        for array, gradient, mean, mean_square in rows:
            number = array.dtype.type
            mean += number(1 - self.beta_1) * (gradient - mean)
            mean_square += number(1 - self.beta_2) * (np.square(gradient) - mean_square)
            move = number(rate) * mean / (np.sqrt(mean_square) + number(self.epsilon))
            array -= move + number(decay) * array if decay else move

    @property
    def _decay(self) -> float:
        """Share of a variable, times the learning rate, that an update subtracts."""
        return 0.0


class AdamW(Adam):
    """Adam with decoupled weight decay (tf.keras.optimizers.AdamW; https://arxiv.org/abs/1711.05101).

    As ``Adam``, but each update also subtracts ``learning_rate * weight_decay * v``, with the value before the update.
    The moments do not include the decay. Variables without a gradient do not decay. Use a second optimizer for
    variables that must not decay, such as biases. Sparse gradients act as the dense array, so all moments decay.

    Args:
        learning_rate: A number, or a function of the step that returns one.
        weight_decay: Share of the variable, times the learning rate, that an update subtracts, from 0.
        beta_1: Decay of the mean, from 0 to below 1.
        beta_2: Decay of the mean square, from 0 to below 1.
        epsilon: Term that keeps the denominator from 0, more than 0.
        name: Prefix of the names of its variables.

    Raises:
        ValueError: A parameter is out of range.
        TypeError: ``learning_rate`` is neither a number nor a function of the step.

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

    @property
    def _decay(self) -> float:
        return self.weight_decay


def _fraction(name: str, value: float) -> float:
    """Return a hyperparameter that must lie in [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} is {value!r}; expected a number from 0 to below 1")
    return float(value)


def _positive(name: str, value: float) -> float:
    """Return a hyperparameter that must be more than 0."""
    if not value > 0:
        raise ValueError(f"{name} is {value!r}; expected a number of more than 0")
    return float(value)
