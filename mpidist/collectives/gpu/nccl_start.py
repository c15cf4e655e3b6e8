"""The start of NCCL: all ranks get a communicator, or all learn why not.

A communicator holds hundreds of megabytes of its GPU and takes seconds to start, so Communicators of the same ranks
on the same GPU share one. Its calls come in the order of the device's queue (``DeviceQueue``), which is the program's.
"""

from __future__ import annotations

import os
import pickle
import platform
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from mpidist.arrays.cupy_module import require_cupy
from mpidist.arrays.device_ops import DeviceOps, ops_for
from mpidist.collectives.gpu.nccl_library import NcclCommunicator, failure, nccl_binding, nccl_problem, nccl_version
from mpidist.collectives.mpi.communicator_names import ranks_in_job
from mpidist.collectives.mpi.exchange import broadcast_pickle, gather_objects, problems_of
from mpidist.collectives.mpi.waiting import Comm, Steps, relax, until_done
from mpidist.collectives.reduce.device_packs import nccl_reduction
from mpidist.core.concurrency import Stopwatch, start_daemon
from mpidist.core.message_tags import NCCL_START
from mpidist.core.options import ReduceOp
from mpidist.core.text import groups_of, names_text, numbered_ranks
from mpidist.topology import import_mpi

# NCCL needs seconds for thousands of GPUs.
START_SECONDS = 120.0
UniqueId = bytes | tuple[int, ...]
"""As CuPy gives it; a tuple in older versions."""


@dataclass(frozen=True)
class _Candidate:
    """The facts that a rank tells the others before anything is tried."""

    problem: str | None
    version: str = ""
    host: str = ""
    bus_id: str = ""
    open: tuple[Hashable, ...] = ()
    """Communicators of the same ranks that its GPU has already."""


class _Problem(NamedTuple):
    """A reason why NCCL did not start."""

    text: str
    is_late: bool
    """Whether some rank may still be starting."""


def started(
    comm: Comm, device: int | None, start_seconds: float, has_given_up: Callable[[], bool]
) -> Steps[NcclShare | str]:
    """Return a share of a communicator, or the reason why there is none (collective).

    The reason is the same on every rank. One that all ranks have already is shared.

    NCCL is told to begin only when every rank can, and blocks until all of them have; CuPy gives no way to stop it, so
    that happens in a thread, and with a first all-reduce, which is when NCCL connects. If it fails on a rank, or takes
    longer than it may, all ranks give it up. A thread that still is inside NCCL then stays there until NCCL
    itself gives up or the process ends, with its memory. Otherwise it is tried once more, with the memory that
    CuPy keeps for later arrays: NCCL asks the GPU for its own.

    A rank whose process dies leaves the others waiting in MPI: for the launcher to end the job, or for their deadline.

    Args:
        comm: The ranks, in NCCL's order too.
        device: Number of this rank's GPU; None where it has none.
        start_seconds: How long NCCL may take.
        has_given_up: Whether the user of the share makes no more calls, also of those that other ranks make.
    """
    ranks = ranks_in_job(comm)
    everyone: list[_Candidate] = yield from gather_objects(comm, _candidate(device, ranks))
    first_problem = _first_problem(everyone)
    if first_problem is not None:
        return first_problem
    assert device is not None
    key = (ranks, device)
    for identity in everyone[0].open:
        if all(identity in candidate.open for candidate in everyone):
            return share_of_open(key, identity, has_given_up)
    shared_gpu = _shared_gpus(everyone)
    made = yield from _attempt(comm, device, start_seconds)
    if isinstance(made, _Problem) and not made.is_late and shared_gpu is None:
        with ops_for("gpu").on(device):
            require_cupy().get_default_memory_pool().free_all_blocks()
        made = yield from _attempt(comm, device, start_seconds)
    if isinstance(made, _Problem):
        return made.text if shared_gpu is None else f"{shared_gpu} NCCL's own words: {made.text}"
    raw, identity = made
    return first_share(key, raw, identity, has_given_up)


def _attempt(comm: Comm, device: int, start_seconds: float) -> Steps[tuple[NcclCommunicator, UniqueId] | _Problem]:
    """Return CuPy's NcclCommunicator and its unique id, or on every rank the same problem (collective)."""
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


# What each rank can do ----------------------------------------------------------------------------------------------


def _candidate(device: int | None, ranks: tuple[int, ...]) -> _Candidate:
    """Return the facts of this rank. Raises nothing: the others wait for it."""
    try:
        problem = nccl_problem()
        if device is None:
            problem = problem or "no GPU was assigned to it"
        if problem is not None or device is None:
            return _Candidate(problem)
        bus_id = require_cupy().cuda.runtime.deviceGetPCIBusId(device)
        # NCCL tells hosts apart by this variable where it is set, and by the name of the machine otherwise.
        host = os.environ.get("NCCL_HOSTID") or platform.node()
        known = open_identities((ranks, device))
        return _Candidate(None, nccl_version(nccl_binding()), host, bus_id, known)
    except Exception as error:
        return _Candidate(f"{type(error).__name__}: {error}")


def _first_problem(everyone: list[_Candidate]) -> str | None:
    for rank, candidate in enumerate(everyone):
        if candidate.problem is not None:
            return f"rank {rank} cannot use NCCL: {candidate.problem}"
    versions = groups_of((rank, candidate.version) for rank, candidate in enumerate(everyone))
    if len(versions) > 1:
        found = names_text(f"{version} on {numbered_ranks(ranks)}" for version, ranks in versions)
        return f"the ranks load different versions of NCCL: {found}; expected one version everywhere"
    return None


def _new_unique_id(binding: ModuleType) -> UniqueId | str:
    """Return NCCL's unique id, or why there is none, a str."""
    try:
        unique_id: UniqueId = binding.get_unique_id()
        return unique_id
    except (binding.NcclError, KeyError) as error:
        return str(failure(binding, "NCCL could not open a socket on rank 0 (NCCL_SOCKET_IFNAME names one)", error))


def _shared_gpus(everyone: list[_Candidate]) -> str | None:
    """Return a report of two ranks that have one GPU, or None."""
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
    """Return why NCCL did not start, the same on every rank, or None."""
    stopwatch = Stopwatch()
    is_called_off, is_late, looks = False, False, 0
    while not (start.is_over or is_called_off or is_late):
        # A rank that failed says so, as NCCL may leave the others waiting for it.
        is_called_off = comm.Iprobe(tag=NCCL_START)
        is_late = stopwatch.seconds > start_seconds
        looks += 1
        relax(looks, 0)
        yield
    problem = None if start.problem is None else _Problem(start.problem, is_late=False)
    if is_late and not start.is_over:
        text = f"NCCL was not ready on rank {comm.Get_rank()} of {comm.Get_size()} after {start_seconds:g} s"
        problem = _Problem(text, is_late=True)
    return (yield from _first_failure(comm, problem))


def _first_failure(comm: Comm, problem: _Problem | None) -> Steps[_Problem | None]:
    """Tell the others of this rank's problem, and return the first rank's problem."""
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
    """NCCL starting in a thread.

    Args:
        binding: The module ``cupy.cuda.nccl``.
        ops: The operations on arrays of its kind.
        device: Number of the GPU.
        rank: Of this process.
        size: How many ranks there are.
        unique_id: By which they find one another.

    Attributes:
        is_over: Whether the thread is done.
        problem: Then: why NCCL did not start; None where it did.
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
        # NCCL lets another thread abort while it waits for the GPU, and not while it is inside one of its functions.
        self._is_inside = True
        self._is_abandoned = False
        start_daemon("nccl-start", self._run)

    def take(self) -> NcclCommunicator:
        """Return the communicator, which from now on is the caller's to close."""
        raw, self._raw = self._raw, None
        assert self.is_over, "all ranks agreed that NCCL started, while it has not here"
        assert raw is not None
        return raw

    def abandon(self) -> None:
        """Abort, unless the communicator was taken, as soon as NCCL leaves the thread."""
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
        """Make the communicator and reduce one number per rank.

        NCCL connects only then, and that may fail, too.
        """
        ops, device = self._ops, self._device
        number = ops.from_host(np.ones(1, np.float32), device)
        stream = ops.stream(device)
        stream.wait(ops.current_stream(device).record())
        self._raw = self._binding.NcclCommunicator(self._size, self._unique_id, self._rank)
        if self._is_abandoned:
            return 0.0
        datatype, op, count = nccl_reduction(number.dtype, ReduceOp.SUM)
        pointer = ops.pointer(number)
        self._raw.allReduce(pointer, pointer, count, datatype, op, stream.handle)
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


# Ranks as those of the job, in NCCL's order, and the number of this rank's GPU.
Key = tuple[tuple[int, ...], int]


class _Shared:
    """One NCCL communicator.

    Args:
        key: Its ranks and GPU.
        raw: CuPy's NcclCommunicator.
        identity: By which all its ranks know it, and no other.
    """

    def __init__(self, key: Key, raw: NcclCommunicator, identity: Hashable) -> None:
        self.key, self.raw, self.identity = key, raw, identity
        self.users: list[NcclShare] = []

    @property
    def in_step(self) -> bool:
        """Return whether all its users have made their calls so far, or will."""
        return not any([user.has_given_up() for user in self.users])


_open: list[_Shared] = []


class NcclShare:
    """One user's share of an NCCL communicator, in place of CuPy's NcclCommunicator.

    Args:
        shared: The communicator.
        has_given_up: Whether the user makes no more calls, also of those that other ranks make.
    """

    def __init__(self, shared: _Shared, has_given_up: Callable[[], bool]) -> None:
        self._shared = shared
        self.has_given_up = has_given_up
        shared.users.append(self)

    def __getattr__(self, name: str) -> Any:
        self.check_in_step()
        return getattr(self._shared.raw, name)

    def check_in_step(self) -> None:
        """Raise RuntimeError where a user has given up, whose calls other ranks may still make.

        One of ours would meet one of theirs, and both would go on with wrong numbers.
        """
        if not self._shared.in_step:
            raise RuntimeError(
                "this Communicator reduces no more arrays on GPUs: another one of the same ranks was given up, after "
                "an error or a deadline, and NCCL takes their calls for one another's; make a new Communicator"
            )

    def check_async_error(self) -> None:
        """Ask NCCL for an error of any user."""
        self._shared.raw.check_async_error()

    def destroy(self) -> None:
        """Give the share back; the last one destroys the communicator."""
        self._shared.users.remove(self)
        if not self._shared.users and self._forget():
            self._shared.raw.destroy()

    def abort(self) -> None:
        """Abort the communicator, for all users; nobody gets a share of it any more."""
        if self._forget():
            self._shared.raw.abort()

    def _forget(self) -> bool:
        """Remove the communicator from the open ones; return whether it was there."""
        is_open = self._shared in _open
        if is_open:
            _open.remove(self._shared)
        return is_open


def first_share(key: Key, raw: NcclCommunicator, identity: Hashable, has_given_up: Callable[[], bool]) -> NcclShare:
    """Return the first share of a new communicator."""
    _open.append(_Shared(key, raw, identity))
    return NcclShare(_open[-1], has_given_up)


def open_identities(key: Key) -> tuple[Hashable, ...]:
    """Return the identities of communicators to share; other ranks may have others."""
    return tuple(shared.identity for shared in _open if shared.key == key and shared.in_step)


def share_of_open(key: Key, identity: Hashable, has_given_up: Callable[[], bool]) -> NcclShare:
    """Return a share of a communicator out of ``open_identities``.

    Both calls belong to one place in the queue of the device.
    """
    (shared,) = [shared for shared in _open if (shared.key, shared.identity) == (key, identity)]
    return NcclShare(shared, has_given_up)


def forget_shares() -> None:
    """Forget all, where the GPUs themselves are gone (for tests)."""
    _open.clear()
