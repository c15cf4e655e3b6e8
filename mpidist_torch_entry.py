"""The entry point that ``import torch`` runs: makes ``torch.distributed.init_process_group("mpidist")`` work.

Every ``import torch`` of an environment with mpidist runs this, in programs too that have nothing to do with it, and
an error in here would be one of ``import torch``. So it hands errors on as warnings, imports nothing that starts MPI,
and does all else when a process group is made. If a launcher started the process, it sets RANK and the like. It
lies beside the package since importing a module of the package imports ``mpidist``, which prepares the environment for
MPI.
"""

import os
import sys
import warnings
from functools import partial
from typing import Any

# Of the launchers in mpidist/topology/launchers.py, which reads them properly.
RANK_VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "SLURM_STEP_NUM_TASKS",
    "PALS_RANKID",
    "JSM_NAMESPACE_RANK",
    "FLUX_TASK_RANK",
)


def register() -> None:
    """Register the backend ``mpidist``, and the way to meet without MASTER_ADDR."""
    try:
        import torch.distributed as dist

        if not dist.is_available():
            return
        for name in _names(dist):
            dist.Backend.register_backend(name, partial(_create, name), extended_api=True, devices=["cpu", "cuda"])
            # As torch's own backend of that name would be known: DDP tells it in its figures.
            kinds = dist.Backend.backend_type_map
            kinds[name] = getattr(dist.ProcessGroup.BackendType, name.upper(), kinds[name])
        _meet_by_mpi(_names(dist))
    except Exception as error:
        warnings.warn(f"mpidist is no backend of torch.distributed here: {error!r}", RuntimeWarning, stacklevel=2)


def _names(dist: Any) -> list[str]:
    # From 2.14 on torch leaves the name "mpi" to those who register it, where it was built without.
    is_free = hasattr(sys.modules["torch._C._distributed_c10d"].Backend, "supports_reconfigure")
    return ["mpidist", "mpi"] if is_free and not dist.is_mpi_available() else ["mpidist"]


def _create(name: str, options: Any, given: Any) -> Any:
    from mpidist.torch.groups import create

    return create(name, options, given)


def _meet_by_mpi(names: list[str]) -> None:
    # torch.distributed.rendezvous is a function, which hides the module of that name.
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    from_environment = handlers["env"]

    def meet(url: str, *args: Any, **kwargs: Any) -> Any:
        backend = _backend_of_caller()
        if backend == "undefined" and _started_by_a_launcher():
            from mpidist.torch.variables import report_default_backend

            report_default_backend()
        if not {*names} & {*backend.replace(":", ",").split(",")}:
            # Other backends meet by MPI if a launcher started the ranks and the program names no address.
            has_address = os.environ.get("MASTER_ADDR") != os.environ.get("MASTER_ADDR_OF_MPIDIST")
            if has_address or not _started_by_a_launcher():
                return from_environment(url, *args, **kwargs)
        from mpidist.torch.mpi_store import meet

        return meet(url, *args, **kwargs)

    handlers["env"] = meet
    if _started_by_a_launcher() and "mpi4py.MPI" not in sys.modules:
        # Programs read RANK and LOCAL_RANK before they make a process group.
        from mpidist.torch.variables import set_variables

        set_variables()


def _backend_of_caller() -> str:
    """Return the backend that init_process_group was called with, which torch does not pass to handlers."""
    frame = sys._getframe()
    while frame.f_code.co_name != "init_process_group":
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return str(frame.f_locals.get("backend", ""))


def _started_by_a_launcher() -> bool:
    return any(os.environ.get(name) for name in RANK_VARIABLES)
