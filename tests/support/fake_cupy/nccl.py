"""``cupy.cuda.nccl`` without NCCL: CuPy's signatures, raw pointers, calls that streams carry out later.

What NCCL leaves undefined is an error here: ranks that make different calls, calls of several GPUs of one thread
outside of a group, streams of another device. What it loses is lost here, too: NaN under MIN and MAX.

For tests: ``version_code``, ``available``, ``communicator_bytes``, ``abort_waits``,
``NcclCommunicator.async_error`` and ``open_communicators()``.
"""

from __future__ import annotations

import itertools
import os
import platform
import struct
import threading
import zlib
from collections.abc import Callable
from operator import index
from typing import Any

from tests.support.fake_cupy.devices import touch
from tests.support.fake_cupy.memory import bytes_at
from tests.support.fake_cupy.nccl_messages import (
    COLLECTIVES,
    ENDING,
    BetweenProcesses,
    Board,
    Steps,
    Transport,
    WithinProcess,
    drive,
    join,
    world_of_messages,
)
from tests.support.fake_cupy.nccl_numbers import (  # noqa: F401 - names of CuPy's module
    CUDA_ERROR,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    NCCL_AVG,
    NCCL_BFLOAT16,
    NCCL_CHAR,
    NCCL_DOUBLE,
    NCCL_FLOAT,
    NCCL_FLOAT16,
    NCCL_FLOAT32,
    NCCL_FLOAT64,
    NCCL_HALF,
    NCCL_INT,
    NCCL_INT8,
    NCCL_INT32,
    NCCL_INT64,
    NCCL_MAX,
    NCCL_MIN,
    NCCL_PROD,
    NCCL_SUM,
    NCCL_UINT8,
    NCCL_UINT32,
    NCCL_UINT64,
    SYSTEM_ERROR,
    NcclError,
    dtype_of,
    put,
    reduced,
)
from tests.support.fake_cupy.streams import Device, current_device, machine

available = True
version_code = 22809
# What a communicator takes of its GPU's memory, of which CuPy's pool holds a part.
communicator_bytes = 256 << 20
# Whether ``abort`` returns only once all ranks have called it, as NCCL may need it.
abort_waits = False

_ID_BYTES = 128
_ALIGNMENT = 128
_MULTI_RANK_GPU = 23003
_numbers = itertools.count()
_open: dict[int, NcclCommunicator] = {}
_local = threading.local()


def open_communicators() -> list[NcclCommunicator]:
    """Return those that were neither destroyed nor aborted; they are kept, so that nobody forgets one."""
    return list(_open.values())


def get_build_version() -> int:
    return version_code


def get_version() -> int:
    return version_code


def get_unique_id() -> bytes:
    world = world_of_messages()
    number = next(_numbers) * world.Get_size() + world.Get_rank()
    return struct.pack("<8sqq", b"fakeNCCL", world.Get_rank(), number).ljust(_ID_BYTES, b"\0")


# Groups -------------------------------------------------------------------------------------------------------------


class _Call:
    """One call of a communicator.

    Args:
        comm: The communicator.
        stream: Handle of the stream.
        steps: What happens, begun when the stream gets there.
    """

    def __init__(self, comm: NcclCommunicator, stream: int, steps: Callable[[], Steps[None]]) -> None:
        self.comm, self.steps = comm, steps
        self.worker = machine().worker(stream, comm._device)
        if self.worker.device != comm._device:
            raise NcclError(CUDA_ERROR)


def groupStart() -> None:  # noqa: N802
    _local.depth = getattr(_local, "depth", 0) + 1


def groupEnd() -> None:  # noqa: N802
    if not getattr(_local, "depth", 0):
        raise NcclError(INVALID_USAGE)
    _local.depth -= 1
    if _local.depth == 0:
        calls, _local.calls = getattr(_local, "calls", []), []
        for comm in dict.fromkeys([call.comm for call in calls]):
            _launch(comm, [call for call in calls if call.comm is comm])


def _issue(call: _Call) -> None:
    if getattr(_local, "depth", 0):
        _local.calls = [*getattr(_local, "calls", []), call]
        return
    if isinstance(call.comm._transport, WithinProcess) and call.comm._transport.size > 1:
        raise RuntimeError("this would hang: one thread calls for several GPUs between groupStart and groupEnd only")
    _launch(call.comm, [call])


def _launch(comm: NcclCommunicator, calls: list[_Call]) -> None:
    """Let the first stream carry out the calls, after what all of them were given before; the others wait for it."""
    touch()  # NCCL makes the communicator's device current, and then again the one that was
    first, *others = dict.fromkeys([call.worker for call in calls])
    turn = comm._next_turn()
    kernels = machine().nccl_kernels[comm._device]
    kernel = kernels.launch()
    machine().counts.add("launches")
    arrived = [threading.Event() for _ in others]
    done = threading.Event()

    def carry_out() -> None:
        try:
            for event in arrived:
                while not event.wait(0.05):
                    comm._check()
            drive(kernels.until_first(kernel), comm._check)
            comm._carry_out(turn, calls)
        except _Aborted:
            # The stream goes on, over whatever is in the memory.
            return
        finally:
            comm._end_turn(turn)
            kernels.end(kernel)
            done.set()

    first.enqueue(carry_out)
    for event, worker in zip(arrived, others, strict=True):
        worker.enqueue(event.set)
        worker.enqueue(lambda: None if done.wait(60) else _never())


def _never() -> None:
    raise RuntimeError("a call on another stream of the group never ended")


class _Aborted(Exception):
    """The communicator was aborted during the call."""


# Communicators ------------------------------------------------------------------------------------------------------


class NcclConfig:
    def __init__(self, split_share: int = 0) -> None:
        self.split_share = split_share


class NcclCommunicator:
    def __init__(self, ndev: int, commId: bytes, rank: int, config: NcclConfig | None = None) -> None:  # noqa: N803
        if not isinstance(commId, bytes):
            raise TypeError(f"Argument 'commId' has incorrect type (expected bytes, got {type(commId).__name__})")
        if len(commId) != _ID_BYTES:
            raise ValueError(f"commId length {len(commId)} != {_ID_BYTES}.")
        if not 0 <= index(rank) < index(ndev):
            raise NcclError(INVALID_ARGUMENT)
        self._begin(_between_processes(ndev, commId, rank))

    def _begin(self, transport: Transport) -> None:
        touch()
        self._device = current_device()
        taken = sum(comm._bytes for comm in _open.values() if comm._device == self._device)
        if machine().held[self._device] + taken + communicator_bytes > machine().memory[self._device]:
            raise NcclError(CUDA_ERROR)
        self._bytes = communicator_bytes
        self._transport = transport
        self._lock = threading.Lock()
        self._turns = self._serving = 0
        self._is_aborted = False
        self.async_error = 0
        self._is_open = True
        _open[id(self)] = self

    @staticmethod
    def initAll(devices: Any) -> list[NcclCommunicator]:  # noqa: N802
        if isinstance(devices, int):
            devices = list(range(devices))
        if not isinstance(devices, list):
            raise ValueError('"devices" should be an int or a list of int.')
        if len(set(devices)) < len(devices) and not _shares_gpus():
            raise NcclError(INVALID_USAGE)
        board = Board(len(devices))
        comms = []
        for rank, device in enumerate(devices):
            comm = NcclCommunicator.__new__(NcclCommunicator)
            with Device(device):
                comm._begin(WithinProcess(board, rank))
            comms.append(comm)
        return comms

    # Its life -----------------------------------------------------------------------------------------------------

    @property
    def comm(self) -> int:
        return id(self) if self._is_open else 0

    def destroy(self) -> None:
        touch()
        if self._is_open:
            drive(self._until_turn(self._turns), self._check)
            drive(self._until_all_end(waits=True), _check_machine)
            self._close()

    def abort(self) -> None:
        touch()
        if self._is_open:
            self._is_aborted = True
            drive(self._until_all_end(waits=abort_waits), _check_machine)
            self._close()

    def _until_all_end(self, waits: bool) -> Steps[None]:
        transport = self._transport
        if not isinstance(transport, BetweenProcesses):
            return
        others = [rank for rank in range(transport.size) if rank != transport.rank]
        left = [transport.send(rank, ENDING, b"") for rank in others]
        for rank in others if waits else ():
            yield from transport.receive(rank, ENDING)
        while not all([has_left() for has_left in left]):
            yield

    def _close(self) -> None:
        self._is_open = False
        _open.pop(id(self), None)

    def check_async_error(self) -> None:
        self._check_open()
        if self.async_error:
            raise NcclError(self.async_error)

    def device_id(self) -> int:
        self._check_open()
        return self._device

    def rank_id(self) -> int:
        self._check_open()
        return self._transport.rank

    def size(self) -> int:
        self._check_open()
        return self._transport.size

    # Data ---------------------------------------------------------------------------------------------------------

    def allReduce(  # noqa: N802
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
    ) -> None:
        def finish(everything: list[bytes]) -> None:
            put(recvbuf, reduced(everything, datatype, op))

        self._collective("allReduce", sendbuf, count, (datatype, op), None, finish, stream)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        self._check_rank(root)

        def finish(everything: list[bytes]) -> None:
            if self._transport.rank == root:
                put(recvbuf, reduced(everything, datatype, op))

        self._collective("reduce", sendbuf, count, (datatype, op, root), None, finish, stream)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        self._check_rank(root)

        def finish(everything: list[bytes]) -> None:
            put(recvbuff, everything[root])

        self._collective("broadcast", sendbuff, count, (datatype, root), root, finish, stream)

    def bcast(self, buff: int, count: int, datatype: int, root: int, stream: int) -> None:
        self.broadcast(buff, buff, count, datatype, root, stream)

    def reduceScatter(  # noqa: N802
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        rank, size = self._transport.rank, self._transport.size

        def finish(everything: list[bytes]) -> None:
            piece = recvcount * dtype_of(datatype).itemsize
            pieces = [data[rank * piece : (rank + 1) * piece] for data in everything]
            put(recvbuf, reduced(pieces, datatype, op))

        self._collective("reduceScatter", sendbuf, recvcount * size, (datatype, op), None, finish, stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:  # noqa: N802
        def finish(everything: list[bytes]) -> None:
            put(recvbuf, b"".join(everything))

        self._collective("allGather", sendbuf, count, (datatype,), None, finish, stream)

    # Inside -------------------------------------------------------------------------------------------------------

    def _collective(
        self,
        name: str,
        source: int,
        count: int,
        arguments: tuple[int, ...],
        root: int | None,
        finish: Callable[[list[bytes]], None],
        stream: int,
    ) -> None:
        """Issue a call in which every rank (or only ``root``) shows all others its data."""
        self._check_open()
        datatype = arguments[0]
        transport = self._transport
        nbytes = index(count) * dtype_of(datatype).itemsize
        is_heard = root is None or root == transport.rank
        head = f"{name} of {count} elements with arguments {arguments}".encode().ljust(128)
        others = [rank for rank in range(transport.size) if rank != transport.rank]
        if source % _ALIGNMENT:
            machine().counts.add("unaligned")

        def steps() -> Steps[None]:
            mine = bytes_at(source, nbytes).tobytes() if is_heard else b""
            left = [transport.send(rank, COLLECTIVES, head + mine) for rank in others]
            everything = [mine] * transport.size
            for rank in others:
                message = yield from transport.receive(rank, COLLECTIVES)
                if message[:128] != head:
                    raise self._misuse(f"rank {rank} makes another call: {message[:128].decode().strip()}")
                everything[rank] = message[128:]
            while not all([has_left() for has_left in left]):
                yield
            finish(everything)

        _issue(_Call(self, index(stream), steps))

    def _carry_out(self, turn: int, calls: list[_Call]) -> None:
        drive(self._until_turn(turn), self._check)
        for call in calls:
            drive(call.steps(), self._check)

    def _until_turn(self, turn: int) -> Steps[None]:
        while self._serving < turn:
            yield

    def _next_turn(self) -> int:
        with self._lock:
            self._turns += 1
            return self._turns - 1

    def _end_turn(self, turn: int) -> None:
        with self._lock:
            self._serving = turn + 1

    def _check(self) -> None:
        """Raise where a wait has to end."""
        if self._is_aborted:
            raise _Aborted
        if self._device in machine().failures:
            raise NcclError(CUDA_ERROR)
        _check_machine()

    def _check_open(self) -> None:
        if not self._is_open:
            raise NcclError(INVALID_ARGUMENT)

    def _check_rank(self, rank: int) -> None:
        self._check_open()
        if not 0 <= index(rank) < self._transport.size:
            raise NcclError(INVALID_ARGUMENT)

    def _misuse(self, text: str) -> RuntimeError:
        self.async_error = INVALID_USAGE
        return RuntimeError(f"NCCL would hang, or return garbage, on rank {self._transport.rank}: {text}")


def _check_machine() -> None:
    if machine().closed:
        raise RuntimeError("a call of NCCL waits for ranks that never make it")


def _between_processes(size: int, unique_id: bytes, rank: int) -> Transport:
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError("streams call MPI from threads: the pretended NCCL needs MPI_THREAD_MULTIPLE")
    world = world_of_messages()
    _, creator, number = struct.unpack_from("<8sqq", unique_id)
    host = zlib.crc32((os.environ.get("NCCL_HOSTID") or platform.node()).encode())
    mine = (rank, world.Get_rank(), host, current_device(), size)
    rows = drive(join(world, creator, number, size, mine), _check_joining)
    if len({(host, device) for _, _, host, device, _ in rows}) < size and not _shares_gpus():
        raise NcclError(INVALID_USAGE)
    if any(row[0] != rank or row[-1] != size for rank, row in enumerate(rows)):
        raise NcclError(INVALID_ARGUMENT)
    return BetweenProcesses(world, rank, [row[1] for row in rows], number)


def _check_joining() -> None:
    if machine().closed:
        raise NcclError(SYSTEM_ERROR)


def _shares_gpus() -> bool:
    return version_code >= _MULTI_RANK_GPU and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
