"""A step with Keras' JAX backend: cut in two where the optimizer gets the gradients.

Both parts are compiled. Between them the ranks meet, outside of jit: a callback from inside costs a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax
import keras
import numpy as np
from keras import ops

from mpidist.arrays.dtypes import Array
from mpidist.keras.global_batches import rows_of
from mpidist.keras.jax_packs import pack, room_for, unpack
from mpidist.keras.replica_model import ReplicaModel, ReplicaOptimizer
from mpidist.keras.untyped import KerasObject, Tensors

_State = tuple[Tensors, Tensors, Tensors, Tensors]


class JaxModel(ReplicaModel):
    """A model whose step is compiled in two parts."""

    def make_train_function(self, force: bool = False) -> None:
        """See Keras."""
        if not self._mpidist.sums.are_needed:
            super().make_train_function(force)
        elif force or self.train_function is None:
            self.train_function: KerasObject = self._make_function(self._step_in_parts())

    def make_test_function(self, force: bool = False) -> None:
        """See Keras."""
        if not force and self.test_function is not None:
            return
        super().make_test_function(force)
        compiled = self.test_function

        def counting(state: Tensors, batches: Iterator[Tensors]) -> Tensors:
            # A compiled step does not run test_step() again, which takes them down.
            return compiled(state, map(self._counted, batches))

        self.test_function: KerasObject = counting

    def _counted(self, data: Tensors) -> Tensors:
        self._mpidist.rows = rows_of(data)
        return data

    def train_step(self, state: Tensors, data: Tensors) -> Tensors:
        """See Keras: a rank without rows has no gradients of its own."""
        if self.begin_step(data):
            return super().train_step(state, data)
        self.require_own_step("train_step")
        self.optimizer.stateless_apply(state[2], [ops.zeros_like(value) for value in state[0]], state[0])
        return self._present_logs(state[3]), state

    def test_step(self, state: Tensors, data: Tensors) -> Tensors:
        """See Keras: nothing to do without rows."""
        if self.begin_step(data):
            return super().test_step(state, data)
        self.require_own_step("test_step")
        return self._present_logs(state[2]), state

    def _present_logs(self, metrics: Sequence[Tensors]) -> Tensors:
        with keras.StatelessScope(state_mapping=list(zip(self.metrics_variables, metrics, strict=True))):
            return self.get_metrics_result()

    def _step_in_parts(self) -> Callable[[_State, Tensors], tuple[Tensors, _State]]:
        """Return a step of training, in which the ranks meet (collective)."""
        first, second = self._until_gradients, self._after_gradients
        if self.jit_compile and not self.run_eagerly:
            first, second = jax.jit(first), jax.jit(second, donate_argnums=0)
        sums: list[Array] = []

        def step(state: _State, data: Tensors) -> tuple[Tensors, _State]:
            self._mpidist.report_changes([*state[0], *state[2]])
            logs, non_trainable, metrics, packs = first(state, self._counted(data))
            arrays = [*map(np.asarray, packs)]
            # The second part of the step before has read them: the first one of this step has waited for it.
            sums[:] = sums or room_for(arrays)
            count = self._mpidist.sums.add_up(arrays, rows_of(data), out=sums)
            trainable, optimizer, non_trainable = second((state[0], state[2], non_trainable), sums, count)
            self._mpidist.note([*trainable, *optimizer])
            return logs, (trainable, non_trainable, optimizer, metrics)

        return step

    def _until_gradients(self, state: _State, data: Tensors) -> tuple[Tensors, Tensors, Tensors, list[object]]:
        with self._mpidist.step(), self.optimizer.taking_gradients() as taken:
            logs, (_, non_trainable, _, metrics) = self.train_step(state, data)
            factor = self._mpidist.factor
        if len(taken) != 1:
            raise ValueError(
                f"train_step() called stateless_apply() of the model's optimizer {len(taken)} times; expected once, "
                "where the ranks add their gradients up"
            )
        statistics = [non_trainable[i] for i in self._places()]
        factors = [factor] * len(taken[0]) + [self._mpidist.rows] * len(statistics)
        return logs, non_trainable, metrics, pack([*taken[0], *statistics], factors)

    def _after_gradients(
        self, state: tuple[Tensors, Tensors, Tensors], sums: list[Array], count: Array
    ) -> tuple[Tensors, Tensors, Tensors]:
        trainable, optimizer, non_trainable = state
        places = self._places()
        found = unpack(sums, count, [*trainable, *(non_trainable[i] for i in places)])
        non_trainable = list(non_trainable)
        for i, value in zip(places, found[len(trainable) :], strict=True):
            non_trainable[i] = value
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, found[: len(trainable)], trainable)
        return trainable, optimizer, non_trainable

    def _places(self) -> list[int]:
        of_layers = {id(variable) for variable in self._mpidist.statistics}
        return [i for i, variable in enumerate(self.non_trainable_variables) if id(variable) in of_layers]


class JaxOptimizer(ReplicaOptimizer):
    """An optimizer that hands gradients over where it is told to."""

    @contextmanager
    def taking_gradients(self) -> Iterator[list[Tensors]]:
        """Provide a list that gets the gradients of each call of ``stateless_apply`` in the block."""
        taken: list[Tensors] = []
        object.__setattr__(self, "_taken", taken)
        try:
            yield taken
        finally:
            object.__setattr__(self, "_taken", None)

    def stateless_apply(self, optimizer_variables: Tensors, grads: Tensors, trainable_variables: Tensors) -> Tensors:
        """See Keras."""
        taken = getattr(self, "_taken", None)
        if taken is None:
            return super().stateless_apply(optimizer_variables, grads, trainable_variables)
        taken.append(grads)
        return trainable_variables, optimizer_variables
