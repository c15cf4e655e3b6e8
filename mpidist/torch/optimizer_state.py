"""The state of PyTorch's optimizers and schedulers in checkpoints.

Tensors are saved under the names of their parameters, settings and numbers as JSON. Optimizers create their tensors in
the first step, so a checkpoint may have tensors that an optimizer does not have yet.
"""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpidist.arrays.dtypes import Array
from mpidist.torch.tensors import fill

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "state/"
# Mark types that JSON lacks: tuples, and dicts whose keys are not strings.
_TUPLE, _ITEMS, _COUNTER = "(tuple)", "(items)", "(counter)"


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def settings_of(group: dict[str, object]) -> dict[str, object]:
    """Return the settings of a group, with numbers instead of tensors."""
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def held_tensors(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's state by key."""
    return {
        f"{_PREFIX}{names[parameter]}/{name}": value
        for parameter, state in optimizer.state.items()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def take(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], values: dict[str, Array]) -> None:
    """Move restored values that the optimizer has no tensors for yet into its state."""
    by_name = {name: parameter for parameter, name in names.items()}
    for key in [key for key in values if key.startswith(_PREFIX)]:
        owner, _, name = key.removeprefix(_PREFIX).rpartition("/")
        if owner in by_name:
            array = values.pop(key)
            tensor = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name))
            fill(tensor, array)
            optimizer.state[by_name[owner]][name] = tensor


def make_equal(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Copy the state of the first optimizer to the others."""
    first = optimizers[0]
    for other in optimizers[1:]:
        other.state.clear()
        for source, parameter in zip(parameters_of(first), parameters_of(other), strict=True):
            if source in first.state:
                other.state[parameter] = {
                    name: value.clone() if isinstance(value, torch.Tensor) else value
                    for name, value in first.state[source].items()
                }


class OptimizerSettings:
    """Settings of the optimizers of a rank's replicas, and their state without tensors. The first one's are saved."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[Tensor, str]) -> None:
        self._optimizers, self._names = optimizers, names

    def state(self) -> object:
        """Return the settings."""
        first = self._optimizers[0]
        values = {
            self._names[parameter]: {
                name: encoded(value) for name, value in state.items() if not isinstance(value, torch.Tensor)
            }
            for parameter, state in first.state.items()
        }
        return {
            "class": type(first).__name__,
            "groups": [encoded(settings_of(group)) for group in first.param_groups],
            "values": values,
            "tensors": sorted(held_tensors(first, self._names)),
        }

    def _checkpoint_check(self, state: object) -> None:
        """Raise TypeError or ValueError unless ``state`` has the format of a state."""
        kinds = {"class": str, "groups": list, "values": dict, "tensors": list}
        if not isinstance(state, dict) or not all(isinstance(state.get(name), kind) for name, kind in kinds.items()):
            raise ValueError(f"it is {reprlib.repr(state)}, which is no state of an optimizer")
        for part in (*state["groups"], *state["values"].values()):
            if not isinstance(part, dict) or not isinstance(decoded(part), dict):
                raise ValueError(f"it has {reprlib.repr(part)}, which is no settings of an optimizer")

    def restore(self, state: Any) -> None:
        """Set the settings, and drop tensors that did not exist when they were saved."""
        first = self._optimizers[0]
        if (state["class"], len(state["groups"])) != (type(first).__name__, len(first.param_groups)):
            raise ValueError(
                f"the checkpoint has {state['class']} with {len(state['groups'])} groups of parameters; expected "
                f"{type(first).__name__} with {len(first.param_groups)}"
            )
        for optimizer in self._optimizers:
            for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
                for name, value in saved.items():
                    if isinstance(group.get(name), torch.Tensor):
                        group[name].fill_(decoded(value))
                    else:
                        group[name] = decoded(value)
        kept = set(state["tensors"])
        for parameter, name in self._names.items():
            held = {
                part: value
                for part, value in first.state.pop(parameter, {}).items()
                if f"{_PREFIX}{name}/{part}" in kept
            }
            held.update({part: decoded(value) for part, value in state["values"].get(name, {}).items()})
            if held:
                # Optimizers initialize parameters without state.
                first.state[parameter] = held


class SchedulerState:
    """The state of a scheduler of ``torch.optim.lr_scheduler``."""

    def __init__(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
        self._scheduler = scheduler

    def state(self) -> object:
        """Return ``state_dict()`` in JSON's types."""
        return encoded(self._scheduler.state_dict())

    def _checkpoint_check(self, state: object) -> None:
        """Raise TypeError or ValueError unless ``state`` has the format of a state."""
        if not isinstance(decoded(state), dict):
            raise ValueError(f"it is {reprlib.repr(state)}, which is no state of a scheduler")

    def restore(self, state: object) -> None:
        """Set the state."""
        self._scheduler.load_state_dict(decoded(state))


def encoded(value: object) -> object:
    """Return a value in JSON's types; :func:`decoded` restores it.

    >>> encoded({"betas": (0.9, 0.99), "at": {3: 1}})
    {'betas': {'(tuple)': [0.9, 0.99]}, 'at': {'(items)': [[3, 1]]}}
    """
    if isinstance(value, tuple):
        return {_TUPLE: [encoded(each) for each in value]}
    if isinstance(value, Mapping):
        if all(type(name) is str for name in value):
            return {name: encoded(each) for name, each in value.items()}
        # MultiStepLR has a Counter.
        kind = _COUNTER if isinstance(value, Counter) else _ITEMS
        return {kind: [[encoded(name), encoded(each)] for name, each in value.items()]}
    if isinstance(value, list):
        return [encoded(each) for each in value]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value


def decoded(value: object) -> object:
    """Return a value as it was before :func:`encoded`.

    >>> decoded(encoded({"betas": (0.9, 0.99), "at": {3: 1}}))
    {'betas': (0.9, 0.99), 'at': {3: 1}}
    """
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(decoded(each) for each in value[_TUPLE])
    if value.keys() == {_COUNTER}:
        return Counter({decoded(name): count for name, count in value[_COUNTER]})
    if value.keys() == {_ITEMS}:
        return {decoded(name): decoded(each) for name, each in value[_ITEMS]}
    return {name: decoded(each) for name, each in value.items()}
