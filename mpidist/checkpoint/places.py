"""Place: where a number or an immutable array stands, and how another one gets there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol


class Place(Protocol):
    """Somewhere a value can be replaced."""

    def get(self) -> Any:
        """Return what stands there."""

    def put(self, value: Any) -> None:
        """Let ``value`` stand there."""


@dataclass(frozen=True)
class Entry:
    """An entry of a dict or a list."""

    holder: Any
    name: Any

    def get(self) -> Any:
        """See ``Place``."""
        return self.holder[self.name]

    def put(self, value: Any) -> None:
        """See ``Place``."""
        self.holder[self.name] = value


@dataclass(frozen=True)
class Attribute:
    """An attribute of an object."""

    holder: Any
    name: str

    def get(self) -> Any:
        """See ``Place``."""
        return vars(self.holder)[self.name]

    def put(self, value: Any) -> None:
        """See ``Place``."""
        setattr(self.holder, self.name, value)


@dataclass(frozen=True)
class TupleEntry:
    """An entry of a tuple: another tuple is made, of the same class, and replaces it where it stands."""

    outer: Place
    index: int

    def get(self) -> Any:
        """See ``Place``."""
        return self.outer.get()[self.index]

    def put(self, value: Any) -> None:
        """See ``Place``."""
        before = self.outer.get()
        entries = [*before[: self.index], value, *before[self.index + 1 :]]
        self.outer.put(before._make(entries) if hasattr(before, "_make") else type(before)(entries))


@dataclass(frozen=True)
class FrozenField:
    """A field of a frozen dataclass: another one is made, and replaces it where it stands."""

    outer: Place
    name: str

    def get(self) -> Any:
        """See ``Place``."""
        return getattr(self.outer.get(), self.name)

    def put(self, value: Any) -> None:
        """See ``Place``."""
        self.outer.put(dataclasses.replace(self.outer.get(), **{self.name: value}))


def entry_of(container: Any, name: Any, outer: Place | None) -> Place | None:
    """Return the place of an entry of a dict, list or tuple that stands at ``outer``; None where it has none."""
    if isinstance(container, (dict, list)):
        return Entry(container, name)
    return TupleEntry(outer, name) if isinstance(container, tuple) and outer is not None else None


def attribute_of(holder: Any, name: str, outer: Place | None) -> Place | None:
    """Return the place of an attribute of an object that stands at ``outer``; None where it has none."""
    params: Any = getattr(holder, "__dataclass_params__", None)
    if params is not None and params.frozen:
        is_field = any(field.name == name and field.init for field in dataclasses.fields(holder))
        return FrozenField(outer, name) if outer is not None and is_field else None
    return Attribute(holder, name)
