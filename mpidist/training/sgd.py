"""Stochastic gradient descent, with momentum if wanted."""

from __future__ import annotations

from mpidist.arrays.convert import Array, to_array
from mpidist.training.optimizer import LearningRate, Optimizer
from mpidist.training.update_tools import check_fraction, compute_dtype, current, subtract
from mpidist.values import IndexedSlices, Variable


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
