"""CentralExtended: one copy of each variable, which all replicas share, wherever it is kept.

A replica that assigns hands its value over; the values of the replicas become one by the variable's aggregation and are
applied once. CentralStorageStrategy and the parameter server strategies differ in where the copy is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mpidist.arrays.convert import Array
from mpidist.core import context, nest
from mpidist.core.context import Frame
from mpidist.core.enums import VariableSynchronization
from mpidist.strategies.replica_context import ReplicaContext
from mpidist.strategies.replicated import ReplicatedExtended
from mpidist.values import Mirrored, ReplicaValues, Variable
from mpidist.values.component import Component
from mpidist.values.placement import place_at
from mpidist.values.variable import initial_array, variable_of


class CentralExtended(ReplicatedExtended):
    """Replicas in sync that share one copy of each variable; a subclass says where it is.

    A variable's synchronization means nothing here: there is one copy, and each is ON_WRITE.
    """

    _is_central = True

    def _create_variable(self, **kwargs: Any) -> Variable:
        name, dtype, shape = kwargs["name"], kwargs.pop("dtype"), kwargs.pop("shape")
        with self._shared_errors(f"creating variable {name!r}"):
            array = initial_array(kwargs["initial_value"], dtype, shape, kwargs["aggregation"])
        kwargs["synchronization"] = VariableSynchronization.ON_WRITE
        return variable_of(self._strategy, [self._make_component(array, kwargs)], **kwargs)

    def _make_component(self, array: Array, properties: dict[str, Any]) -> Component:
        """Return the copy of a new variable; ``properties`` are those that ``Variable`` was given."""
        raise NotImplementedError

    def _changing(self, label: str, what: str, checksum: Callable[[], int]) -> AbstractContextManager[None]:
        del label, what, checksum
        # There are no copies that could differ.
        return nullcontext()

    def _done(self, label: str, what: str, checksum: Callable[[], int]) -> None:
        """What the ranks have in common is changed by one of them."""

    def _update_device(self, component: Component) -> str:
        """Return the device of this process that is current while ``component`` is updated."""
        return component.device

    def _update(
        self, var: Variable, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], group: bool
    ) -> Any:
        (component,) = var.values
        result = self._call_once(self._update_device(component), fn, (component, *args), kwargs)
        return nest.map_structure(self.value_container, result) if group else (result,)

    def _update_non_slot(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], group: bool
    ) -> Any:
        result = self._call_once(self.parameter_devices[0], fn, args, kwargs)
        return result if group else (result,)

    def _call_once(self, device: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an update function in update context."""
        with self._shared_errors("an update function"):
            args, kwargs = nest.map_structure(self._sole, (args, kwargs))
            with place_at(device).current(), context.entered(Frame(self._strategy, None, 0)):
                return fn(*args, **kwargs)

    def _replica_ctx_update(
        self, ctx: ReplicaContext, var: Variable, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool
    ) -> Any:
        def merged(_: Any, *args: Any, **kwargs: Any) -> Any:
            return self._update(self._own_variable(var, "update"), fn, args, kwargs, group)

        return ctx._meet(("update", var._label), merged, tuple(args), kwargs or {})

    def _sole(self, value: Any) -> Any:
        """Return an argument of an update as it is handed on: there is one copy, so it must be one value."""
        if not isinstance(value, ReplicaValues):
            return value
        if len(value.values) > 1:
            raise ValueError(
                f"a {type(value).__name__} of {len(value.values)} replicas was given to update() of a variable of "
                f"{type(self._strategy).__name__}, which has one copy; expected one value: reduce it first with "
                "strategy.extended.reduce_to(op, value, variable)"
            )
        return value.values[0]

    def _distributed(self, value: Any) -> Any:
        # The same value on every replica, as in a strategy with a copy for each.
        return Mirrored((value.value(),) * len(self._ids), self._ids) if isinstance(value, Variable) else value
