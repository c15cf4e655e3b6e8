"""LoadStatus: what a restored checkpoint had, lacked, and had too much of."""

from __future__ import annotations

import warnings
from typing import Any


class LoadStatus:
    """What ``Checkpoint.restore`` returns; ask it whether everything was restored.

    A status that is thrown away unasked warns of values that are missing or left over.

    Attributes:
        path: The checkpoint.
        missing: Keys of the objects for which the checkpoint has no value; they kept theirs.
        unused: Keys of the checkpoint that no object has.
    """

    def __init__(self, path: str, missing: list[str], unused: list[str], deferred: dict[str, dict[str, Any]]) -> None:
        self.path = path
        self.missing = tuple(missing)
        self.unused = tuple(unused)
        self._deferred = deferred
        self._is_asked = False

    def __repr__(self) -> str:
        counts = f"{len(self.missing)} missing, {len(self.unused)} unused, {len(self.deferred)} deferred"
        return f"<LoadStatus of {self.path!r}: {counts}>"

    @property
    def deferred(self) -> tuple[str, ...]:
        """Keys whose values wait for variables that an optimizer has yet to make."""
        return tuple(f"{key}/{name}" for key, values in self._deferred.items() for name in values)

    def assert_consumed(self) -> LoadStatus:
        """Return the status if every value was restored and every object got one.

        Raises:
            AssertionError: Something is missing, left over or waiting; the message has the keys.
        """
        self._is_asked = True
        problems = self._problems()
        if self.deferred:
            problems.append(
                f"values that wait for variables of an optimizer: {list(self.deferred)} (call optimizer.build first)"
            )
        if problems:
            raise AssertionError(f"checkpoint {self.path} does not match the objects: " + "; ".join(problems))
        return self

    def assert_existing_objects_matched(self) -> LoadStatus:
        """Return the status if every object got a value.

        Raises:
            AssertionError: Values are missing.
        """
        self._is_asked = True
        if self.missing:
            raise AssertionError(f"checkpoint {self.path} has no value for {list(self.missing)}")
        return self

    def expect_partial(self) -> LoadStatus:
        """Say that values may be missing or left over: no warning."""
        self._is_asked = True
        return self

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
