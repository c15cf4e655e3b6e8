"""Start NCCL on all ranks, or report one problem on every rank.

An NCCL communicator holds hundreds of megabytes of GPU memory and takes seconds to start, so Communicators of the same
ranks on the same GPU share one. Its calls follow the queue of the device, which has the order of the program.
"""

from __future__ import annotations

import importlib
import os
import pickle
import platform
import threading
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpidist.arrays.device_ops import DeviceOps, ops_for
from mpidist.arrays.streams import find_cupy, require_cupy
from mpidist.collectives.mpi.communicator_names import ranks_in_job
from mpidist.collectives.mpi.exchange import broadcast_pickle, gather_objects, problems_of
from mpidist.collectives.mpi.waiting import Comm, Steps, relax, until_done
from mpidist.core.concurrency import Stopwatch, start_daemon
from mpidist.core.errors import NcclFailure
from mpidist.core.message_tags import NCCL_START
from mpidist.core.text import groups_of, names_text, numbered_ranks
from mpidist.topology import import_mpi

IN_PROGRESS = 7  # ncclInProgress, which CuPy does not define


class NcclCommunicator(Protocol):
    """Type CuPy's NcclCommunicator, one rank's end."""

    allReduce: Callable[..., None]  # noqa: N815
    allGather: Callable[..., None]  # noqa: N815
    reduceScatter: Callable[..., None]  # noqa: N815
    reduce: Callable[..., None]
    broadcast: Callable[..., None]
    check_async_error: Callable[[], None]
    abort: Callable[[], None]
    destroy: Callable[[], None]


def nccl_problem() -> str | None:
    """Return why NCCL cannot be used here and how to install it, or None."""
    state = find_cupy()
    if state.module is None:
        return state.problem
    binding = nccl_binding()
    if getattr(binding, "available", False):
        return None
    major = state.module.cuda.runtime.runtimeGetVersion() // 1000
    return (
        f"CuPy {state.module.__version__} finds no NCCL library (libnccl.so.2), which reduces between GPUs; type: "
        f"pip install nvidia-nccl-cu{major}, or add the folder of the system's libnccl.so.2 to LD_LIBRARY_PATH "
        "(CUPY_DEBUG_LIBRARY_LOAD=1 shows where CuPy searches)"
    )


def nccl_binding() -> ModuleType:
    """Import ``cupy.cuda.nccl``, which loads the NCCL library. Raises DeviceError without a GPU."""
    require_cupy()
    with warnings.catch_warnings():
        # CuPy warns if the library is missing. nccl_problem() reports that.
        warnings.simplefilter("ignore")
        return importlib.import_module("cupy.cuda.nccl")


def nccl_version(binding: ModuleType) -> str:
    """Return the version of the NCCL library, such as "2.28.9"."""
    number = int(binding.get_version())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def failure(binding: ModuleType, doing: str, error: Exception) -> NcclFailure:
    """Convert an error of the binding to NcclFailure.

    The binding raises KeyError for a status that it cannot name.
    """
    if isinstance(error, binding.NcclError):
        return NcclFailure(f"{doing}: {error}", error.status)
    status = error.args[0]
    return NcclFailure(f"{doing}: NCCL returned status {status}, which CuPy has no name for", status)


# NCCL takes seconds to start on thousands of GPUs.
START_SECONDS = 120.0
UniqueId = bytes | tuple[int, ...]  # a tuple in older versions of CuPy


@dataclass(frozen=True)
class _Candidate:
    """Describe a rank before the start."""

    problem: str | None
    version: str = ""
    host: str = ""
    bus_id: str = ""
    open: tuple[Hashable, ...] = ()
    """Identities of existing communicators of the same ranks on its GPU."""


class _Problem(NamedTuple):
    text: str
    is_late: bool
    """True if a rank may still be starting."""


def started(
    comm: Comm, device: int | None, start_seconds: float, has_given_up: Callable[[], bool]
) -> Steps[NcclShare | str]:
    """Return a share of a communicator, or one problem on every rank (collective).

    NCCL starts only when every rank can start it, because it blocks until all ranks have. CuPy cannot interrupt it, so
    it starts in a thread, together with a first all-reduce, which makes NCCL connect. If it fails or times out on one
    rank, all ranks abandon it. A thread that is still inside NCCL stays there, with its memory, until NCCL fails or the
    process ends. After a failure the start is retried once without the memory that CuPy caches, because NCCL allocates
    its own.

    If a rank dies, the others wait in MPI until the launcher ends the job or until their deadline.

    Args:
        comm: Ranks of the communicator, in NCCL's order.
        device: GPU of this rank, or None if the rank has no GPU.
        start_seconds: Time limit of the start.
        has_given_up: Returns True if the user of the share skips calls that other ranks make.
    """
    ranks = ranks_in_job(comm)
    everyone: list[_Candidate] = yield from gather_objects(comm, _candidate(device, ranks))
    first_problem = _first_problem(everyone)
    if first_problem is not None:
        return first_problem
    assert device is not None
    key = (ranks, device)
    # Every rank listed its communicators at the same position in the device's queue.
    for identity in everyone[0].open:
        if all(identity in candidate.open for candidate in everyone):
            (shared,) = [shared for shared in _open if (shared.key, shared.identity) == (key, identity)]
            return NcclShare(shared, has_given_up)
    shared_gpu = _shared_gpus(everyone)
    made = yield from _attempt(comm, device, start_seconds)
    if isinstance(made, _Problem) and not made.is_late and shared_gpu is None:
        with ops_for("gpu").on(device):
            require_cupy().get_default_memory_pool().free_all_blocks()
        made = yield from _attempt(comm, device, start_seconds)
    if isinstance(made, _Problem):
        return made.text if shared_gpu is None else f"{shared_gpu} NCCL reported: {made.text}"
    _open.append(_Shared(key, *made))
    return NcclShare(_open[-1], has_given_up)


def _attempt(comm: Comm, device: int, start_seconds: float) -> Steps[tuple[NcclCommunicator, UniqueId] | _Problem]:
    """Return an NcclCommunicator and its unique id, or on every rank the same problem (collective)."""
    binding = nccl_binding()
    mine = pickle.dumps(_new_unique_id(binding)) if comm.Get_rank() == 0 else b""
    unique_id: UniqueId | str = yield from broadcast_pickle(comm, mine, 0)
    if isinstance(unique_id, str):
        return _Problem(unique_id, is_late=False)
    start = _Start(binding, ops_for("gpu"), device, comm.Get_rank(), comm.Get_size(), unique_id)
    try:
        problem = yield from _agreed_outcome(comm, start, start_seconds)
        return (start.take(), unique_id) if problem is None else problem
    finally:
        start.abandon()


# Checks before the start ----------------------------------------------------------------------------------------------


def _candidate(device: int | None, ranks: tuple[int, ...]) -> _Candidate:
    """Describe this rank. Never raises, because the other ranks wait for the description."""
    try:
        problem = nccl_problem()
        if device is None:
            problem = problem or "no GPU was assigned to it"
        if problem is not None or device is None:
            return _Candidate(problem)
        bus_id = require_cupy().cuda.runtime.deviceGetPCIBusId(device)
        # NCCL identifies a host by this variable if it is set, otherwise by the machine name.
        host = os.environ.get("NCCL_HOSTID") or platform.node()
        known = [shared.identity for shared in _open if shared.key == (ranks, device) and shared.in_step]
        return _Candidate(None, nccl_version(nccl_binding()), host, bus_id, tuple(known))
    except Exception as error:
        return _Candidate(f"{type(error).__name__}: {error}")


def _first_problem(everyone: list[_Candidate]) -> str | None:
    for rank, candidate in enumerate(everyone):
        if candidate.problem is not None:
            return f"rank {rank} cannot use NCCL: {candidate.problem}"
    versions = groups_of((rank, candidate.version) for rank, candidate in enumerate(everyone))
    if len(versions) > 1:
        found = names_text(f"{version} on {numbered_ranks(ranks)}" for version, ranks in versions)
        return f"the ranks load different versions of NCCL: {found}. Install one version on all nodes"
    return None


def _new_unique_id(binding: ModuleType) -> UniqueId | str:
    """Return NCCL's unique id, or a str with the problem."""
    try:
        unique_id: UniqueId = binding.get_unique_id()
        return unique_id
    except (binding.NcclError, KeyError) as error:
        return str(failure(binding, "NCCL could not open a socket on rank 0 (NCCL_SOCKET_IFNAME names one)", error))


def _shared_gpus(everyone: list[_Candidate]) -> str | None:
    """Report two ranks that use one GPU, or return None."""
    first: dict[tuple[str, str], int] = {}
    for rank, candidate in enumerate(everyone):
        other = first.setdefault((candidate.host, candidate.bus_id), rank)
        if other != rank:
            return (
                f"ranks {other} and {rank} have the same GPU ({candidate.bus_id} of {candidate.host}), which NCCL "
                'refuses as "Duplicate GPU detected". Make another GPU current on each rank before its first array: '
                "cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use(), or let the launcher give each "
                'its own: srun --gpus-per-task=1. For tests on one GPU docs/gpu.md, "Several ranks on one GPU", has '
                f"recipes with NCCL_HOSTID and NCCL_MULTI_RANK_GPU_ENABLE (this is NCCL {candidate.version})."
            )
    return None


# Starting -----------------------------------------------------------------------------------------------------------


def _agreed_outcome(comm: Comm, start: _Start, start_seconds: float) -> Steps[_Problem | None]:
    """Return the same problem on every rank, or None if NCCL started."""
    stopwatch = Stopwatch()
    has_failed_peer, is_late, failed_polls = False, False, 0
    while not (start.is_over or has_failed_peer or is_late):
        # A failed rank sends a message, because NCCL may never return on the others.
        has_failed_peer = comm.Iprobe(tag=NCCL_START)
        is_late = stopwatch.seconds > start_seconds
        failed_polls += 1
        relax(failed_polls, 0)
        yield
    problem = None if start.problem is None else _Problem(start.problem, is_late=False)
    if is_late and not start.is_over:
        text = f"NCCL was not ready on rank {comm.Get_rank()} of {comm.Get_size()} after {start_seconds:g} s"
        problem = _Problem(text, is_late=True)
    return (yield from _first_failure(comm, problem))


def _first_failure(comm: Comm, problem: _Problem | None) -> Steps[_Problem | None]:
    """Send this rank's problem to the others, and return the problem of the lowest rank."""
    rank, nothing = comm.Get_rank(), [np.empty(0, np.uint8), 0, import_mpi().BYTE]
    others = [other for other in range(comm.Get_size()) if other != rank]
    requests = [] if problem is None else [comm.Isend(nothing, other, NCCL_START) for other in others]
    problems = yield from problems_of(comm, problem)
    requests += [comm.Irecv(nothing, other, NCCL_START) for other in problems if other != rank]
    for request in requests:
        yield from until_done(request)
    found = list(problems.values())
    return _Problem(found[0].text, any(problem.is_late for problem in found)) if found else None


class _Start:
    """Start NCCL in a thread.

    Attributes:
        is_over: True when the thread is done.
        problem: Why NCCL did not start, or None. Valid when ``is_over``.
    """

    def __init__(
        self, binding: ModuleType, ops: DeviceOps, device: int, rank: int, size: int, unique_id: UniqueId
    ) -> None:
        self.is_over = False
        self.problem: str | None = None
        self._binding, self._ops, self._device, self._unique_id = binding, ops, device, unique_id
        self._rank, self._size = rank, size
        self._lock = threading.Lock()
        self._raw: NcclCommunicator | None = None
        # Another thread may abort NCCL while the GPU works, but not while a function of NCCL runs.
        self._is_inside = True
        self._is_abandoned = False
        start_daemon("nccl-start", self._run)

    def take(self) -> NcclCommunicator:
        """Return the communicator. The caller must close it."""
        raw, self._raw = self._raw, None
        assert self.is_over, "all ranks agreed that NCCL started, while it has not here"
        assert raw is not None
        return raw

    def abandon(self) -> None:
        """Abort as soon as NCCL returns to the thread, unless the communicator was taken."""
        with self._lock:
            self._is_abandoned = True
            self._abort_if_abandoned()

    def _run(self) -> None:
        doing = f"NCCL did not start on rank {self._rank} of {self._size} (gpu:{self._device})"
        try:
            with self._ops.on(self._device):
                total = self._sum_of_ones()
            if total != self._size:
                self.problem = f"{doing}: it added {self._size} ones to {total}"
        except (self._binding.NcclError, KeyError) as error:
            self.problem = str(failure(self._binding, doing, error))
        except Exception as error:
            self.problem = f"{doing}: {type(error).__name__}: {error}"
        self._leave_nccl()
        self.is_over = True

    def _sum_of_ones(self) -> float:
        """Create the communicator and reduce one number, because NCCL connects on first use."""
        ops, device = self._ops, self._device
        number = ops.from_host(np.ones(1, np.float32), device)
        stream = ops.stream(device)
        stream.wait(ops.current_stream(device).record())
        self._raw = self._binding.NcclCommunicator(self._size, self._unique_id, self._rank)
        if self._is_abandoned:
            return 0.0
        pointer, binding = ops.pointer(number), self._binding
        self._raw.allReduce(pointer, pointer, 1, binding.NCCL_FLOAT32, binding.NCCL_SUM, stream.handle)
        self._leave_nccl()
        stream.synchronize()
        return float(ops.to_host(number)[0])

    def _leave_nccl(self) -> None:
        with self._lock:
            self._is_inside = False
            self._abort_if_abandoned()

    def _abort_if_abandoned(self) -> None:
        if self._is_abandoned and not self._is_inside and self._raw is not None:
            with self._ops.on(self._device):
                self._raw.abort()


# Shared communicators -------------------------------------------------------------------------------------------------


# Ranks of the job in NCCL's order, and the GPU of this rank.
Key = tuple[tuple[int, ...], int]


class _Shared:
    """Hold an NCCL communicator and its users. All ranks know it by ``identity``."""

    def __init__(self, key: Key, raw: NcclCommunicator, identity: Hashable) -> None:
        self.key, self.raw, self.identity = key, raw, identity
        self.users: list[NcclShare] = []

    @property
    def in_step(self) -> bool:
        return not any([user.has_given_up() for user in self.users])


_open: list[_Shared] = []


class NcclShare:
    """Share an NCCL communicator, with the interface of NcclCommunicator.

    Args:
        shared: Communicator to share.
        has_given_up: Returns True if this user skips calls that other ranks make.
    """

    def __init__(self, shared: _Shared, has_given_up: Callable[[], bool]) -> None:
        self._shared = shared
        self.has_given_up = has_given_up
        shared.users.append(self)

    def __getattr__(self, name: str) -> Any:
        self.check_in_step()
        return getattr(self._shared.raw, name)

    def check_in_step(self) -> None:
        """Raise RuntimeError if a user failed on this rank.

        Other ranks may still make its calls. NCCL would match them with ours, and both results would be wrong.
        """
        if not self._shared.in_step:
            raise RuntimeError(
                "this Communicator can no longer reduce arrays on GPUs. Another Communicator of the same ranks was "
                "given up after an error or a deadline, and both share one NCCL communicator. Create a new Communicator"
            )

    def check_async_error(self) -> None:
        """Check for NCCL errors of any user."""
        self._shared.raw.check_async_error()

    def destroy(self) -> None:
        """Release the share. The last one destroys the communicator."""
        self._shared.users.remove(self)
        if not self._shared.users and self._forget():
            self._shared.raw.destroy()

    def abort(self) -> None:
        """Abort the communicator for all users, and stop sharing it."""
        if self._forget():
            self._shared.raw.abort()

    def _forget(self) -> bool:
        is_open = self._shared in _open
        if is_open:
            _open.remove(self._shared)
        return is_open


def forget_shares() -> None:
    """Forget all communicators after their GPUs are gone (for tests)."""
    _open.clear()
