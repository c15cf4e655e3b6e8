"""The machine that is pretended: its GPUs, the threads that are their streams, and which GPU is current in a thread."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any
from weakref import WeakValueDictionary

from tests.support.fake_cupy.captures import Captures
from tests.support.fake_cupy.contexts import Contexts
from tests.support.fake_cupy.pool import Arena, Regions

Job = Callable[[], None]

# How long the end of the machine waits for a stream to finish what it was given.
_ENDING_SECONDS = 20.0


SUCCESS, NOT_READY = 0, 600
_LAUNCH_FAILURE = 719
_TEXTS = {
    2: "cudaErrorMemoryAllocation: out of memory",
    100: "cudaErrorNoDevice: no CUDA-capable device is detected",
    101: "cudaErrorInvalidDevice: invalid device ordinal",
    400: "cudaErrorInvalidResourceHandle: invalid resource handle",
    NOT_READY: "cudaErrorNotReady: device not ready",
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
    _LAUNCH_FAILURE: "cudaErrorLaunchFailure: unspecified launch failure",
    900: "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing",
    901: "cudaErrorStreamCaptureInvalidated: operation failed due to a previous error during capture",
    906: "cudaErrorStreamCaptureImplicit: operation would make the legacy stream depend on a capturing blocking stream",
    907: "cudaErrorCapturedEvent: operation not permitted on an event last recorded in a capturing stream",
}


class CUDARuntimeError(RuntimeError):
    """An error of the pretended CUDA."""

    def __init__(self, status: int) -> None:
        super().__init__(_TEXTS[status])
        self.status = status


def cuda_error(status: int, detail: str) -> CUDARuntimeError:
    """Return an error of CUDA that says what happened."""
    error = CUDARuntimeError(status)
    error.args = (f"{_TEXTS[status]}: {detail}",)
    return error


def check_status(status: int) -> None:
    """``cupy.cuda.runtime.check_status``."""
    if status != SUCCESS:
        raise CUDARuntimeError(status)


class Counts:
    """What the program has asked of CUDA so far, CuPy's own calls for it included.

    Attributes:
        device_switches: Calls of cudaSetDevice.
        launches: Kernels, NCCL's among them.
        pinned_allocations: Calls of cudaHostAlloc: what comes from CuPy's pool is none.
        synchronizations: Calls in which the host waits for a device.
        spins: Those in which it keeps a core busy until an event has happened, which was not made with ``block``.
        unaligned: Calls of NCCL on data that does not begin at a multiple of 128 bytes, which it reads one by one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Count from 0."""
        self.device_switches = self.launches = self.pinned_allocations = self.synchronizations = 0
        self.spins = self.unaligned = 0

    def add(self, name: str) -> None:
        """Count one more."""
        with self._lock:
            setattr(self, name, getattr(self, name) + 1)


class Failure:
    """What a job of a device ended with: CUDA does nothing more on the device, and every call there fails for ever."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.was_seen = False
        status = getattr(error, "status", _LAUNCH_FAILURE)
        self.status: int = status if status in _TEXTS else _LAUNCH_FAILURE

    def raise_it(self) -> None:
        """Raise the error itself where it is seen first, and later what CUDA says of it."""
        if not self.was_seen:
            self.was_seen = True
            raise self.error
        raise CUDARuntimeError(self.status) from self.error


class Worker:
    """One stream of a device: a thread that does jobs in the order in which they came, each after a random delay."""

    def __init__(self, machine: Machine, device: int, handle: int) -> None:
        self.machine = machine
        self.device = device
        self.handle = handle
        self.arena = Arena(lambda block: machine.keep(block, device))
        self.stopping = False
        self._random = random.Random(handle)
        # A job stays in the list until it has happened. There is a token in the queue for each; a finalizer may
        # interrupt either and add a job of its own.
        self._jobs: deque[Job | threading.Event | None] = deque()
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"fake stream {handle:#x} of gpu:{device}", daemon=True)
        self.thread.start()

    def enqueue(self, job: Job) -> None:
        """Let ``job`` happen after everything that was given before."""
        if self.stopping:
            raise cuda_error(400, f"{self.thread.name} was destroyed")
        if not self.machine.captures.has(self.handle):
            self._put(job)

    @property
    def is_idle(self) -> bool:
        """Whether everything given so far has happened."""
        return not self._jobs

    def stop(self) -> None:
        """End the thread after what it was given."""
        if not self.stopping:
            self.stopping = True
            self._put(None)

    def drain(self) -> None:
        """Wait until everything given so far has happened; raise where the device has failed."""
        if threading.current_thread() is self.thread:
            return
        if self.stopping:
            self.thread.join()
        elif not self.is_idle:
            done = threading.Event()
            self._put(done)
            done.wait()
        self.raise_error()

    def raise_error(self) -> None:
        """Raise if a job of the device, of any stream, has failed."""
        failure = self.machine.failures.get(self.device)
        if failure is not None:
            failure.raise_it()

    def _put(self, job: Job | threading.Event | None) -> None:
        self._jobs.append(job)
        self._tokens.put(None)

    def _run(self) -> None:
        while True:
            self._tokens.get()
            job = self._jobs[0]
            if job is None:
                return
            if isinstance(job, threading.Event):  # somebody waits until the stream has nothing left to do
                self._jobs.popleft()
                job.set()
                continue
            self._do(job)
            del job
            self._jobs.popleft()

    def _do(self, job: Job) -> None:
        if self.device in self.machine.failures:
            return
        if self.machine.jitter:
            time.sleep(self._random.uniform(0, self.machine.jitter))
        try:
            job()
        except BaseException as error:  # it surfaces where the program next looks at this device
            self.machine.failures.setdefault(self.device, Failure(error))


class Machine:
    """The GPUs that are pretended to be there.

    Args:
        devices: How many there are.
        jitter: Seconds by which a job is late at most.
        ptds: Whether each thread has a default stream of its own.
    """

    def __init__(self, devices: int, jitter: float, ptds: bool = False) -> None:
        self.devices = devices
        self.ptds = ptds
        self.counts = Counts()
        self.captures = Captures()
        self.contexts = Contexts()
        self.nccl_kernels: Any = None  # of each device; see nccl_kernels.py
        self.jitter = jitter
        self.local = threading.local()
        self.pinned: Any = None  # the pool of memory.py
        self.blocks: list[Any] = []  # all memory that was ever a device's: late work must not meet memory of others
        self.regions = Regions()
        self.used = [0] * devices
        # What each device has, and what of it the pool holds: arrays, and memory that it keeps for later ones.
        self.memory = [1 << 34] * devices
        self.held = [0] * devices
        self.failing_allocations = range(0)  # counted from the next one
        self._lock = threading.Lock()
        self._next_handle = 0x7F0000001000
        self.workers: dict[int, Worker] = {}
        self.failures: dict[int, Failure] = {}  # by device
        self.cublas_handles: list[tuple[str, int]] = []  # thread and device, as they were made
        self.events: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by ``Event.ptr``
        self.closed = False
        self.default = [self.new_worker(device) for device in range(devices)]
        self.contexts = Contexts()  # the default streams are there without one

    def new_worker(self, device: int) -> Worker:
        """Return a new stream of ``device``."""
        with self._lock:
            handle = self._next_handle
            self._next_handle += 0x40
            worker = self.workers[handle] = Worker(self, device, handle)
        self.contexts.need(device)
        return worker

    def keep(self, block: Any, device: int) -> None:
        """Keep memory of a device, which cudaMalloc gives."""
        check_status(self.captures.try_unsafe())
        self.contexts.need(device)
        self.blocks.append(block)
        self.held[device] += block.nbytes
        self.regions.add(block, device)

    def release(self, device: int) -> None:
        """Give a device back what the pool keeps for later arrays; nobody else gets it: work may be late."""
        workers = [worker for worker in list(self.workers.values()) if worker.device == device]
        self.held[device] -= sum(worker.arena.release() for worker in workers)

    def worker(self, handle: int, device: int | None = None) -> Worker:
        """Return the stream with that handle.

        0 and 1 are the default one of ``device``, or of the current one, and 2 is that of the thread there.
        """
        if handle in (0, 1, 2):
            device = current_device() if device is None else device
            if handle < 2:
                return self.default[device]
            own = self.local.__dict__.setdefault("own_defaults", {})
            if device not in own:
                own[device] = self.new_worker(device)
            found: Worker = own[device]
            return found
        try:
            return self.workers[handle]
        except KeyError:
            raise cuda_error(400, f"no stream has handle {handle:#x}") from None

    def close(self) -> None:
        """End all threads, and raise an error of a device that nobody has seen."""
        workers = list(self.workers.values())
        for worker in workers:
            worker.stop()
        limit = time.monotonic() + _ENDING_SECONDS
        for worker in workers:
            worker.thread.join(max(0.0, limit - time.monotonic()))
        # Only now: on a slow machine, a stream may wait for an event of another stream that is merely late.
        self.closed = True
        stuck = [worker.thread.name for worker in workers if worker.thread.is_alive()]
        if stuck:
            raise RuntimeError(f"streams did not finish what they were given: {', '.join(stuck)}")
        for failure in self.failures.values():
            if not failure.was_seen:
                failure.raise_it()
        self.contexts.check()


_machine: Machine | None = None


def set_machine(machine: Machine | None) -> None:
    """Make ``machine`` the one of this process."""
    global _machine
    _machine = machine


def machine() -> Machine:
    """Return the machine of this process."""
    if _machine is None:
        raise cuda_error(100, "fake_cupy is not installed")
    return _machine


def installed() -> Machine | None:
    """Return the machine of this process, or None."""
    return _machine


def current_device() -> int:
    """Return the device that is current in this thread."""
    device: int = getattr(machine().local, "device", 0)
    return device


def touch() -> None:
    """Do what nearly every call of CUDA does first: make a context on the current device if it has none."""
    machine().contexts.make(current_device())


def set_device(device: int) -> None:
    """Make ``device`` current in this thread."""
    if not 0 <= device < machine().devices:
        raise CUDARuntimeError(101)
    machine().counts.add("device_switches")
    machine().local.device = device
    touch()


@contextlib.contextmanager
def on_device(device: int) -> Iterator[None]:
    """Make ``device`` current for a while, as CuPy does: it goes back without asking whether that is needed."""
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def use_cublas() -> None:
    """Note that this thread uses cuBLAS on the current device: CuPy makes a handle for each thread and device.

    It is destroyed with its thread, which waits for everything on the device.
    """
    known = machine().local.__dict__.setdefault("cublas", set())
    device = current_device()
    if device not in known:
        known.add(device)
        machine().cublas_handles.append((threading.current_thread().name, device))


def enqueue(handle: int, job: Job) -> None:
    """Let ``job`` happen on the stream with that handle (``Stream.ptr``; 0 is the current device's default stream)."""
    machine().worker(handle).enqueue(job)
