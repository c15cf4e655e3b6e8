"""LoadStatus: what a restored checkpoint had, lacked, and had too much of."""

from __future__ import annotations

import warnings
from typing import Any

from mpidist.checkpoint.waiting import Waiting


class LoadStatus:
    """What ``Checkpoint.restore`` returns; ask it whether everything was restored.

    A status that is thrown away unasked warns of values that are missing or left over.

    Attributes:
        path: The checkpoint.
        unused: Keys of the checkpoint that no object has.
    """

    def __init__(
        self,
        path: str,
        missing: list[str],
        unused: list[str],
        deferred: dict[str, dict[str, Any]],
        waiting: Waiting | None = None,
        is_any: bool = True,
    ) -> None:
        self.path = path
        self.unused = tuple(unused)
        self._missing = tuple(missing)
        self._deferred = deferred
        self._waiting = waiting
        self._is_any = is_any
        self._is_asked = False

    def __repr__(self) -> str:
        counts = f"{len(self.missing)} missing, {len(self.unused)} unused, {len(self.deferred)} deferred"
        return f"<LoadStatus of {self.path!r}: {counts}>"

    @property
    def missing(self) -> tuple[str, ...]:
        """Keys of the objects for which the checkpoint has no value, those made since included; they kept theirs."""
        without_value = () if self._waiting is None else self._waiting.without_value
        return tuple(dict.fromkeys((*self._missing, *without_value)))

    @property
    def deferred(self) -> tuple[str, ...]:
        """Keys whose values wait for variables that an optimizer or another object has yet to make."""
        waiting = () if self._waiting is None else self._waiting.open
        return (*(f"{key}/{name}" for key, values in self._deferred.items() for name in values), *waiting)

    def assert_consumed(self) -> LoadStatus:
        """Return the status if every value was restored and every object got one.

        Raises:
            AssertionError: Something is missing, left over or waiting; the message has the keys.
            ValueError: A variable that was made since has another shape or dtype than its value.
        """
        self._is_asked = True
        self._look()
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
        self._is_asked = True
        self._look()
        if self.missing:
            raise AssertionError(f"checkpoint {self.path} has no value for {list(self.missing)}")
        return self

    def assert_nontrivial_match(self) -> LoadStatus:
        """Return the status if any object got a value.

        Raises:
            AssertionError: None did.
            ValueError: A variable that was made since has another shape or dtype than its value.
        """
        self._is_asked = True
        self._look()
        if not self._is_any and (self._waiting is None or not self._waiting.has_given):
            raise AssertionError(f"checkpoint {self.path} has given no object a value; it has {list(self.deferred)}")
        return self

    def expect_partial(self) -> LoadStatus:
        """Say that values may be missing or left over: no warning. Those that wait are still given when it is time."""
        self._is_asked = True
        if self._waiting is not None:
            self._waiting.is_expected = True
        return self

    def _look(self) -> None:
        if self._waiting is not None:
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
