"""The status of a restore, and values that wait for later variables."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from mpidist.arrays.dtypes import Array
from mpidist.checkpoint.alignment import align
from mpidist.checkpoint.collecting import WAITING_ATTRIBUTE, Leaves, collect, follow, is_within, keys_above
from mpidist.checkpoint.formats import Manifest
from mpidist.checkpoint.restoring import start_variable
from mpidist.values.composite import AnyVariable, parts_of
from mpidist.values.variable import Variable, begin_to_wait, stop_waiting


class Waiting:
    """Restored values that later variables get, before these are first used.

    Every rank has all of them, so that this takes no other rank. The objects keep it alive.

    Args:
        path: The checkpoint, for messages.
        objects: Those of the Checkpoint, by name.
        manifest: Of it.
        values: By key.

    Attributes:
        is_expected: Whether values that no variable gets are nothing to warn of.
        has_given: Whether any variable has got one.
        without_value: Keys of variables that came, and for which there is no value.
    """

    def __init__(self, path: str, objects: dict[str, object], manifest: Manifest, values: dict[str, Array]) -> None:
        self._path, self._objects, self._manifest, self._values = path, objects, manifest, values
        self.has_given = False
        self.without_value: dict[str, None] = {}
        self.is_expected = False
        self._keepers: list[object] = []
        if values:
            leaves = collect(objects)
            self._keepers += [leaves.objects[key] for key in sorted(leaves.given)]
            begin_to_wait(self)
        for keeper in self._keepers:
            vars(keeper)[WAITING_ATTRIBUTE] = self

    @property
    def open(self) -> tuple[str, ...]:
        """Keys of the values that no variable has got."""
        return tuple(sorted(self._values))

    def look(self, used: Variable | None = None) -> None:
        """Give each unused variable its value, if that waits; local, in any context.

        A value is given once: a later variable in the same place keeps its own. One that does not fit, or cannot be
        in a checkpoint, is told where it is used, saved or restored.

        Args:
            used: The variable that is about to be used, if it is one alone.

        Raises:
            ValueError: It has another shape or dtype than its value.
        """
        if not self._values:
            return
        for source, variable in self._give(collect(self._objects, is_complete=False)).items():
            if any(part is used for part in parts_of(variable)):
                raise self._misfit(source, variable)

    def look_at_all(self) -> None:
        """Give values as ``look`` does, and wait no more if nothing is left.

        Raises:
            TypeError: Something that a checkpoint cannot hold.
            ValueError: A variable has another shape or dtype than its value, or as ``collect``.
        """
        if self._values:
            for source, variable in self._give(collect(self._objects)).items():
                raise self._misfit(source, variable)
        if not self._values:
            self.end()

    def _give(self, leaves: Leaves) -> dict[str, AnyVariable]:
        """Give variables their values, and return misfits by the key of the value."""
        aligned = align(self._manifest, leaves)
        # Of two values of one variable, one may have been given.
        others = {one: other for one, other in aligned.doubles if one not in self._values}
        given, misfits = set(), {}
        for key, variable in leaves.variables.items():
            if not any(part.is_unused for part in parts_of(variable)):
                continue
            source = others.get(aligned.source(key), aligned.source(key))
            value = self._values.get(source)
            if value is None:
                if key not in aligned.manifest.tensors:
                    self.without_value[key] = None
            elif (value.shape, value.dtype) != (variable.shape, variable.dtype):
                misfits[source] = variable
            else:
                start_variable(variable, value)
                given.add(source)
        for source in given:
            del self._values[source]
            self.has_given = True
        # The mark of it stays on the objects: someone may be going through their attributes.
        if not self._values:
            stop_waiting(self)
        return misfits

    def _misfit(self, source: str, variable: AnyVariable) -> ValueError:
        value = self._values[source]
        return ValueError(
            f"checkpoint {self._path} does not fit the objects: {source!r} has shape {value.shape} and dtype "
            f"{value.dtype.name} in the checkpoint, and the variable that was made for it has shape "
            f"{variable.shape} and dtype {variable.dtype.name}"
        )

    def add_to(self, leaves: Leaves) -> None:
        """Let the waiting values be saved, too, so that another save keeps them."""
        there = {*leaves.saved(), *leaves.links}
        lacking = [key for key in self.open if follow(key, leaves.links) not in there]
        for key in lacking:
            tensor = self._manifest.tensors[key]
            leaves.add("arrays", key, self._values[key])
            leaves.awaited[key] = (tensor.synchronization, tensor.aggregation)
        for key, to in self._manifest.links.items():
            is_taken = keys_above(key) & there or any(is_within(name, key) for name in (*there, *leaves.containers))
            if not is_taken and any(is_within(name, to) for name in lacking):
                leaves.add("links", key, to)

    def end(self) -> None:
        """Wait no more, and leave no mark on the objects."""
        stop_waiting(self)
        self._values.clear()
        for keeper in self._keepers:
            if vars(keeper).get(WAITING_ATTRIBUTE) is self:
                del vars(keeper)[WAITING_ATTRIBUTE]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # A copy of an object, or one that is pickled, waits for nothing.
        return type(None), ()

    def __del__(self) -> None:
        if not self.is_expected and self._values:
            warnings.warn(
                f"checkpoint {self._path} has values that no variable has got: {list(self.open)}; check with "
                "status.assert_consumed() when all variables are made, or say restore(path).expect_partial()",
                stacklevel=2,
            )


@dataclass(eq=False, repr=False)
class LoadStatus:
    """The result of ``Checkpoint.restore``; ask it whether everything was restored.

    A status that is thrown away unasked warns of values that are missing or left over.

    Attributes:
        path: The checkpoint.
        unused: Keys of the checkpoint that no object has.
    """

    path: str
    unused: tuple[str, ...]
    _missing: list[str]
    _deferred: dict[str, dict[str, Array]]
    _waiting: Waiting
    _is_any: bool
    _is_asked: bool = False

    def __repr__(self) -> str:
        counts = f"{len(self.missing)} missing, {len(self.unused)} unused, {len(self.deferred)} deferred"
        return f"<LoadStatus of {self.path!r}: {counts}>"

    @property
    def missing(self) -> tuple[str, ...]:
        """Keys of objects without a value in the checkpoint, later ones included; they kept theirs."""
        return tuple(dict.fromkeys((*self._missing, *self._waiting.without_value)))

    @property
    def deferred(self) -> tuple[str, ...]:
        """Keys whose values wait for variables that an object has yet to make."""
        return (*(f"{key}/{name}" for key, values in self._deferred.items() for name in values), *self._waiting.open)

    def assert_consumed(self) -> LoadStatus:
        """Return the status if every value was restored and every object got one.

        Raises:
            AssertionError: Something is missing, left over or waiting; the message has the keys.
            ValueError: A variable that was made since has another shape or dtype than its value.
        """
        self._ask()
        problems = self._problems()
        if self.deferred:
            problems.append(
                f"values that wait for variables of an optimizer, or of an object: {list(self.deferred)} (call "
                "optimizer.build first; make the variables, and only then restore where they had been made elsewhere)"
            )
        if problems:
            raise AssertionError(f"checkpoint {self.path} does not match the objects: " + "; ".join(problems))
        return self

    def assert_existing_objects_matched(self) -> LoadStatus:
        """Return the status if every object that is there got a value.

        Raises:
            AssertionError: Values are missing.
            ValueError: A variable that was made since has another shape or dtype than its value.
        """
        self._ask()
        if self.missing:
            raise AssertionError(f"checkpoint {self.path} has no value for {list(self.missing)}")
        return self

    def assert_nontrivial_match(self) -> LoadStatus:
        """Return the status if any object got a value.

        Raises:
            AssertionError: None did.
            ValueError: A variable that was made since has another shape or dtype than its value.
        """
        self._ask()
        if not self._is_any and not self._waiting.has_given:
            raise AssertionError(f"checkpoint {self.path} has given no object a value; it has {list(self.deferred)}")
        return self

    def expect_partial(self) -> LoadStatus:
        """Say that values may be missing or left over: no warning. Those that wait are still given when it is time."""
        self._is_asked = True
        self._waiting.is_expected = True
        return self

    def _ask(self) -> None:
        self._is_asked = True
        self._waiting.look_at_all()

    def _problems(self) -> list[str]:
        problems = []
        if self.missing:
            problems.append(f"no value for {list(self.missing)}")
        if self.unused:
            problems.append(f"values that no object has: {list(self.unused)}")
        return problems

    def __del__(self) -> None:
        if not self._is_asked and self._problems():
            warnings.warn(
                f"checkpoint {self.path} does not match the objects: {'; '.join(self._problems())}; "
                "check with restore(path).assert_consumed(), or say restore(path).expect_partial()",
                stacklevel=2,
            )
