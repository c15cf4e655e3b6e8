"""Imports on demand: names on first use (PEP 562), and hooks into libraries."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Hooks = tuple[Callable[[str], Any], Callable[[], list[str]]]


# Python lets two threads that import a room and a module of it, in the other order, have one of them half made.
_lock = threading.RLock()


def imported(module: str) -> ModuleType:
    """Import a module; one thread at a time."""
    with _lock:
        return import_module(module)


def on_first_use(module: str, homes: Mapping[str, str], in_place_of: Mapping[str, str] | None = None) -> Hooks:
    """Return ``__getattr__`` and ``__dir__`` for a module that imports names on first use.

    The module names the same objects under ``if TYPE_CHECKING``, where type checkers and editors find them.

    Args:
        module: Its ``__name__``; its ``__all__`` lists all names, those that are imported at once too.
        homes: The late names that come from each module, separated by blanks; submodules come from the module itself.
        in_place_of: Advice on names that it does not have, and that users may look for in it.

    Raises:
        AttributeError: From ``__getattr__``, for a name that the module does not have.
    """

    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def getattr_of_module(name: str) -> Any:
        home = home_of.get(name)
        if home is None:
            advice = (in_place_of or {}).get(name)
            text = f"module {module!r} has no attribute {name!r}" + ("" if advice is None else f": {advice}")
            # Of these two Python makes its "Did you mean".
            raise AttributeError(text, name=name, obj=sys.modules[module])
        value = imported(f"{module}.{name}") if home == module else getattr(imported(home), name)
        setattr(sys.modules[module], name, value)
        return value

    def dir_of_module() -> list[str]:
        names: list[str] = sys.modules[module].__all__
        return sorted(names)

    return getattr_of_module, dir_of_module


class _HookFinder(MetaPathFinder):
    """Passes the loader of a library to a hook."""

    def __init__(self) -> None:
        self.hooks: dict[str, Callable[[Loader], None]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.hooks:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            self.hooks[fullname](spec.loader)
        return spec


_hook_finder = _HookFinder()


def hook_loader(library: str, hook: Callable[[Loader], None]) -> None:
    """Pass the loader of a library to ``hook`` when the program imports the library."""
    _hook_finder.hooks[library] = hook
    if _hook_finder not in sys.meta_path:
        sys.meta_path.insert(0, _hook_finder)


def hook_into(library: str, follower: str) -> None:
    """Import the module ``follower`` once the program has imported ``library``."""

    def hook(loader: Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            # Not imported(), because this thread holds the lock of the library's import.
            import_module(follower)

        # On the object, so that the loader keeps its class.
        loader.exec_module = exec_module  # type: ignore[method-assign]

    if library in sys.modules:
        imported(follower)
    else:
        hook_loader(library, hook)
