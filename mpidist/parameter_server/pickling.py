"""Pickles of functions, arguments and results between coordinator and workers.

A variable, a strategy or a resource of each worker is not copied: its name travels in its place, and the other side
puts its own object there.
"""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from mpidist.core.text import error_text, pip_install

try:
    from cloudpickle import Pickler as _Pickler
    from cloudpickle import register_pickle_by_value  # noqa: F401 - says that this is cloudpickle as we know it

    HAS_CLOUDPICKLE = True
except ImportError:
    from pickle import Pickler as _Pickler

    HAS_CLOUDPICKLE = False


# The name that travels in an object's place, the function that names objects, and the one that finds them by name.
Name = tuple[object, ...]
NameOf = Callable[[object], Name | None]
Find = Callable[[Name], object]


class CannotTravelError(ValueError):
    """An object cannot be used on another rank; the text names the alternative."""


class _NamingPickler(_Pickler):  # type: ignore[misc,unused-ignore]
    """A pickler that writes names in the place of objects that have one."""

    def __init__(self, file: io.BytesIO, name_of: NameOf) -> None:
        self._name_of = name_of
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)

    def persistent_id(self, value: object) -> Name | None:
        """Return the name in the place of an object, or None to copy it."""
        return self._name_of(value)


class _FindingUnpickler(pickle.Unpickler):
    """An unpickler that finds objects by their names."""

    def __init__(self, file: io.BytesIO, find: Find) -> None:
        self._find = find
        super().__init__(file)

    def persistent_load(self, name: Name) -> object:
        """Return the object that a name stands for."""
        return self._find(name)


def pack(value: object, name_of: NameOf, label: str) -> bytes:
    """Return ``value`` as bytes.

    Args:
        value: Anything that can be pickled.
        name_of: Returns the name of an object that is not to be copied, None of others.
        label: A description of ``value``, for the error.

    Raises:
        TypeError: It cannot be pickled.
        CannotTravelError: It holds something that must not be.
    """
    file = io.BytesIO()
    try:
        _NamingPickler(file, name_of).dump(value)
    except CannotTravelError:
        raise
    except Exception as error:  # pickling runs the code of whatever it meets
        hint = "" if HAS_CLOUDPICKLE else f"; for functions of a script type: {pip_install('coordinator')}"
        raise TypeError(f"{label} cannot be sent to another rank: {error_text(error)}{hint}") from error
    return file.getvalue()


def unpack(data: bytes, find: Find) -> Any:
    """Return the value given to :func:`pack`, with ``find``'s object for each name."""
    return _FindingUnpickler(io.BytesIO(data), find).load()


class PickledError(NamedTuple):
    """An exception on its way to the coordinator.

    Attributes:
        data: The exception, packed; empty if it cannot be.
        text: Its type and message.
        trace: Its traceback.
    """

    data: bytes
    text: str
    trace: str

    def unpack(self, find: Find) -> Exception:
        """Return the exception, or a RuntimeError of its text. The latter where it cannot be unpickled."""
        try:
            error = unpack(self.data, find)
        except Exception:  # unpickling runs the code of whatever it meets
            error = None
        return error if isinstance(error, Exception) else RuntimeError(self.text)


def pack_error(error: BaseException, name_of: NameOf) -> PickledError:
    """Pack an exception that is being handled.

    One that is no ``Exception``, say SystemExit, was meant to end the worker's program, not the coordinator's: it
    arrives as a RuntimeError.
    """
    text, trace = error_text(error), traceback.format_exc()
    data = b""
    if isinstance(error, Exception):
        # One that cannot be pickled travels as its text.
        with suppress(TypeError, CannotTravelError):
            data = pack(error, name_of, "an exception")
    return PickledError(data, text, trace)
