"""A step with Keras' JAX backend: cut in two where the optimizer gets the gradients.

Both parts are compiled. Between them the ranks communicate outside of jit: a callback inside costs a millisecond.
Gradients travel in flat arrays, because each array that JAX passes to NumPy costs time. Large ones travel alone,
because packing would cost more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import ops

from mpidist.arrays.dtypes import Array, is_half
from mpidist.keras.global_batches import rows_of
from mpidist.keras.replica_model import ReplicaModel, ReplicaOptimizer

Values: TypeAlias = "Sequence[jax.Array]"
Logs: TypeAlias = "dict[str, jax.Array]"
# Of trainable and other variables, the optimizer and metrics.
State: TypeAlias = "tuple[Values, Values, Values, Values]"
_MOST_SMALL_ELEMENTS = 16 << 10
# JAX reads arrays with this alignment in place, on a CPU.
_ALIGNMENT = 64


class JaxModel(ReplicaModel):
    """A model whose step is compiled in two parts."""

    def make_train_function(self, force: bool = False) -> None:
        """See Keras."""
        if not self._mpidist.sums.are_needed:
            super().make_train_function(force)
        elif force or self.train_function is None:
            self.train_function: Callable[..., object] = self._make_function(self._step_in_parts())

    def make_test_function(self, force: bool = False) -> None:
        """See Keras. A compiled step does not run ``test_step`` again, which records the rows."""
        if not force and self.test_function is not None:
            return
        super().make_test_function(force)
        compiled = self.test_function
        self.test_function: Callable[..., object] = lambda state, batches: compiled(state, map(self._counted, batches))

    def _counted(self, data: object) -> object:
        self._mpidist.rows = rows_of(data)
        return data

    def train_step(self, state: State, data: object) -> object:
        """See Keras. A rank without rows has no gradients of its own."""
        if self.begin_step(data, "train_step"):
            return super().train_step(state, data)
        self.optimizer.stateless_apply(state[2], [ops.zeros_like(value) for value in state[0]], state[0])
        return self._present_logs(state[3]), state

    def test_step(self, state: tuple[Values, Values, Values], data: object) -> object:
        """See Keras. Does nothing without rows."""
        if self.begin_step(data, "test_step"):
            return super().test_step(state, data)
        return self._present_logs(state[2]), state

    def _present_logs(self, metrics: Values) -> Logs:
        with keras.StatelessScope(state_mapping=list(zip(self.metrics_variables, metrics, strict=True))):
            logs: Logs = self.get_metrics_result()
        return logs

    def _step_in_parts(self) -> Callable[[State, object], tuple[Logs, State]]:
        """Return a step of training, in which the ranks communicate (collective)."""
        first, second = self._until_gradients, self._after_gradients
        if self.jit_compile and not self.run_eagerly:
            first, second = jax.jit(first), jax.jit(second, donate_argnums=0)
        sums: list[Array] = []

        def step(state: State, data: object) -> tuple[Logs, State]:
            self._mpidist.report_changes([*state[0], *state[2]])
            logs, non_trainable, metrics, packs = first(state, self._counted(data))
            arrays = [*map(np.asarray, packs)]
            # The second part of the last step has read them: the first part of this one has waited for it.
            sums[:] = sums or room_for(arrays)
            count = self._mpidist.sums.add_up(arrays, rows_of(data), out=sums)
            trainable, optimizer, non_trainable = second((state[0], state[2], non_trainable), sums, count)
            self._mpidist.note([*trainable, *optimizer])
            return logs, (trainable, non_trainable, optimizer, metrics)

        return step

    def _until_gradients(self, state: State, data: object) -> tuple[Logs, Values, Values, Values]:
        with self._mpidist.step(), self.optimizer.taking_gradients() as taken:
            logs, (_, non_trainable, _, metrics) = cast("tuple[Logs, State]", self.train_step(state, data))
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
        self, state: tuple[Values, Values, Values], sums: list[Array], count: Array
    ) -> tuple[Values, Values, Values]:
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
    """An optimizer that collects gradients in a list while there is one."""

    _taken: list[Values] | None = None

    @contextmanager
    def taking_gradients(self) -> Iterator[list[Values]]:
        """Provide a list that gets the gradients of each call of ``stateless_apply`` in the block."""
        taken: list[Values] = []
        object.__setattr__(self, "_taken", taken)
        try:
            yield taken
        finally:
            object.__setattr__(self, "_taken", None)

    def stateless_apply(self, optimizer_variables: Values, grads: Values, trainable_variables: Values) -> object:
        """See Keras."""
        if self._taken is None:
            return super().stateless_apply(optimizer_variables, grads, trainable_variables)
        self._taken.append(grads)
        return trainable_variables, optimizer_variables


# Packs --------------------------------------------------------------------------------------------------------------


def pack(values: Values, factors: Sequence[int]) -> list[jax.Array]:
    """Return flat arrays of values, each times its factor.

    Values of 16 bits become float32, which has room for the products.
    """

    def times(value: jax.Array, factor: int) -> jax.Array:
        wide = value.astype("float32") if is_half(value.dtype) else value
        # Multiplying by 1 would be a copy.
        return wide if factor == 1 else wide * float(factor)

    return [jnp.concatenate([times(values[at], factors[at]).ravel() for at in places]) for places in _packs(values)]


def unpack(sums: Sequence[Array], count: Array, like: Values) -> list[jax.Array]:
    """Return the means of packed values, with the shapes and dtypes of ``like``."""
    found: dict[int, jax.Array] = {}
    for flat, places in zip(sums, _packs(like), strict=True):
        mean, start = jnp.divide(flat, count.astype(flat.dtype)), 0
        for at in places:
            end = start + math.prod(like[at].shape)
            found[at] = mean[start:end].reshape(like[at].shape).astype(like[at].dtype)
            start = end
    return [found[at] for at in range(len(like))]


def _packs(values: Values) -> list[list[int]]:
    """Return the positions of the values in each pack. Large values are alone."""
    places: dict[object, list[int]] = {}
    for at, value in enumerate(values):
        is_large = math.prod(value.shape) > _MOST_SMALL_ELEMENTS
        places.setdefault(at if is_large else value.dtype, []).append(at)
    return list(places.values())


def room_for(arrays: Sequence[Array]) -> list[Array]:
    """Return arrays of the same sizes, which JAX does not copy on a CPU."""
    found = []
    for array in arrays:
        room = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
        start = -room.ctypes.data % _ALIGNMENT
        found.append(room[start : start + array.nbytes].view(array.dtype))
    return found
