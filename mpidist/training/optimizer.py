"""Optimizer: sums gradients, updates variables by a rule, and keeps slots and saved state."""

from __future__ import annotations

import copy
import inspect
import operator
import warnings
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.core.context import get_replica_context, has_strategy, in_cross_replica_context, in_scope_of
from mpidist.core.options import VariableAggregation, VariableSynchronization
from mpidist.training import gradients as gradient_tools
from mpidist.training.gradients import GradientsAndVariables, Pair, Summed, check_is_float, labelled, strategy_of
from mpidist.values import CompositeVariable, IndexedSlices, Variable
from mpidist.values.component import ArrayComponent
from mpidist.values.composite import AnyVariable, Slots, cut_for, parts_of, slot_keys, wholes_of
from mpidist.values.placement import variables_on_host

if TYPE_CHECKING:
    from mpidist.strategies import ReplicaContext, Strategy

LearningRate = float | Callable[[int], float]
# Arrays of one shape and dtype: of a variable, its gradient and its slots, in the order of ``slot_names``.
Row = Sequence[Array]
# Attributes that are no settings.
_NO_SETTINGS = ("name", "slot_names")
# Bytes of a row that a rule updates at once, so that its operations find the arrays in the cache.
_ROW_BYTES = 64 << 10
# Plans are dropped at this number. A program with ever new sets of variables does not need them.
_MOST_PLANS = 8


class _Plan:
    """The arrays of variables and slots that a replica updates at each step, found once.

    Valid for NumPy gradients of the variables' shapes and dtypes, as long as no array is replaced.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        rows: Sequence[Sequence[Variable]],
        counter: Variable,
        summed: Callable[[list[Array]], list[Array]],
    ) -> None:
        self._variables = variables
        self._components = [cast(ArrayComponent, each.values[0]) for row in (*rows, [counter]) for each in row]
        self._arrays = [component.array for component in self._components]
        self._rows = [[cast(ArrayComponent, each.values[0]).array for each in row] for row in rows]
        self._kinds = [row[0].dtype for row in self._rows], [row[0].shape for row in self._rows]
        self._summed = summed
        self.counter = self._arrays[-1]

    def fits(self, gradients: Sequence[Any]) -> bool:
        """Return whether the plan is valid for these gradients."""
        return (
            {*map(type, gradients)} == {np.ndarray}
            and ([g.dtype for g in gradients], [g.shape for g in gradients]) == self._kinds
            and all(map(operator.is_, [component.array for component in self._components], self._arrays))
            and not any([variable.constraint for variable in self._variables])
        )

    def rows(self, gradients: list[Array]) -> list[Row]:
        """Sum gradients over the replicas, and return the rows to update (collective)."""
        rows: list[Row] = []
        for (array, *slots), gradient in zip(self._rows, self._summed(gradients), strict=True):
            # A gradient may be a view of the variable, of which each part is read before any is written.
            if array.nbytes <= _ROW_BYTES or any(np.may_share_memory(gradient, each) for each in (array, *slots)):
                rows.append((array, gradient, *slots))
                continue
            count = _ROW_BYTES // array.itemsize
            flat = [each.reshape(-1) for each in (array, gradient, *slots)]
            rows += [[each[at : at + count] for each in flat] for at in range(0, array.size, count)]
        return rows


class _Plans(dict[tuple[object, tuple[Variable, ...]], _Plan]):
    """The plans of one optimizer by replica context and variables. A copy of the optimizer makes its own."""

    def __deepcopy__(self, memo: object) -> _Plans:
        return _Plans()


class Optimizer:
    """Updates variables by their gradients. Subclasses define the update of one variable.

    A subclass names its slots (arrays kept per variable) in ``slot_names`` and implements ``update_variable``.

    Args:
        learning_rate: A number, or a function of the step (0 for the first update) that returns one.
        name: Prefix of the names of its variables.

    Raises:
        TypeError: ``learning_rate`` is neither a number nor a function of the step.
    """

    slot_names: tuple[str, ...] = ()

    @property
    def needed_slots(self) -> tuple[str, ...]:
        """The slots that the current settings need. ``slot_names`` are those of the settings at creation."""
        return self.slot_names

    @property
    def touches_only_rows(self) -> bool:
        """Whether a sparse gradient changes only its rows. False if slots of all rows decay."""
        return False

    def __init__(self, learning_rate: LearningRate, name: str) -> None:
        if has_strategy() and not in_cross_replica_context():
            raise RuntimeError(
                f"{type(self).__name__} was created inside strategy.run(), where every step would start with new "
                "slots; create the optimizer once, before, inside `with strategy.scope():`"
            )
        self.name = name
        self._schedule: Callable[[int], float] | None = None
        # A dict, so that a checkpoint can restore it in place.
        self._numbers: dict[str, float] = {}
        self.learning_rate = learning_rate
        self._iterations: Variable | None = None
        self._slots: dict[Variable, dict[str, Variable]] = {}
        # Restored values for slots that do not exist yet.
        self._deferred: dict[str, Array] = {}
        # Returns the checkpoint's path of each variable, to find the restored values of its slots.
        self._paths: Callable[[], Mapping[AnyVariable, str]] = dict
        # The settings that all ranks have agreed on.
        self._agreed = ""
        self._plans = _Plans()

    # Settings -------------------------------------------------------------------------------------------------

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
        """``iterations`` and all slots, in the order of creation. Empty before ``build``."""
        slots = [slot for slots in self._slots.values() for slot in slots.values()]
        return [] if self._iterations is None else [self._iterations, *slots]

    def get_slot(self, variable: AnyVariable, slot_name: str) -> AnyVariable:
        """Return the slot of a variable. The slot of a ShardedVariable is another ShardedVariable.

        Raises:
            ValueError: Unknown slot, or the variable has no slots yet.
        """
        slots = [self._slots.get(part, {}) for part in parts_of(variable)]
        if not all(slot_name in those for those in slots):
            raise ValueError(
                f"no slot {slot_name!r} for variable {variable.name!r}, which has the slots {list(slots[0])}. "
                f"{type(self).__name__} has slots for the variables {[v.name for v in self._slots]}"
            )
        found = [those[slot_name] for those in slots]
        if isinstance(variable, CompositeVariable):
            return variable.like(found, f"{self.name}/{variable.name}/{slot_name}")
        return found[0]

    # Creating variables ---------------------------------------------------------------------------------------

    def build(self, var_list: Iterable[AnyVariable]) -> None:
        """Create the step counter, and the slots of variables without slots.

        Collective: call it on every rank, in the same order. It enters the strategy of the variables, so you may call
        it outside the scope. Inside ``strategy.run``, the first ``apply_gradients`` calls it. Slots start from restored
        values if a checkpoint has them.

        Args:
            var_list: The variables to update, in any order. A shard stands for its whole ShardedVariable.

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
        """Return the key of the restored slots of each new variable, or None."""
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
            # The default strategy has no scope.
            with strategy.extended.colocate_vars_with(variable) if has_strategy() else nullcontext():
                self._slots[variable] = {
                    slot: self._make_variable(f"{variable.name}/{slot}", those[number])
                    for slot, those in shares.items()
                }

    def _start_of(self, key: str, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return the restored value of a variable of the optimizer, or zeros."""
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

    def aggregate_gradients(self, grads_and_vars: GradientsAndVariables) -> list[Pair]:
        """Return the pairs with the gradients summed over replicas: see ``mpidist.optimizers.aggregate_gradients``."""
        return gradient_tools.aggregate_gradients(grads_and_vars)

    def apply_gradients(
        self, grads_and_vars: GradientsAndVariables, experimental_aggregate_gradients: bool = True
    ) -> None:
        """Update variables by their gradients.

        Inside ``strategy.run`` it is collective: call it on every replica, with gradients for the same variables.
        The gradients are *summed* over replicas, so divide the loss by the global batch size. They are packed into
        buckets of 16 MiB, and each replica updates its own copies when the sums of a bucket are there. All copies stay
        equal. A generator that computes the gradients as it goes, the last layers first, hides the communication: each
        bucket is in flight while the next gradients are computed. Do not change yielded gradients before the call
        returns. After an error in the middle (PeerError, MismatchError), some variables are updated and others are not:
        restore a checkpoint.

        Outside ``run`` the gradients must be sums already, and the same on all ranks, which compare their checksums.
        (Keras raises an error there.) The settings must be the same, too: ranks compare them after a change, and the
        learning rate of a schedule at each step.

        The first call creates the optimizer's variables if ``build`` was not called.

        Args:
            grads_and_vars: Pairs of gradient and variable, or ShardedVariable. A gradient is an array of the
                variable's shape and dtype, IndexedSlices, or None, which leaves the variable unchanged.
            experimental_aggregate_gradients: Pass False if the gradients are sums already inside ``run``. They must
                be the same on all replicas, which compare their checksums.

        Raises:
            ValueError: Only None, shapes that do not fit, or variables of another strategy. Gradients passed as sums
                that differ between replicas of this rank.
            TypeError: Dtypes that do not fit.
            MismatchError: Other settings, or gradients passed as sums, than on another rank.

        Source: https://www.tensorflow.org/tutorials/distribute/custom_training
        """
        context = cast("ReplicaContext | None", get_replica_context())
        is_generator = isinstance(grads_and_vars, Generator)
        if context is not None and experimental_aggregate_gradients and not is_generator:
            grads_and_vars = list(grads_and_vars)
            if self._apply_planned(context, grads_and_vars):
                return
        each = gradient_tools.each_checked(grads_and_vars)
        if context is not None and experimental_aggregate_gradients and is_generator:
            self._apply_in_replica(context, each, True)
            return
        pairs = list(each)
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        strategy = strategy_of(variables)
        if context is not None and context.strategy is strategy:
            self._apply_in_replica(context, pairs, experimental_aggregate_gradients)
            if experimental_aggregate_gradients:
                self._make_plan(context, gradients, variables)
            return
        with in_scope_of(strategy):
            self.build(variables)
            self._agree_on_sums(strategy, partial(gradient_tools.checksum, gradients))
            strategy.extended.update(
                self.iterations,
                lambda iterations, grads: self._update_all(iterations, [(grads, variables)]),
                args=(gradients,),
            )

    def _apply_planned(self, context: ReplicaContext, pairs: list[Any]) -> bool:
        """Update by a plan, if there is one and nothing has changed since."""
        try:
            gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
            plan = self._plans.get((context, tuple(variables)))
        except (TypeError, ValueError):  # the general path raises an error that shows the pairs
            return False
        if plan is None or not plan.fits(gradients):
            return False
        self._agree_on_settings(context)
        if not self._plans:
            return False
        self._compare_rates(context)
        step = int(plan.counter)
        self.update_rows(plan.rows(gradients), self.rate_at(step), step)
        plan.counter += 1
        return True

    def _make_plan(self, context: ReplicaContext, gradients: list[object], variables: list[Variable]) -> None:
        """Plan the next updates, if each rank has one replica with its own NumPy arrays."""
        kind, nbytes = type(self), sum(variable.size * variable.dtype.itemsize for variable in variables)
        summed = context.sums_of(labelled(variables, gradients))
        if (
            summed is None
            or kind.update_variable is not Optimizer.update_variable
            or context.strategy.extended.is_central
            or nbytes >= gradient_tools.BUCKET_BYTES
            or any(not variable.local_place().is_host or variable.dtype.itemsize < 4 for variable in variables)
        ):
            return
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        rows = [[variable, *map(self._slots[variable].__getitem__, self.slot_names)] for variable in variables]
        self._plans[context, tuple(variables)] = _Plan(variables, rows, self.iterations, summed)

    def _apply_in_replica(self, context: ReplicaContext, pairs: Iterable[Pair], aggregates: bool) -> None:
        """Sum gradients over the replicas, unless they are sums already, and update this one."""
        self._agree_on_settings(context)
        self._compare_rates(context)
        variables: list[Variable] = []

        def own() -> Iterator[Pair]:
            for gradient, variable in pairs:
                if variable.distribute_strategy is not context.strategy:
                    strategy_of([variable])
                    raise ValueError(
                        f"variable {variable.name!r} belongs to {type(variable.distribute_strategy).__name__}, and "
                        f"this is a replica of {type(context.strategy).__name__}; create it inside "
                        "`with strategy.scope():`"
                    )
                variables.append(variable)
                yield gradient, variable

        if aggregates:
            summed = gradient_tools.in_buckets(context, own())
        else:
            sums = [gradient for gradient, _ in own()]
            if context.strategy.num_replicas_in_sync > 1:
                context.merge_call(self._agree_on_sums_of_replicas, args=(gradient_tools.checksum(sums),))
            summed = iter([(sums, variables)])
        self._build_in_replica(variables)
        # One update context for all. Inside it, variables and slots are this replica's copies.
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
        settings = self._numbers | self.public_attributes()
        shown = [f"{k}={v!r}" for k, v in settings.items() if k not in _NO_SETTINGS and not callable(v)]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _agree_on_settings(self, context: ReplicaContext) -> None:
        """Compare changed settings with those of the other ranks, before anything else is sent."""
        settings = self._settings()
        if settings == self._agreed:
            return
        if has_strategy():
            context.merge_call(lambda strategy: strategy.extended.agree_on(lambda: f"apply_gradients() of {settings}"))
        self._agreed = settings
        # Settings decide which slots are used.
        self._plans.clear()

    def _compare_rates(self, context: ReplicaContext) -> None:
        """Let the ranks compare the learning rate of a schedule."""
        if self._schedule is not None and context.local_replica_id == 0:
            # Travels with the gradients.
            rate = self.learning_rate
            what = f"the learning rate {rate!r} of step {self._step()} by the schedule"
            context.strategy.extended.done(f"rate of {self.name}", what, lambda: zlib.crc32(repr(rate).encode()))

    def _update_all(self, _: object, summed: Iterable[Summed]) -> None:
        """Let the strategy update the variables in this update context."""
        strategy = cast("Strategy", self.iterations.distribute_strategy)
        strategy.extended.apply_gradients(self, map(self._that_change, summed))

    def _that_change(self, summed: Summed) -> Summed:
        """Leave out sparse gradients without effect. Most shards of a variable get these."""
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
        """Update one variable, in update context, and apply its constraint; see :meth:`update_variable`."""
        place = variable.local_place()
        if isinstance(gradient, IndexedSlices):
            values = place.brings(gradient.values)
            self.update_sparse(variable, IndexedSlices(values, gradient.indices, gradient.dense_shape), rate, step)
        else:
            self.update_variable(variable, place.brings(gradient), rate, step)
        if variable.constraint is not None:
            variable.assign(variable.constraint(variable.as_array()))

    def update_variable(self, variable: Variable, gradient: Array, learning_rate: float, step: int) -> None:
        """Update one variable, in update context.

        The variable and its slots are the copies of one replica.

        Args:
            variable: The variable.
            gradient: The summed gradient, of the shape and dtype of the variable, on its device, which is current. Do
                not change it.
            learning_rate: Learning rate of this step.
            step: Number of updates before this one.
        """
        names = dict.fromkeys((*self.slot_names, *self.needed_slots))
        slots = [cast(Variable, self.get_slot(variable, name)) for name in names]
        target, *others = (cast(ArrayComponent, each.here()).writable() for each in (variable, *slots))
        dtype = compute_dtype(variable)
        array = target.astype(dtype, copy=False)
        self.update_rows([(array, gradient.astype(dtype, copy=False), *others)], learning_rate, step)
        if array is not target:
            target[...] = array

    def update_rows(self, rows: Iterable[Row], learning_rate: float, step: int) -> None:
        """Update arrays and their slots in place; the rule behind :meth:`update_variable` of mpidist's optimizers."""
        raise NotImplementedError(f"{type(self).__name__} does not implement update_variable()")

    def update_sparse(self, variable: Variable, gradient: IndexedSlices, learning_rate: float, step: int) -> None:
        """Update one variable by a sparse gradient, by default by the dense array."""
        self.update_variable(variable, gradient.to_dense(), learning_rate, step)

    # For servers that update in the place of the program ------------------------------------------------------

    def rule(self) -> Optimizer:
        """Return a copy without variables or schedule, for updates on a server."""
        twin = copy.copy(self)
        fresh: dict[str, object] = {"_numbers": {}, "_deferred": {}, "_slots": {}, "_plans": _Plans()}
        vars(twin).update(fresh, _schedule=None, _paths=dict, _iterations=None)
        return twin

    def take_settings(self, other: Optimizer) -> None:
        """Copy the settings of another optimizer of this kind, such as its momentum."""
        vars(self).update(other.public_attributes())

    def public_attributes(self) -> dict[str, Any]:
        """Return the settings of the optimizer by name, without the learning rate."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def keep_slots(self, variable: Variable, slots: dict[str, Variable]) -> None:
        """Use ``slots`` for ``variable`` from now on."""
        self._slots[variable] = slots

    def slots_of(self, variable: Variable) -> dict[str, Variable]:
        """Return the slots of a variable by name. Empty before ``build``."""
        return dict(self._slots.get(variable, {}))

    def __repr__(self) -> str:
        # Not the current rate of a schedule, because only a server may know the step.
        schedule = self._schedule
        rate = f"{_name_of(schedule)}(step)" if schedule is not None else repr(self._numbers.get("learning_rate"))
        return f"<{type(self).__name__} learning_rate={rate}>"

    # Helpers --------------------------------------------------------------------------------------------------

    def _step(self) -> int:
        if self._iterations is not None:
            return int(self._iterations.as_array())
        return int(self._deferred.get("iterations", 0))

    def rate_at(self, step: int) -> float:
        """Return the learning rate after ``step`` updates."""
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


def compute_dtype(variable: AnyVariable) -> DType:
    """Return the dtype of a variable's updates: float32 for half precision, else its own."""
    return np.dtype(np.float32) if variable.dtype.itemsize < 4 else variable.dtype


def _check_schedule(schedule: Callable[..., float]) -> None:
    """Raise TypeError unless a learning-rate function can be called with the step."""
    try:
        signature = inspect.signature(schedule)
    except (TypeError, ValueError):
        return  # some callables of C libraries have no signature
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
