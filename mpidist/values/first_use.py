"""Restored values that wait for variables: these are looked for when a variable is first used.

By then the program has put it where it belongs, which it has not when the variable is made.
"""

from __future__ import annotations

import threading
from itertools import count
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from mpidist.values.variable import Variable


class LooksForVariables(Protocol):
    """Holds values for variables that do not exist yet."""

    def look(self, used: Variable | None = None) -> None:
        """Give each unused variable that has come to its place its value; local. Errors are those of ``used``."""


_waiting: WeakValueDictionary[int, LooksForVariables] = WeakValueDictionary()
_numbers = count()
# Replicas of one process run in threads.
_lock = threading.RLock()


def begin_to_wait(waiting: LooksForVariables) -> None:
    """Let ``waiting`` look before each first use of a variable from now on, for as long as it lives."""
    _waiting[next(_numbers)] = waiting


def stop_waiting(waiting: LooksForVariables) -> None:
    """Let ``waiting`` look no more."""
    for number in [number for number, those in _waiting.items() if those is waiting]:
        del _waiting[number]


def before_first_use(variable: Variable) -> None:
    """Let all that wait look, as ``variable`` may be what they wait for."""
    with _lock:
        look(variable)
        variable.is_unused = False


def look(used: Variable | None = None) -> None:
    """Let all that wait look; those that came last first, and what one fills is not looked at by the next."""
    with _lock:
        for _, waiting in sorted(_waiting.items(), reverse=True):
            waiting.look(used)
