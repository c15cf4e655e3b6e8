"""Imports on first use (PEP 562), advice for missing names, and hooks into libraries."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # At run time this module would import pathlib, tempfile and 20 others.
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec

Hooks = tuple[Callable[[str], Any], Callable[[], list[str]]]

_STARTS = "the first strategy or Communicator starts everything; delete this line"
_ENDS = "the end of the program ends everything; delete this line"
_VARIABLES = "variables created in `with strategy.scope():` have the first rank's values everywhere; delete this line"
_COLLECTIVE = "type: comm = mpidist.Communicator(), and comm.{}"
_OPTIMIZER = "type: with strategy.scope(): optimizer = mpidist.optimizers.SGD(...)"
_ON_NODE = (
    "mpidist assigns the GPUs of a node by itself; for other purposes type: from mpi4py import MPI, and "
    "MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).{}()"
)
ADVICE = {
    **dict.fromkeys(("init", "init_process_group", "is_initialized", "Init"), _STARTS),
    **dict.fromkeys(("finalize", "shutdown", "destroy_process_group", "Finalize"), _ENDS),
    **dict.fromkeys(("get_rank", "Get_rank"), "type: mpidist.rank()"),
    **dict.fromkeys(("get_world_size", "world_size", "Get_size"), "type: mpidist.size()"),
    **dict.fromkeys(("local_rank", "get_local_rank"), _ON_NODE.format("Get_rank")),
    "local_size": _ON_NODE.format("Get_size"),
    "COMM_WORLD": "type: mpidist.Communicator(), or from mpi4py import MPI, and MPI.COMM_WORLD",
    **dict.fromkeys(("all_reduce", "allreduce", "Allreduce"), _COLLECTIVE.format('all_reduce("SUM", x)')),
    **dict.fromkeys(("all_gather", "allgather", "Allgather"), _COLLECTIVE.format("all_gather(x)")),
    **dict.fromkeys(("broadcast", "bcast", "Bcast"), _COLLECTIVE.format("broadcast(x, root=0)")),
    **dict.fromkeys(("barrier", "Barrier"), _COLLECTIVE.format("barrier()")),
    **dict.fromkeys(("DistributedOptimizer", "DistributedDataParallel"), _OPTIMIZER),
    **dict.fromkeys(("broadcast_parameters", "broadcast_variables"), _VARIABLES),
    "jax": "type: import mpidist.jax",
}
"""Advice for names that Horovod, torch.distributed and mpi4py have, and mpidist does not import."""

# If two threads import a package and its module in opposite order, Python gives one of them an unfinished module.
_lock = threading.RLock()


def imported(module: str) -> ModuleType:
    """Import a module, one thread at a time."""
    with _lock:
        return import_module(module)


def on_first_use(module: str, homes: Mapping[str, str], advice: Mapping[str, str] | None = None) -> Hooks:
    """Return ``__getattr__`` and ``__dir__`` for a module that imports names on first use.

    The module imports the same names under ``if TYPE_CHECKING``, for type checkers and editors.

    Args:
        module: Its ``__name__``. Its ``__all__`` lists all names.
        homes: Names from each module, separated by blanks. Submodules come from the module itself.
        advice: Advice on missing names, by name.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def getattr_of_module(name: str) -> Any:
        home = home_of.get(name)
        if home is None:
            hint = (advice or {}).get(name)
            text = f"module {module!r} has no attribute {name!r}" + ("" if hint is None else f": {hint}")
            # Python derives its "Did you mean" from name and obj.
            raise AttributeError(text, name=name, obj=sys.modules[module])
        value = imported(f"{module}.{name}") if home == module else getattr(imported(home), name)
        setattr(sys.modules[module], name, value)
        return value

    def dir_of_module() -> list[str]:
        names: list[str] = sys.modules[module].__all__
        return sorted(names)

    return getattr_of_module, dir_of_module


class _HookFinder:
    """An entry of ``sys.meta_path`` that passes the loader of a library to a hook."""

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
