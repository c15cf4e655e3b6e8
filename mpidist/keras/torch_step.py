"""A step with Keras' PyTorch backend: gradients are averaged as the optimizer gets them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpidist.arrays.convert import to_array
from mpidist.keras.replica_model import Adoption, ReplicaModel, ReplicaOptimizer
from mpidist.keras.untyped import Tensors


class TorchModel(ReplicaModel):
    """A model whose steps Keras calls as they are written."""

    def train_step(self, data: Tensors) -> Tensors:
        """See Keras: a rank without rows takes part in the sums."""
        if self.begin_step(data):
            with self._mpidist.step():
                return super().train_step(data)
        self.require_own_step("train_step")
        weights = self.trainable_weights[:]
        with torch.no_grad():
            self.optimizer.apply([None] * len(weights), weights)
        return self.get_metrics_result()

    def test_step(self, data: Tensors) -> Tensors:
        """See Keras: nothing to do without rows."""
        if self.begin_step(data):
            return super().test_step(data)
        self.require_own_step("test_step")
        return self.get_metrics_result()


class TorchOptimizer(ReplicaOptimizer):
    """An optimizer that applies the gradients of all ranks."""

    def apply(self, grads: Sequence[Tensors], trainable_variables: Tensors = None) -> None:
        """See Keras (collective)."""
        if self._mpidist.sums.are_needed:
            variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
            # The ranks meet where torch.compile does not look.
            _outside_report(self._mpidist, [*variables, *self.variables])
            grads = _outside_of_compilation(self._mpidist, grads, variables)
        super().apply(grads, trainable_variables)
        if self._mpidist.sums.are_needed:
            _outside_note(self._mpidist, [*variables, *self.variables])


def _report_changes(adoption: Adoption, variables: Sequence[Tensors]) -> None:
    adoption.report_changes([variable.value for variable in variables])


def _note(adoption: Adoption, variables: Sequence[Tensors]) -> None:
    adoption.note([variable.value for variable in variables])


def mean_gradients(adoption: Adoption, grads: Sequence[Tensors], variables: Sequence[Tensors]) -> list[Tensors]:
    """Return the gradients of the global batch (collective).

    A variable that has none on any rank has None, as in one process: the optimizer leaves it alone.

    Args:
        adoption: Of the model.
        grads: Of the variables; those of the step alone, in whose memory the results are.
        variables: Of the model.
    """
    statistics, rows = adoption.statistics, adoption.rows
    with torch.no_grad():
        found = [torch.zeros_like(v.value) if g is None else g for g, v in zip(grads, variables, strict=True)]
        found = [*map(_wide, _apart(found))]
        if (factor := adoption.factor) != 1:
            for gradient in found:
                gradient.mul_(factor)
        # Those of a rank without rows may be anything, also NaN.
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


def _wide(tensor: Tensors) -> Tensors:
    """Return a tensor that has room for its products with numbers of rows."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _apart(tensors: Sequence[Tensors]) -> list[Tensors]:
    """Return tensors, copies of those whose elements would be multiplied twice."""
    seen: set[int] = set()
    apart = []
    for tensor in tensors:
        # One tensor may be the gradient of several variables, and an expanded one has an element in many places.
        is_shared = tensor.data_ptr() in seen or 0 in tensor.stride()
        seen.add(tensor.data_ptr())
        apart.append(tensor.clone(memory_format=torch.contiguous_format) if is_shared else tensor)
    return apart


_outside_of_compilation = torch.compiler.disable(mean_gradients)
_outside_report, _outside_note = map(torch.compiler.disable, (_report_changes, _note))
