"""Optimizer: aggregation, slots, step counter, saved state; SGD, RMSprop, Adam and AdamW."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpidist.arrays.convert import to_array
from mpidist.arrays.dtypes import Array, DType
from mpidist.core.context import get_replica_context, has_strategy, in_cross_replica_context, in_scope_of
from mpidist.core.options import VariableAggregation, VariableSynchronization
from mpidist.training import gradients as gradient_tools
from mpidist.training.gradients import Buckets, GradientsAndVariables, check_is_float, strategy_of
from mpidist.values import CompositeVariable, IndexedSlices, Variable
from mpidist.values.composite import AnyVariable, Slots, cut_for, parts_of, slot_keys, wholes_of
from mpidist.values.placement import variables_on_host

if TYPE_CHECKING:
    from mpidist.strategies import ReplicaContext, Strategy

# Gradients that have been summed, and their variables.
Summed = tuple[list[Any], list[Variable]]
LearningRate = float | Callable[[int], float]
# Attributes that no program changes.
_NO_SETTINGS = ("name", "slot_names")


class Optimizer:
    """Changes variables by their gradients; subclasses say how one variable is changed.

    A subclass names its slots (arrays kept per variable) in ``slot_names`` and implements ``update_variable``.

    Args:
        learning_rate: A number, or a function of the step (0 for the first update) that returns one.
        name: For the names of its variables.

    Raises:
        TypeError: A learning rate that is neither a number nor a function of the step.
    """

    slot_names: tuple[str, ...] = ()

    @property
    def touches_only_rows(self) -> bool:
        """Whether a sparse gradient changes only its rows; not where slots of all rows decay."""
        return False

    def __init__(self, learning_rate: LearningRate, name: str) -> None:
        if has_strategy() and not in_cross_replica_context():
            raise RuntimeError(
                f"{type(self).__name__} was created inside strategy.run(), where every step would start with new "
                "slots; create the optimizer once, before, inside `with strategy.scope():`"
            )
        self.name = name
        self._schedule: Callable[[int], float] | None = None
        # In a dict, where a checkpoint can put back what it holds.
        self._numbers: dict[str, float] = {}
        self.learning_rate = learning_rate
        self._iterations: Variable | None = None
        self._slots: dict[Variable, dict[str, Variable]] = {}
        # Restored values for slots that do not exist yet.
        self._deferred: dict[str, Array] = {}
        # Returns the checkpoint's path of each variable, to find the restored values of its slots.
        self._paths: Callable[[], Mapping[AnyVariable, str]] = dict
        # The settings that all ranks have said to be theirs.
        self._agreed = ""

    # What users set and read ----------------------------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update.

        Assign a number or a function of the step.
        """
        return self.rate_at(self._step())

    @learning_rate.setter
    def learning_rate(self, value: LearningRate) -> None:
        if not callable(value) and not isinstance(value, (int, float, np.number)):
            raise TypeError(f"learning_rate is {value!r}; expected a number or a function of the step")
        if callable(value):
            _check_schedule(value)
            self._schedule = value
            self._numbers.clear()
        else:
            self._schedule = None
            self._numbers["learning_rate"] = float(value)

    @property
    def iterations(self) -> Variable:
        """Number of updates so far, an int64 variable (ON_WRITE, ONLY_FIRST_REPLICA).

        Raises:
            RuntimeError: It does not exist before ``build`` or the first ``apply_gradients``.
        """
        if self._iterations is None:
            raise RuntimeError(
                f"{type(self).__name__} has no variables yet; call optimizer.build(variables) inside "
                "`with strategy.scope():`, or apply_gradients() first"
            )
        return self._iterations

    @property
    def variables(self) -> list[Variable]:
        """``iterations`` and all slots, in the order they were made; empty before ``build``."""
        slots = [slot for slots in self._slots.values() for slot in slots.values()]
        return [] if self._iterations is None else [self._iterations, *slots]

    def get_slot(self, variable: AnyVariable, slot_name: str) -> AnyVariable:
        """Return the slot of a variable.

        It is a Variable, or of a ShardedVariable another one made of its shards' slots.

        Raises:
            ValueError: There is no such slot, or the variable has none yet.
        """
        slots = [self._slots.get(part, {}) for part in parts_of(variable)]
        if not all(slot_name in those for those in slots):
            raise ValueError(
                f"no slot {slot_name!r} for variable {variable.name!r}; {type(self).__name__} has the slots "
                f"{list(self.slot_names)} for the variables {[v.name for v in self._slots]}"
            )
        found = [those[slot_name] for those in slots]
        if isinstance(variable, CompositeVariable):
            return variable.like(found, f"{self.name}/{variable.name}/{slot_name}")
        return found[0]

    # Making variables -----------------------------------------------------------------------------------------

    def build(self, var_list: Iterable[AnyVariable]) -> None:
        """Make the step counter, and the slots of variables that have none.

        Collective: call it on every rank, in the same order. The variables' own strategy is entered, so it may be
        called outside its scope; inside ``strategy.run`` the first ``apply_gradients`` does it. Slots that a
        checkpoint was restored for start from its values.

        Args:
            var_list: The variables that will be updated, in any order. A shard of a ShardedVariable stands for the
                whole of it.

        Raises:
            ValueError: Variables of different strategies, or synchronized ON_READ.
            TypeError: Variables that do not hold floating-point numbers.
            RuntimeError: Called inside ``strategy.run``.
        """
        wholes = [whole for whole in wholes_of(var_list) if any(part not in self._slots for part in parts_of(whole))]
        new = [part for whole in wholes for part in parts_of(whole)]
        if not new:
            return
        for variable in new:
            self._check_variable(variable)
        strategy = strategy_of([*self._slots, *new])
        with in_scope_of(strategy):
            if self._iterations is None:
                # On the host: reading it in a step must not wait for a device.
                with variables_on_host():
                    start = self._start_of("iterations", (), np.dtype(np.int64))
                    self._iterations = self._make_variable("iterations", start)
            for whole, group in zip(wholes, self._restored_groups(wholes, strategy), strict=True):
                self._make_slots(whole, group, strategy)
            self._find_slots(self._paths)

    def _restored_groups(self, wholes: list[AnyVariable], strategy: Strategy) -> list[str | None]:
        """Return the key under which the restored slots of each new variable wait, None without."""
        if not self._deferred:
            return [None] * len(wholes)
        paths = self._paths()
        keys = slot_keys([*wholes_of(self._slots), *wholes], paths)[-len(wholes) :]
        groups = [
            next(
                (key for key in candidates if any(f"{key}/{slot}" in self._deferred for slot in self.slot_names)), None
            )
            for candidates in keys
        ]
        fresh = [v.name for v, group in zip(wholes, groups, strict=True) if group is None and v not in paths]
        found = tuple(f"{group}/" for group in groups)
        waiting = sorted(key for key in self._deferred if key.startswith("slots") and not key.startswith(found))
        if fresh and waiting and strategy.extended.should_checkpoint:
            warnings.warn(
                f"the slots of the variables {fresh} start from zero, although restored slots wait: {waiting}. The "
                "checkpoint's objects do not hold these variables. Attach the variables to the objects before "
                "optimizer.build()",
                stacklevel=3,
            )
        return groups

    def _make_slots(self, whole: AnyVariable, group: str | None, strategy: Strategy) -> None:
        dtype = compute_dtype(whole)
        starts = {slot: self._start_of(f"{group}/{slot}", whole.shape, dtype) for slot in self.slot_names}
        shares = {slot: cut_for(whole, start) for slot, start in starts.items()}
        for number, variable in enumerate(parts_of(whole)):
            # The default strategy places nothing, and has no scope to be in.
            beside = strategy.extended.colocate_vars_with(variable) if has_strategy() else nullcontext()
            with beside:
                self._slots[variable] = {
                    slot: self._make_variable(f"{variable.name}/{slot}", those[number])
                    for slot, those in shares.items()
                }

    def _start_of(self, key: str, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return the initial value of an own variable: a restored one, or zeros."""
        value = self._deferred.get(key)
        if value is None:
            return np.zeros(shape, dtype)
        if (value.shape, value.dtype) != (shape, dtype):
            raise ValueError(
                f"the restored checkpoint has {key} of shape {value.shape} and dtype {value.dtype} for optimizer "
                f"{self.name!r}, whose variable has shape {shape} and dtype {dtype}. Build the optimizer with the "
                "variables that were saved, or restore another checkpoint"
            )
        return self._deferred.pop(key)

    def _make_variable(self, name: str, value: Array) -> Variable:
        return Variable(
            value,
            name=f"{self.name}/{name}",
            trainable=False,
            synchronization=VariableSynchronization.ON_WRITE,
            aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
        )

    # Updating -------------------------------------------------------------------------------------------------

    def aggregate_gradients(self, grads_and_vars: GradientsAndVariables) -> list[tuple[Any, Variable]]:
        """Return the pairs with the gradients summed over replicas: see ``mpidist.optimizers.aggregate_gradients``."""
        return gradient_tools.aggregate_gradients(grads_and_vars)

    def apply_gradients(
        self, grads_and_vars: GradientsAndVariables, experimental_aggregate_gradients: bool = True
    ) -> None:
        """Update variables by their gradients.

        Inside ``strategy.run`` it is collective: call it on every replica, with gradients for the same variables.
        The gradients are *summed* over replicas (divide the loss by the global batch size), packed into buckets of
        16 MiB, and each replica updates its own copies, all alike, as soon as the sums of a bucket are there. A
        generator that computes the gradients as it goes, those of the last layers first, hides the communication: each
        bucket is on its way while the next gradients are computed; yielded gradients must not be changed before
        the call returns. After an error in the middle (PeerError, MismatchError) some variables have been updated and
        others not: go back to a checkpoint.

        Outside ``run`` the gradients are taken for sums already and every copy is updated by them: they must be the
        same on all ranks, which is checked by their checksums. (Keras raises an error there.) So must be the settings,
        which the ranks compare whenever one has changed, and the learning rate of each step.

        The first call makes the optimizer's variables if ``build`` was not called.

        Args:
            grads_and_vars: Pairs of gradient and variable, or ShardedVariable. A gradient is an array of the
                variable's shape and dtype, IndexedSlices, or None, which leaves the variable as it is.
            experimental_aggregate_gradients: False takes the gradients for sums already also inside ``run``;
                they must then be the same on all replicas, which is checked in the same way.

        Raises:
            ValueError: Only None, shapes that do not fit, or variables of another strategy. Gradients taken for sums
                that differ between replicas of this rank.
            TypeError: Dtypes that do not fit.
            MismatchError: Other settings, or gradients taken for sums, than on another rank.

        Source: https://www.tensorflow.org/tutorials/distribute/custom_training
        """
        context = cast("ReplicaContext | None", get_replica_context())
        each = gradient_tools.each_checked(grads_and_vars)
        if context is not None and experimental_aggregate_gradients and isinstance(grads_and_vars, Generator):
            self._apply_in_replica(context, each, True)
            return
        pairs = list(each)
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        strategy = strategy_of(variables)
        if context is not None and context.strategy is strategy:
            self._apply_in_replica(context, pairs, experimental_aggregate_gradients)
            return
        with in_scope_of(strategy):
            self.build(variables)
            self._agree_on_sums(strategy, partial(gradient_tools.checksum, gradients))
            strategy.extended.update(
                self.iterations,
                lambda iterations, grads: self._update_all(iterations, [(grads, variables)]),
                args=(gradients,),
            )

    def _apply_in_replica(
        self, context: ReplicaContext, pairs: Iterable[tuple[Any, Variable]], aggregates: bool
    ) -> None:
        """Sum gradients over the replicas, unless they are sums already, and update this one."""
        self._agree_in_replica(context)
        buckets, sums, variables = Buckets(context), [], []
        for gradient, variable in pairs:
            if variable.distribute_strategy is not context.strategy:
                strategy_of([variable])
                raise ValueError(
                    f"variable {variable.name!r} belongs to {type(variable.distribute_strategy).__name__}, and this is "
                    f"a replica of {type(context.strategy).__name__}; create it inside `with strategy.scope():`"
                )
            if aggregates:
                buckets.add(gradient, variable)
            else:
                sums.append(gradient)
            variables.append(variable)
        if not aggregates and context.strategy.num_replicas_in_sync > 1:
            code = gradient_tools.checksum(sums)
            context.merge_call(self._agree_on_sums_of_replicas, args=(code,))
        summed: Iterable[Summed] = buckets.sums() if aggregates else [(sums, variables)]
        self._build_in_replica(variables)
        # One update context for all: inside it every variable, slots included, means this replica's copy.
        context.strategy.extended.update_in_replica(context, self.iterations, partial(self._update_all, summed=summed))

    def _agree_on_sums_of_replicas(self, strategy: Strategy, codes: int) -> None:
        code, *others = strategy.experimental_local_results(codes)
        if any(other != code for other in others):
            raise ValueError(
                "experimental_aggregate_gradients=False was given gradients that differ between the replicas of this "
                "rank, so their copies of the variables would drift apart. Pass sums over all replicas, such as those "
                "of optimizer.aggregate_gradients()."
            )
        self._agree_on_sums(strategy, lambda: code)

    def _agree_on_sums(self, strategy: Strategy, checksum: Callable[[], int]) -> None:
        """Compare unsummed gradients between ranks, so that copies do not drift apart."""
        strategy.extended.agree_on(
            lambda: (
                f"apply_gradients() of {self._settings()} at the rate {self.learning_rate!r}, with gradients that are "
                f"not summed and must be the same on all ranks: their checksum is {checksum():08x}"
            )
        )

    def _build_in_replica(self, variables: list[Variable]) -> None:
        if all(variable in self._slots for variable in variables):
            return
        context = get_replica_context()
        if context is None or not has_strategy():
            self.build(variables)
        else:
            context.merge_call(lambda _: self.build(variables))
            if self._iterations is None:
                # Only the first replica's function was called, and it was about another optimizer.
                raise RuntimeError(
                    f"every replica has {type(self).__name__} of its own; create the optimizer once, outside "
                    "strategy.run(), and use it in all replicas"
                )

    def _settings(self) -> str:
        """Return the text of the optimizer's settings, except for a function of the step."""
        shown = [
            f"{name}={value!r}"
            for name, value in (self._numbers | self.public_attributes()).items()
            if name not in _NO_SETTINGS and not callable(value)
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _agree_in_replica(self, context: ReplicaContext) -> None:
        """Compare changed settings with those of the other ranks, before anything else is sent."""
        settings = self._settings()
        if settings != self._agreed and has_strategy():
            context.merge_call(lambda strategy: self._agree_on(strategy, settings))
        if self._schedule is not None and context.local_replica_id == 0:
            # Travels with the gradients.
            rate = self.learning_rate
            what = f"the learning rate {rate!r} of step {self._step()} by the schedule"
            context.strategy.extended.done(f"rate of {self.name}", what, lambda: zlib.crc32(repr(rate).encode()))

    def _agree_on(self, strategy: Strategy, settings: str) -> None:
        strategy.extended.agree_on(lambda: f"apply_gradients() of {settings}")
        self._agreed = settings

    def _update_all(self, _: object, summed: Iterable[Summed]) -> None:
        """Have the strategy update the variables in this update context."""
        strategy = cast("Strategy", self.iterations.distribute_strategy)
        strategy.extended.apply_gradients(self, map(self._that_change, summed))

    def _that_change(self, summed: Summed) -> Summed:
        """Leave out sparse gradients that change nothing, as most shards of a variable get."""
        if not self.touches_only_rows:
            return summed
        gradients, variables = summed
        kept = [
            (gradient, variable)
            for gradient, variable in zip(gradients, variables, strict=True)
            if not isinstance(gradient, IndexedSlices) or len(gradient.indices) or variable.constraint is not None
        ]
        return [gradient for gradient, _ in kept], [variable for _, variable in kept]

    def update_copies(self, summed: Iterable[Summed]) -> None:
        """Update the copies of the update context by summed gradients."""
        step = self._step()
        rate = self.rate_at(step)
        for gradients, variables in summed:
            for gradient, variable in zip(gradients, variables, strict=True):
                self.update_one(variable, gradient, rate, step)
        self.iterations.assign_add(1)

    def update_one(self, variable: Variable, gradient: Array | IndexedSlices, rate: float, step: int) -> None:
        """Update one variable, in update context, and keep it to its constraint; see :meth:`update_variable`."""
        place = variable.local_place()
        if isinstance(gradient, IndexedSlices):
            values = place.brings(gradient.values)
            self.update_sparse(variable, IndexedSlices(values, gradient.indices, gradient.dense_shape), rate, step)
        else:
            self.update_variable(variable, place.brings(gradient), rate, step)
        if variable.constraint is not None:
            variable.assign(variable.constraint(current(variable)))

    def update_variable(self, variable: Variable, gradient: Array, learning_rate: float, step: int) -> None:
        """Update one variable, in update context.

        It and its slots mean the copies of one replica.

        Args:
            variable: The variable.
            gradient: The summed gradient, of its shape and dtype, where it is, whose device is current; not to be
                changed.
            learning_rate: Of this step.
            step: Number of updates before this one.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement update_variable()")

    def update_sparse(self, variable: Variable, gradient: IndexedSlices, learning_rate: float, step: int) -> None:
        """Update one variable by a sparse gradient, by default by the dense one."""
        self.update_variable(variable, gradient.to_dense(), learning_rate, step)

    # For servers that update in the place of the program ------------------------------------------------------

    def rule(self) -> Optimizer:
        """Return a twin without variables and schedule, for updates elsewhere."""
        twin = copy.copy(self)
        vars(twin).update(_schedule=None, _numbers={}, _deferred={}, _paths=dict, _iterations=None, _slots={})
        return twin

    def take_settings(self, other: Optimizer) -> None:
        """Copy the settings of another optimizer of this kind, such as its momentum."""
        vars(self).update(other.public_attributes())

    def public_attributes(self) -> dict[str, Any]:
        """Return the settings of the optimizer by name, the learning rate aside."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def keep_slots(self, variable: Variable, slots: dict[str, Variable]) -> None:
        """Use ``slots`` for ``variable`` from now on."""
        self._slots[variable] = slots

    def slots_of(self, variable: Variable) -> dict[str, Variable]:
        """Return the slots of a variable by name; empty before ``build``."""
        return dict(self._slots.get(variable, {}))

    def __repr__(self) -> str:
        # Not the rate that a schedule gives now: the step may be known to a server alone.
        schedule = self._schedule
        rate = f"{_name_of(schedule)}(step)" if schedule is not None else repr(self._numbers.get("learning_rate"))
        return f"<{type(self).__name__} learning_rate={rate}>"

    # Helpers --------------------------------------------------------------------------------------------------

    def _step(self) -> int:
        if self._iterations is not None:
            return int(self._iterations.as_array())
        return int(self._deferred.get("iterations", 0))

    def rate_at(self, step: int) -> float:
        """Return the learning rate after so many updates."""
        return self._numbers["learning_rate"] if self._schedule is None else float(self._schedule(step))

    def _check_variable(self, variable: Variable) -> None:
        if not isinstance(variable, Variable):
            raise TypeError(f"the optimizer was given {variable!r}; expected a mpidist.Variable")
        if variable.synchronization == VariableSynchronization.ON_READ:
            raise ValueError(
                f"variable {variable.name!r} is synchronized ON_READ, so its copies differ; an optimizer expects "
                "synchronization ON_WRITE"
            )
        check_is_float(variable)

    # Saved state ----------------------------------------------------------------------------------------------

    def _checkpoint_children(self) -> dict[str, object]:
        """Return the state for a checkpoint, by name, with restored values not yet in use."""
        slots = {
            whole: {name: self.get_slot(whole, name) for name in self._slots[parts_of(whole)[0]]}
            for whole in wholes_of(self._slots)
        }
        children: dict[str, object] = {**self._deferred, "numbers": self._numbers}
        children["slots"] = Slots(slots, self._find_slots)
        if self._iterations is not None:
            children["iterations"] = self._iterations
        return children

    def _find_slots(self, paths: Callable[[], Mapping[AnyVariable, str]]) -> None:
        """Find restored slots by the paths of their variables from now on."""
        # The function keeps the objects of the checkpoint alive.
        self._paths = paths if self._deferred else dict

    def _checkpoint_defer(self, values: dict[str, Array]) -> None:
        """Keep restored values of slots that do not exist yet."""
        for key, value in self._deferred.items():
            values.setdefault(key, value)
        self._deferred = values


def current(variable: AnyVariable) -> Array:
    """Return the array of the variable's copy in this context, not to be written."""
    return variable.as_array()


def compute_dtype(variable: AnyVariable) -> DType:
    """Return the dtype of a variable's updates: float32 for half precision, else its own."""
    return np.dtype(np.float32) if variable.dtype.itemsize < 4 else variable.dtype


def _check_schedule(schedule: Callable[..., float]) -> None:
    """Raise TypeError unless a learning-rate function can be called with the step."""
    try:
        signature = inspect.signature(schedule)
    except (TypeError, ValueError):
        return  # some callables of C libraries do not tell
    try:
        signature.bind(0)
    except TypeError as error:
        raise TypeError(
            f"learning_rate is the function {schedule!r}{signature}, which cannot be called with the step alone "
            f"({error}); expected a number, or a function of the step: lambda step: 0.1 * 0.99**step"
        ) from None


def _name_of(schedule: Callable[[int], float]) -> str:
    name: str = getattr(schedule, "__name__", type(schedule).__name__)
    return name


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
        move = dtype.type(learning_rate) * gradient.astype(dtype, copy=False)
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
