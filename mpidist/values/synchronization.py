"""The rules that keep the copies of a variable together: synchronization x aggregation x context.

Writing (n replicas, n > 1):

| synchronization, aggregation | in replica context | in cross-replica context |
|---|---|---|
| ON_WRITE, NONE | ValueError | the value goes to every copy; the value r of a PerReplica to copy r |
| ON_WRITE, SUM | sum of the replicas' values, to every copy | the value goes to every copy |
| ON_WRITE, MEAN | mean of the replicas' values, to every copy | the value goes to every copy |
| ON_WRITE, ONLY_FIRST_REPLICA | value of replica 0, to every copy | the value goes to every copy |
| ON_READ, SUM | this replica's copy only | assign: value / n to every copy; assign_add, assign_sub: ValueError |
| ON_READ, others | this replica's copy only | the value goes to every copy |

Reading: in replica context this replica's copy. In cross-replica context ON_WRITE reads the first local copy,
ON_READ the sum, the mean, or replica 0's copy; ON_READ with NONE is a ValueError. In an update context both
reading and writing address the copy that is being updated.

A number or array that every replica assigns counts once per replica, whatever it is and however the replicas
are laid out over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.arrays.dtypes import Array
from mpidist.core.context import ReplicaContextLike, StrategyLike
from mpidist.core.options import ReduceOp, VariableAggregation, VariableSynchronization
from mpidist.values.component import ArrayComponent, Assignment, Component, as_value_of, assign
from mpidist.values.distributed import PerReplica, ReplicaValues
from mpidist.values.indexed_slices import IndexedSlices
from mpidist.values.placement import array_of, checksum, place_at, place_of, placed
from mpidist.values.scatter import ScatterOp
from mpidist.values.variable import Policy, Variable, changing


def _write_all(variable: Variable, how: Assignment, value: object) -> None:
    is_central = variable.distribute_strategy.extended.is_central
    if isinstance(value, PerReplica) and (is_central or len(value.values) != len(variable.values)):
        raise ValueError(
            f"a PerReplica of {len(value.values)} replicas was assigned to variable {variable.name!r}, which has "
            f"{len(variable.values)} copies on this rank; expected one value: reduce it first with "
            "strategy.reduce(...), or assign inside strategy.run()"
        )
    for i, component in enumerate(variable.values):
        if isinstance(value, ReplicaValues):
            part = value.values[i] if len(value.values) == len(variable.values) else value.values[0]
        else:
            part = value
        component.assign_by(how, part)


def _aggregated(variable: Variable, value: object, destination: object, doing: str) -> Any:
    """Return the values of all replicas as one, by the aggregation of a variable (collective)."""
    extended = variable.distribute_strategy.extended
    if variable.aggregation == VariableAggregation.ONLY_FIRST_REPLICA:
        mine = value.values[0] if isinstance(value, ReplicaValues) else value
        return extended.broadcast_nest(mine, note=doing)
    op = ReduceOp.from_variable_aggregation(variable.aggregation)
    return extended.reduce_pairs(op, [(value, destination)], None, doing)[0]


class _OnWrite(Policy):
    """Copies are equal at all times."""

    def assign_in_replica(self, variable: Variable, context: ReplicaContextLike, how: Assignment, value: Array) -> None:
        """Assign in replica context."""
        self._require_aggregation(variable)
        if variable.aggregation == VariableAggregation.MEAN and variable.dtype.kind in "iub":
            raise ValueError(
                f"variable {variable.name!r} of dtype {variable.dtype} has aggregation MEAN, and the mean of the "
                "replicas' values need not be an integer. Create it with a floating dtype, or with aggregation SUM or "
                "ONLY_FIRST_REPLICA"
            )

        def merged(_: StrategyLike, values: object) -> None:
            _write_all(variable, how, _aggregated(variable, values, variable, doing))
            if how is assign:
                variable.differs = False

        doing = f"{how.__name__} of variable {variable.label!r}"
        context.meet((doing,), merged, (value,), {})

    def assign_across(self, variable: Variable, how: Assignment, value: object) -> None:
        """Assign in cross-replica context."""
        doing = f"{how.__name__} outside of strategy.run()"
        differs = isinstance(value, PerReplica)
        if not differs and not (variable.differs and how is assign):
            with changing(variable, doing):
                _write_all(variable, how, value)
            return
        # There is no state to be compared before or after: the copies differ. But all ranks have to do it.
        if not variable.is_copy:
            variable.distribute_strategy.extended.settle(variable.label)
        _write_all(variable, how, value)
        variable.differs = differs
        if not variable.is_copy:
            what = f"{doing} {'of a PerReplica ' if differs else ''}to variable {variable.label!r}"
            variable.distribute_strategy.extended.done(
                f"copies of {variable.label}",
                what,
                lambda: 1 if differs else checksum(variable.values[0].local_array()),
            )

    def check_scatter(self, variable: Variable, how: ScatterOp) -> None:
        """Raise NotImplementedError where ``how`` has no meaning."""
        if not how.can_aggregate and variable.aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
            raise NotImplementedError(
                f"{how.name} on variable {variable.name!r} with aggregation {variable.aggregation.name}; "
                "expected aggregation NONE or ONLY_FIRST_REPLICA"
            )

    def scatter_in_replica(
        self, variable: Variable, context: ReplicaContextLike, how: ScatterOp, slices: IndexedSlices
    ) -> None:
        """Scatter in replica context, which ``check_scatter`` allows."""
        self._require_aggregation(variable)
        if variable.aggregation == VariableAggregation.ONLY_FIRST_REPLICA:
            op = ReduceOp.SUM
            if context.replica_id_in_sync_group != 0:
                slices = IndexedSlices(slices.values[:0], slices.indices[:0], slices.dense_shape)
        else:
            op = ReduceOp.from_variable_aggregation(variable.aggregation)
        self._scatter_rows(op, variable, context, how, slices)

    def _scatter_rows(
        self, op: ReduceOp, variable: Variable, context: ReplicaContextLike, how: ScatterOp, slices: IndexedSlices
    ) -> None:
        def merged(strategy: StrategyLike, values: object) -> None:
            combined = strategy.extended.reduce_pairs(op, [(values, variable)], None, doing)[0]
            for i, component in enumerate(variable.values):
                part = combined.values[i] if isinstance(combined, ReplicaValues) else combined
                component.scatter_by(how, part)

        doing = f"{how.name} of variable {variable.label!r}"
        context.meet((doing,), merged, (slices,), {})

    def _require_aggregation(self, variable: Variable) -> None:
        if variable.aggregation == VariableAggregation.NONE:
            raise ValueError(
                f"variable {variable.name!r} was assigned inside strategy.run() and does not say how the values of "
                "the replicas become one; create it with aggregation=mpidist.VariableAggregation.SUM, MEAN or "
                "ONLY_FIRST_REPLICA"
            )


class _Central(_OnWrite):
    """There is one copy, into which every replica scatters.

    In TensorFlow too, aggregation is for assignments alone.
    """

    def check_scatter(self, variable: Variable, how: ScatterOp) -> None:
        """Allow all of them."""

    def scatter_in_replica(
        self, variable: Variable, context: ReplicaContextLike, how: ScatterOp, slices: IndexedSlices
    ) -> None:
        self._scatter_rows(ReduceOp.SUM, variable, context, how, slices)


class _OnRead(_OnWrite):
    """Every replica writes its own copy; copies are combined when they are read together."""

    combines = True

    def read(self, variable: Variable) -> Array:
        if variable.aggregation == VariableAggregation.NONE:
            raise ValueError(
                f"variable {variable.name!r} is synchronized ON_READ with aggregation NONE, so its copies cannot be "
                "read as one; create it with aggregation=mpidist.VariableAggregation.SUM, MEAN or "
                "ONLY_FIRST_REPLICA, or read it inside strategy.run()"
            )
        strategy = variable.distribute_strategy
        copies = PerReplica([c.local_array() for c in variable.values], strategy.extended.local_replica_ids)
        with strategy.scope():
            doing = f"reading variable {variable.label!r}"
            return array_of(_aggregated(variable, copies, variable.devices[0], doing))

    def assign_in_replica(self, variable: Variable, context: ReplicaContextLike, how: Assignment, value: Array) -> None:
        variable.values[context.local_replica_id].assign_by(how, value)

    def assign_across(self, variable: Variable, how: Assignment, value: object) -> None:
        if variable.aggregation == VariableAggregation.SUM:
            if how is not assign:
                raise ValueError(
                    f"assign_add or assign_sub in cross-replica context on variable {variable.name!r}, whose value is "
                    "the sum of its copies: which copy should change? Call it inside strategy.run(), or use assign()"
                )
            total = as_value_of(variable, value)
            with place_of(total).current():
                value = (total / variable.distribute_strategy.num_replicas_in_sync).astype(variable.dtype)
        _write_all(variable, how, value)

    def check_scatter(self, variable: Variable, how: ScatterOp) -> None:
        raise NotImplementedError(
            f"{how.name} on variable {variable.name!r}, which is synchronized ON_READ; expected ON_WRITE"
        )


_ON_WRITE, _ON_READ, _CENTRAL = _OnWrite(), _OnRead(), _Central()


def make_variable(strategy: StrategyLike, devices: Sequence[str], array: Array, **properties: Any) -> Variable:
    """Return a variable with a copy of ``array`` for each of ``devices``; for ``StrategyExtended.create_variable``."""
    name = properties["name"]
    components = [
        ArrayComponent(place_at(device).copies(array), name if i == 0 else f"{name}/replica_{i}", device)
        for i, device in enumerate(placed(devices))
    ]
    return variable_of(strategy, components, **properties)


def variable_of(strategy: StrategyLike, components: Sequence[Component], **properties: Any) -> Variable:
    """Return a variable made of ``components``, which no other variable has."""
    variable: Variable = object.__new__(Variable)
    policy = _ON_READ if properties["synchronization"] == VariableSynchronization.ON_READ else _ON_WRITE
    if strategy.extended.is_central:
        policy = _CENTRAL
    variable.assemble(strategy, components, policy=policy, **properties)
    return variable
