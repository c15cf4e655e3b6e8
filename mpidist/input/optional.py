"""Optional: a value that may be missing, as get_next_as_optional returns it."""

from __future__ import annotations

from typing import Any


class Optional:
    """A value that may be missing (tf.experimental.Optional): what ``get_next_as_optional`` returns."""

    def __init__(self, *value: Any) -> None:
        self._value = value

    def has_value(self) -> bool:
        """Whether there is a value.

        >>> Optional().has_value(), Optional(3).get_value()
        (False, 3)
        """
        return bool(self._value)

    def get_value(self) -> Any:
        """Return the value.

        Raises:
            ValueError: There is none.
        """
        if not self._value:
            raise ValueError("this Optional has no value; ask has_value() first")
        return self._value[0]
