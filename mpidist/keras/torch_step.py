"""A step with Keras' PyTorch backend: the optimizer averages gradients over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mpidist.arrays.convert import to_array
from mpidist.keras.replica_model import Adoption, ReplicaModel, ReplicaOptimizer

if TYPE_CHECKING:
    import keras
    from torch import Tensor


class TorchModel(ReplicaModel):
    """A model whose steps Keras calls as they are written."""

    def train_step(self, data: object) -> object:
        """See Keras. A rank without rows takes part in the sums."""
        if self.begin_step(data, "train_step"):
            with self._mpidist.step():
                return super().train_step(data)
        weights = self.trainable_weights[:]
        with torch.no_grad():
            self.optimizer.apply([None] * len(weights), weights)
        return self.get_metrics_result()

    def test_step(self, data: object) -> object:
        """See Keras. Does nothing without rows."""
        return super().test_step(data) if self.begin_step(data, "test_step") else self.get_metrics_result()


class TorchOptimizer(ReplicaOptimizer):
    """An optimizer that applies the gradients of all ranks."""

    def apply(
        self, grads: Sequence[Tensor | None], trainable_variables: Sequence[keras.Variable] | None = None
    ) -> None:
        """See Keras (collective)."""
        if not self._mpidist.sums.are_needed:
            super().apply(grads, trainable_variables)
            return
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        values = [variable.value for variable in (*variables, *self.variables)]
        grads = _before(self._mpidist, grads, variables, values)
        super().apply(grads, trainable_variables)
        _after(self._mpidist, [variable.value for variable in (*variables, *self.variables)])


# torch.compile must not trace the ranks' communication.
@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _before(
    adoption: Adoption, grads: Sequence[Tensor | None], variables: Sequence[keras.Variable], values: Sequence[Tensor]
) -> list[Tensor | None]:
    adoption.report_changes(values)
    return mean_gradients(adoption, grads, variables)


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _after(adoption: Adoption, values: Sequence[Tensor]) -> None:
    adoption.note(values)


def mean_gradients(
    adoption: Adoption, grads: Sequence[Tensor | None], variables: Sequence[keras.Variable]
) -> list[Tensor | None]:
    """Return the gradients of the global batch, in the memory of ``grads`` (collective).

    A variable without a gradient on any rank has None, as in one process: the optimizer skips it.
    """
    statistics, rows = adoption.statistics, adoption.rows
    with torch.no_grad():
        found = [torch.zeros_like(v.value) if g is None else g for g, v in zip(grads, variables, strict=True)]
        found = [*map(_wide, _apart(found))]
        if (factor := adoption.factor) != 1:
            for gradient in found:
                gradient.mul_(factor)
        # Statistics of a rank without rows are arbitrary, for example NaN.
        found += [_wide(s.value) * rows if rows else torch.zeros_like(_wide(s.value)) for s in statistics]
        marks = [g is not None for g in grads]
        rows_of_all, *marks = adoption.sums.add_up([*map(to_array, found)], rows, marks).tolist()
        for total in found:
            total.div_(rows_of_all)
        for variable, value in zip(statistics, found[len(variables) :], strict=True):
            variable.assign(value)
    return [
        gradient.to(variable.value.dtype) if mark else None
        for gradient, variable, mark in zip(found, variables, marks, strict=False)
    ]


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor that has room for its products with numbers of rows."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors, with copies of those whose elements would be multiplied twice."""
    seen: set[int] = set()
    apart = []
    for tensor in tensors:
        # One tensor may be the gradient of several variables, and an expanded one has an element in many places.
        is_shared = tensor.data_ptr() in seen or 0 in tensor.stride()
        seen.add(tensor.data_ptr())
        apart.append(tensor.clone(memory_format=torch.contiguous_format) if is_shared else tensor)
    return apart
