"""Pickles of functions, arguments and results that are sent to other ranks.

A variable, a strategy or a resource of each worker is not copied. Its name is sent, and the other side uses its own
object of that name.
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
    from cloudpickle import register_pickle_by_value  # noqa: F401 - checks that this is a recent cloudpickle

    HAS_CLOUDPICKLE = True
except ImportError:
    from pickle import Pickler as _Pickler

    HAS_CLOUDPICKLE = False


Name = tuple[object, ...]
NameOf = Callable[[object], Name | None]
"""Returns the name of an object that must not be copied, None for other objects."""
Find = Callable[[Name], object]


class CannotTravelError(ValueError):
    """An object cannot be used on another rank; the text names the alternative."""


def pack(value: object, name_of: NameOf, label: str) -> bytes:
    """Pickle ``value``, with names for some objects. ``label`` describes it in the error.

    Raises:
        TypeError: It cannot be pickled.
        CannotTravelError: It contains an object that must not be sent.
    """
    file = io.BytesIO()
    pickler = _NamingPickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.name_of = name_of
    try:
        pickler.dump(value)
    except CannotTravelError:
        raise
    except Exception as error:  # pickling calls methods of the program's objects
        hint = "" if HAS_CLOUDPICKLE else f"; for functions of a script type: {pip_install('coordinator')}"
        raise TypeError(f"{label} cannot be sent to another rank: {error_text(error)}{hint}") from error
    return file.getvalue()


class _NamingPickler(_Pickler):  # type: ignore[misc,unused-ignore]
    name_of: NameOf

    def persistent_id(self, value: object) -> Name | None:
        """Return the name of an object, or None to copy it."""
        return self.name_of(value)


def unpack(data: bytes | memoryview, find: Find) -> Any:
    """Unpickle the result of :func:`pack`. ``find`` returns the object of each name."""
    unpickler = _FindingUnpickler(io.BytesIO(data))
    unpickler.find = find
    return unpickler.load()


class _FindingUnpickler(pickle.Unpickler):
    find: Find

    def persistent_load(self, name: Name) -> object:
        """Return the object of a name."""
        return self.find(name)


class PickledError(NamedTuple):
    """An exception to be sent: pickled (or empty), as text, and its traceback."""

    data: bytes
    text: str
    trace: str

    def unpack(self, find: Find) -> Exception:
        """Return the exception, or a RuntimeError of its text if it cannot be unpickled."""
        with suppress(Exception):  # unpickling calls methods of the program's objects
            error = unpack(self.data, find)
            if isinstance(error, Exception):
                return error
        return RuntimeError(self.text)


def pack_error(error: BaseException, name_of: NameOf) -> PickledError:
    """Pack an exception that is being handled.

    One that is not an ``Exception``, such as SystemExit, arrives as a RuntimeError, and does not end the receiver.
    """
    data = b""
    if isinstance(error, Exception):
        with suppress(TypeError, CannotTravelError):
            data = pack(error, name_of, "an exception")
    return PickledError(data, error_text(error), traceback.format_exc())
