"""Reduce and move arrays between GPUs with NCCL: dtypes, communicators, and their start.

An NCCL communicator holds hundreds of megabytes of GPU memory and takes seconds to start, so Communicators of the same
ranks on the same GPU share one. Its calls follow the queue of the device, which has the order of the program.

NCCL checks no arguments. All callers pass contiguous arrays of this rank's GPU, in the dtype of ``nccl_dtype``, and
targets of the right dtype and size.
"""

from __future__ import annotations

import importlib
import os
import pickle
import platform
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays.device_ops import gpu_ops
from mpidist.arrays.dtypes import Array, DType
from mpidist.arrays.streams import Stream, find_cupy, require_cupy
from mpidist.collectives.mpi.communicator_names import ranks_in_job
from mpidist.collectives.mpi.exchange import broadcast_pickle, gather_objects, problems_of
from mpidist.collectives.mpi.waiting import Comm, Steps, relax, until_done
from mpidist.core.concurrency import Stopwatch, start_daemon
from mpidist.core.errors import DeviceError, NcclFailure
from mpidist.core.message_tags import NCCL_START
from mpidist.core.options import ReduceOp
from mpidist.core.text import groups_of, names_text, numbered_ranks
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from cupy.cuda.nccl import NcclCommunicator

# First and last element of each rank's slice. The last ranks may have none.
Cuts = Sequence[tuple[int, int]]

# The library ----------------------------------------------------------------------------------------------------------


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
    """Convert an error of the binding. It raises KeyError for a status without a name."""
    if isinstance(error, binding.NcclError):
        return NcclFailure(f"{doing}: {error}", error.status)
    status = error.args[0]
    return NcclFailure(f"{doing}: NCCL returned status {status}, which CuPy has no name for", status)


# Dtypes and operations ------------------------------------------------------------------------------------------------


# ncclDataType_t and ncclRedOp_t, part of NCCL's binary interface. By name, because extension dtypes share type letters.
_FLOATS = {"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
# A complex element counts as two numbers.
_COMPLEX = {"complex64": 7, "complex128": 8}
_INTEGERS = {"int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5}
_DATATYPES = {**_INTEGERS, **_FLOATS, **_COMPLEX}
_WIDER = {"int16": "int32", "uint16": "uint32"}
_OPS = {ReduceOp.SUM: 0, ReduceOp.PROD: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}
_BYTES = 1  # ncclUint8, to move any dtype as bytes


@lru_cache(maxsize=256)
def nccl_dtype(dtype: DType, op: ReduceOp) -> DType | None:
    """Return the dtype to cast to for NCCL, or None if the host must reduce. A mean counts as SUM.

    The host forms MIN and MAX of floating point, because NCCL ignores NaN and NumPy does not.

    >>> nccl_dtype(np.dtype("int16"), ReduceOp.SUM)
    dtype('int32')
    >>> nccl_dtype(np.dtype("float32"), ReduceOp.MAX) is None, nccl_dtype(np.dtype("int32"), ReduceOp.BOR) is None
    (True, True)
    """
    if op not in (*_OPS, ReduceOp.MEAN):
        return None
    name = _WIDER.get(dtype.name, dtype.name)
    if name in _FLOATS and op in (ReduceOp.MIN, ReduceOp.MAX):
        return None
    if name in _COMPLEX and op not in (ReduceOp.SUM, ReduceOp.MEAN):
        return None
    if name not in _DATATYPES or not dtype.isnative:
        return None
    return dtype if name == dtype.name else np.dtype(name)


# Communicators --------------------------------------------------------------------------------------------------------


class NcclComm:
    """Wrap one rank's end of an NCCL communicator, with one GPU.

    Keep arrays alive and unchanged until the stream is past the call. All ranks must call the same methods with the
    same counts in the same order, also across communicators that share a GPU. Calls with empty arrays are skipped.

    Close or abort it, because otherwise CuPy destroys it when Python collects it, perhaps after MPI has ended.

    Args:
        raw: The communicator, which ``shared`` has too unless it is None.
        has_given_up: Returns True if this user skips calls that other ranks make.
    """

    def __init__(
        self,
        raw: NcclCommunicator,
        device: int,
        rank: int,
        size: int,
        shared: _Shared | None = None,
        has_given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self.device, self.rank, self.size = device, rank, size
        self.has_given_up = has_given_up
        self._raw, self._shared = raw, shared
        self._end = ""
        self._binding = nccl_binding()
        self._ops = gpu_ops()
        # NCCL restores the current device, which must be a device that this process uses.
        self._on_device = partial(self._ops.on, device)
        if shared is not None:
            shared.users.append(self)

    def __repr__(self) -> str:
        state = ", closed" if self.is_closed else ""
        return f"<NcclComm, rank {self.rank} of {self.size} on gpu:{self.device}{state}>"

    # Data -------------------------------------------------------------------------------------------------------

    def all_reduce(self, source: Array, target: Array, op: ReduceOp, stream: Stream) -> None:
        """Reduce ``source`` of all ranks into ``target`` of every rank. Both may be one array."""
        self._reduce("allReduce", source, target, op, source.size, stream.handle)

    def reduce_scatter(
        self, source: Array, target: Array, op: ReduceOp, stream: Stream, cuts: Cuts | None = None
    ) -> None:
        """Reduce ``source`` of all ranks, and write this rank's slice into ``target``. Slices are equal by default."""
        if self._are_equal(cuts):
            self._reduce("reduceScatter", source, target, op, target.size, stream.handle)
            return
        with self.group():
            for root, (start, stop) in enumerate(cuts or ()):
                self.reduce(source[start:stop], target if root == self.rank else None, op, root, stream)

    def all_gather(self, source: Array, target: Array, stream: Stream, cuts: Cuts | None = None) -> None:
        """Concatenate ``source`` of all ranks in ``target``. ``source`` may be this rank's part of ``target``."""
        if self._are_equal(cuts):
            self._enqueue("allGather", source, target, source.nbytes, _BYTES, stream.handle)
            return
        with self.group():
            for root, (start, stop) in enumerate(cuts or ()):
                self.broadcast(source if root == self.rank else None, target[start:stop], root, stream)

    def reduce(self, source: Array, target: Array | None, op: ReduceOp, root: int, stream: Stream) -> None:
        """Reduce ``source`` of all ranks into ``target`` of rank ``root``. Other ranks may pass None."""
        # NCCL ignores the target of other ranks.
        self._reduce("reduce", source, source if target is None else target, op, source.size, root, stream.handle)

    def broadcast(self, source: Array | None, target: Array, root: int, stream: Stream) -> None:
        """Copy ``source`` of rank ``root``, or its ``target`` for None, into ``target`` of every rank."""
        source = target if source is None or self.rank != root else source
        self._enqueue("broadcast", source, target, source.nbytes, _BYTES, root, stream.handle)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Start the calls of this block together, also of other communicators.

        The calls start even if the block raises, so other ranks must make the same calls. NCCL may report an error of a
        call at the end of the block.
        """
        self._binding.groupStart()
        try:
            yield
        finally:
            try:
                self._binding.groupEnd()
            except (self._binding.NcclError, KeyError) as error:
                raise failure(self._binding, "NCCL failed to start a group of calls", error) from error

    # Errors and the end -----------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Return True after close() or abort()."""
        return bool(self._end)

    def check_async_error(self) -> None:
        """Raise NcclFailure if NCCL found an error, such as a lost rank or network."""
        try:
            self._call("check_async_error")
        except NcclFailure as error:
            if error.status != _IN_PROGRESS:
                raise

    def check_in_step(self) -> None:
        """Raise RuntimeError after the end, or if another user of it failed on this rank.

        NCCL would match our calls with other ranks' calls of that user, and both results would be wrong.
        """
        if self._end:
            raise RuntimeError(f"this NCCL communicator can no longer be used: {self._end}")
        if self._shared is not None and not self._shared.in_step:
            raise RuntimeError(
                "this Communicator can no longer reduce arrays on GPUs. Another Communicator of the same ranks was "
                "given up after an error or a deadline, and both share one NCCL communicator. Create a new Communicator"
            )

    def abort(self) -> None:
        """Abort NCCL for all users and lose unfinished results (idempotent).

        NCCL does not notify other ranks, so each must abort its own end. May block until all of them have.
        """
        if not self._end:
            self._end = "it was aborted"
            if self._shared is None or self._shared.forget():
                with self._on_device():
                    self._raw.abort()

    def close(self) -> None:
        """Release it when all enqueued work is done on every rank (idempotent). The last user destroys NCCL's."""
        if not self._end:
            self._end = "it has been closed"
            if self._shared is None or self._shared.leave(self):
                with self._on_device():
                    self._raw.destroy()

    # Calls ------------------------------------------------------------------------------------------------------

    def _are_equal(self, cuts: Cuts | None) -> bool:
        """Return True if every rank has a slice, all of one size."""
        return cuts is None or (len(cuts) == self.size and len({stop - start for start, stop in cuts}) == 1)

    def _reduce(self, name: str, source: Array, target: Array, op: ReduceOp, count: int, *last: int) -> None:
        numbers = 2 * count if source.dtype.kind == "c" else count
        self._enqueue(name, source, target, numbers, _DATATYPES[source.dtype.name], _OPS[op], *last)

    def _enqueue(self, name: str, source: Array, target: Array, count: int, *codes: int) -> None:
        self.check_in_step()
        if count:
            self._call(name, self._ops.pointer(source), self._ops.pointer(target), count, *codes)

    def _call(self, name: str, *arguments: int) -> None:
        if self._end:
            self.check_in_step()
        try:
            getattr(self._raw, name)(*arguments)
        except (self._binding.NcclError, KeyError) as error:
            call = "an earlier call" if name == "check_async_error" else name
            doing = f"NCCL failed in {call} on rank {self.rank} of {self.size} (gpu:{self.device})"
            raise failure(self._binding, doing, error) from error


def join_local_gpus(devices: Sequence[int]) -> list[NcclComm]:
    """Join distinct GPUs of this process, without other processes. Call the ends inside one ``group()``.

    Raises DeviceError if NCCL cannot be used in this process, and NcclFailure if it reports an error.
    """
    problem = nccl_problem()
    if problem is not None:
        raise DeviceError(problem)
    binding = nccl_binding()
    try:
        with gpu_ops().on(devices[0]):
            raw = binding.NcclCommunicator.initAll(devices)
    except (binding.NcclError, KeyError) as error:
        raise failure(binding, f"NCCL could not join the GPUs {devices} of one process", error) from error
    return [NcclComm(raw[i], device, i, len(devices)) for i, device in enumerate(devices)]


# The start ------------------------------------------------------------------------------------------------------------


_IN_PROGRESS = 7  # ncclInProgress, which CuPy does not define
# NCCL takes seconds to start on thousands of GPUs.
_START_SECONDS = 120.0
_POLL_SECONDS = 0.001
# An abort waits for other ranks to abort too.
_ABORT_SECONDS = 2.0
UniqueId = bytes | tuple[int, ...]  # a tuple in older versions of CuPy


class _Shared:
    """Hold an NCCL communicator and its users on this rank.

    Attributes:
        key: Ranks of the job in NCCL's order, and the GPU of this rank.
        identity: Unique id, by which all ranks know it.
    """

    def __init__(self, key: tuple[tuple[int, ...], int], raw: NcclCommunicator, identity: Hashable) -> None:
        self.key, self.raw, self.identity = key, raw, identity
        self.users: list[NcclComm] = []

    @property
    def in_step(self) -> bool:
        return not any([user.has_given_up() for user in self.users])

    def leave(self, user: NcclComm) -> bool:
        """Remove a user, and return True if it was the last one."""
        self.users.remove(user)
        return not self.users and self.forget()

    def forget(self) -> bool:
        """Stop sharing, and return True if it was shared until now."""
        is_open = self in _open
        if is_open:
            _open.remove(self)
        return is_open


_open: list[_Shared] = []


def forget_shares() -> None:
    """Forget all communicators after their GPUs are gone (for tests)."""
    _open.clear()


@dataclass(frozen=True)
class _Candidate:
    """Describe a rank before the start. ``open`` has its communicators of the same ranks."""

    problem: str | None
    version: str = ""
    host: str = ""
    bus_id: str = ""
    open: tuple[Hashable, ...] = ()


def make_nccl(
    comm: Comm,
    device: int | None,
    start_seconds: float = _START_SECONDS,
    has_given_up: Callable[[], bool] = lambda: False,
) -> Steps[NcclComm | str]:
    """Create or share a communicator, or return the same problem on every rank (collective).

    NCCL starts only when every rank can start it, because it blocks until all ranks have. If it fails or times out on
    one rank, all ranks abandon it. A thread that is still inside NCCL stays there, with its memory, until NCCL fails or
    the process ends.

    Args:
        device: GPU of this rank, or None if the rank has no GPU.
        start_seconds: Time limit of the start.
        has_given_up: See ``NcclComm``.
    """
    ranks = ranks_in_job(comm)
    everyone: list[_Candidate] = yield from gather_objects(comm, _candidate(device, ranks))
    problem = _first_problem(everyone)
    if problem is not None:
        return problem
    assert device is not None
    key, rank, size = (ranks, device), comm.Get_rank(), comm.Get_size()
    # Every rank listed its communicators at the same position in the device's queue.
    common = [identity for identity in everyone[0].open if all(identity in each.open for each in everyone)]
    found = [shared for shared in _open if shared.key == key and shared.identity in common[:1]]
    if not found:
        shared_gpu = _shared_gpus(everyone)
        made = yield from _attempt(comm, device, start_seconds)
        if isinstance(made, str):
            return made if shared_gpu is None else f"{shared_gpu} NCCL reported: {made}"
        found = [_Shared(key, *made)]
        _open.extend(found)
    return NcclComm(found[0].raw, device, rank, size, found[0], has_given_up)


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


def _attempt(comm: Comm, device: int, start_seconds: float) -> Steps[tuple[NcclCommunicator, UniqueId] | str]:
    """Return an NcclCommunicator and its unique id, or on every rank the same problem (collective)."""
    binding = nccl_binding()
    mine: UniqueId | str = ""
    if comm.Get_rank() == 0:
        try:
            mine = binding.get_unique_id()
        except (binding.NcclError, KeyError) as error:
            doing = "NCCL could not open a socket on rank 0 (NCCL_SOCKET_IFNAME names one)"
            mine = str(failure(binding, doing, error))
    unique_id: UniqueId | str = yield from broadcast_pickle(comm, pickle.dumps(mine), 0)
    if isinstance(unique_id, str):
        return unique_id
    start = _Start(binding, device, comm.Get_rank(), comm.Get_size(), unique_id)
    raw = None
    try:
        problem = yield from _agreed_outcome(comm, start, start_seconds)
        if problem is None:
            raw = start.raw
            assert raw is not None, "all ranks agreed that NCCL started, but it has not on this rank"
            return raw, unique_id
        return problem
    finally:
        start.end(keeps=raw is not None)


def _agreed_outcome(comm: Comm, start: _Start, start_seconds: float) -> Steps[str | None]:
    """Return the problem of the lowest rank on every rank, or None if NCCL started."""
    rank, size, stopwatch = comm.Get_rank(), comm.Get_size(), Stopwatch()
    has_failed_peer, is_late, failed_polls = False, False, 0
    while not (start.is_over or has_failed_peer or is_late):
        # A failed rank sends a message, because NCCL may never return on the others.
        has_failed_peer = comm.Iprobe(tag=NCCL_START)
        is_late = stopwatch.seconds > start_seconds
        failed_polls += 1
        relax(failed_polls, 0)
        yield
    problem = start.problem
    if is_late and not start.is_over:
        problem = f"NCCL was not ready on rank {rank} of {size} after {start_seconds:g} s"
    nothing, others = [np.empty(0, np.uint8), 0, import_mpi().BYTE], [other for other in range(size) if other != rank]
    requests = [] if problem is None else [comm.Isend(nothing, other, NCCL_START) for other in others]
    problems = yield from problems_of(comm, problem)
    requests += [comm.Irecv(nothing, other, NCCL_START) for other in problems if other != rank]
    for request in requests:
        yield from until_done(request)
    return next(iter(problems.values()), None)


class _Start:
    """Start NCCL in a thread, because CuPy cannot interrupt it. The thread ends after ``end``.

    Only the thread calls NCCL, because an abort while another function of NCCL runs is not allowed.

    Attributes:
        raw: The communicator, or None.
        is_over: True when the outcome is known.
        problem: Why NCCL did not start, or None. Valid when ``is_over``.
    """

    def __init__(self, binding: ModuleType, device: int, rank: int, size: int, unique_id: UniqueId) -> None:
        self.raw: NcclCommunicator | None = None
        self.is_over = self._keeps = False
        self.problem: str | None = None
        self._binding, self._device, self._unique_id = binding, device, unique_id
        self._rank, self._size = rank, size
        self._ops = gpu_ops()
        self._ended = threading.Event()
        self._thread = start_daemon("nccl-start", self._run)

    def end(self, keeps: bool) -> None:
        """End the thread. It aborts the communicator unless the caller keeps it."""
        self._keeps = keeps
        self._ended.set()
        # Other algorithms need the memory. A thread inside NCCL may never return.
        self._thread.join(_ABORT_SECONDS)

    def _run(self) -> None:
        doing = f"NCCL did not start on rank {self._rank} of {self._size} (gpu:{self._device})"
        try:
            with self._ops.on(self._device):
                # NCCL has its own memory, which CuPy may have cached.
                require_cupy().get_default_memory_pool().free_all_blocks()
                total = self._sum_of_ones()
            if total != self._size:
                self.problem = f"{doing}: it added {self._size} ones to {total}"
        except (self._binding.NcclError, KeyError) as error:
            self.problem = str(failure(self._binding, doing, error))
        except Exception as error:
            self.problem = f"{doing}: {type(error).__name__}: {error}"
        self.is_over = True
        self._ended.wait()
        if self.raw is not None and not self._keeps:
            with self._ops.on(self._device):
                self.raw.abort()

    def _sum_of_ones(self) -> float:
        """Create the communicator and reduce one number, because NCCL connects on first use."""
        ops, device, binding = self._ops, self._device, self._binding
        # Kept until the abort, because NCCL may still write to it.
        number = self._number = ops.from_host(np.ones(1, np.float32), device)
        stream = ops.stream(device)
        stream.wait(ops.current_stream(device).record())
        self.raw = binding.NcclCommunicator(self._size, self._unique_id, self._rank)
        if self._ended.is_set():
            return 0.0
        pointer = ops.pointer(number)
        self.raw.allReduce(pointer, pointer, 1, binding.NCCL_FLOAT32, binding.NCCL_SUM, stream.handle)
        is_reduced = stream.record()
        while not is_reduced.is_done:
            if self._ended.wait(_POLL_SECONDS):
                return 0.0
        return float(ops.to_host(number)[0])
