"""The native core of one node: handshakes and data movement between its ranks.

``mpidist/native/mpidist.h`` documents the C functions.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import byref
from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.collectives.mpi.waiting import Steps, looks_before_yield, pause
from mpidist.collectives.node.native import (
    CoreReport,
    MpiFunctions,
    Opener,
    SlotSizes,
    address_of,
    library,
    mpi_functions,
)
from mpidist.core.message_tags import LEADERS
from mpidist.core.options import ReduceOp
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

# Constants of mpidist.h: kinds of calls, operations, dtypes,
_ALL_REDUCE, _REDUCE_SCATTER, _ALL_GATHER, _ALL_TO_ALL = 1, 2, 3, 4
_KINDS = {"all_reduce": _ALL_REDUCE, "reduce_scatter": _REDUCE_SCATTER, "all_gather": _ALL_GATHER}
_KINDS |= {"all_to_all": _ALL_TO_ALL, "broadcast": 16}
_OPS = {ReduceOp.SUM: 0, ReduceOp.MEAN: 0, ReduceOp.PROD: 1, ReduceOp.MIN: 2, ReduceOp.MAX: 3}
_OPS |= {ReduceOp.BAND: 4, ReduceOp.BOR: 5, ReduceOp.BXOR: 6}
# Added to the code of an operation on the fast path, because means and sums share a kernel.
_IS_MEAN = 16
_BYTE, _BFLOAT16 = 4, 9
_DTYPES = {(kind, 1 << power): 4 * (kind == "u") + power for kind in "iu" for power in range(4)}
_DTYPES |= {("b", 1): 16, ("f", 2): 8, ("f", 4): 10, ("f", 8): 11, ("c", 8): 13, ("c", 16): 14}
_DTYPES |= {("f", np.dtype(np.longdouble).itemsize): 12, ("c", np.dtype(np.clongdouble).itemsize): 15}
# flags,
_STOP, _SHARE, _UNWANTED, _WATCH, _OVER_NODES = 1, 2, 4, 8, 32
# and states.
DONE, NOT_YET, MOVED, MET, SLICE, CHUNK, MISMATCH, _MPI, LOST = range(9)
OVERLAP = -1
WAITING = (NOT_YET, MOVED)
EVENTS = ("fill chunk", "reduce chunk", "copy chunk")

# Nanoseconds that C code polls before it returns to Python.
_POLL_NANOSECONDS = 200_000
# After this number of failed polls, C code polls once per call, and Python backs off.
_LONG_POLLS = 20
# Batches of a ping (25 us between cores without a shared cache), and its timeout.
_PING_BATCHES, _PING_SECONDS = 6, 0.01
# Timeout for a running write of another rank, which copies at most 256 KiB.
WRITE_SECONDS = 1.0
# NC_INPUTS and NC_SHARED_BYTES of mpidist.h.
MOST_INPUTS = 8192
SHARED_BYTES = 2 << 20
# NC_MOST_OVER_NODES: bytes that travel to other nodes with the handshake.
SMALL_BETWEEN_NODES = 64 << 10


class FastCalls(NamedTuple):
    """Functions of the fast path. Each returns None if the signature is not cached.

    ``out`` may be None. ``all_reduce`` takes an array, or a list or tuple of arrays. ``kind`` is the structure that
    ranks compare (``mpidist.core.nest.flat_kind``), or None for the structure of the value.
    """

    all_reduce: Callable[[object, object, object, int | None], Any]  # op, value, out, kind
    reduce_scatter: Callable[[object, object, object], Any]  # op, array, out
    all_gather: Callable[[object, object], Any]  # array, out (along the first axis)
    broadcast: Callable[[object, object, object], Any]  # array, root, out
    all_to_all: Callable[[object, object], Any]  # array, out (equally many rows for each rank)


def _not_cached(*_: object) -> None:
    return None


NO_FAST_CALLS = FastCalls(*[_not_cached] * len(FastCalls._fields))
"""Functions without a native core."""

Resume = Callable[[int, int, Array, Array, Array | None], Array]
"""Finishes a fast-path call: signature, state, input, array for the result, ``out`` or None."""


class Core:
    """The core of one node.

    ``pids`` is None if ranks may not access each other's memory. ``is_alone``: the job has one node. ``rails``: number
    of ranks that reduce a slice. ``state`` belongs to the current call.
    """

    def __init__(
        self, opener: Opener, comm: MPI.Intracomm, memory: Array, pids: list[int] | None, is_alone: bool, rails: int
    ) -> None:
        self._comm, self._memory = comm, memory
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        spins, of_node = looks_before_yield(), None if pids is None else (ctypes.c_int32 * self.size)(*pids)
        self._calls = opener(address_of(memory), self.rank, self.size, spins, of_node, int(not is_alone), rails)
        self._library, self._address = library(), cast(int, self._calls["address"])
        self.report: CoreReport = self._library.nc_report_of(self._address).contents
        """Results of the current call, which C writes: ``shares``, ``slice`` and ``event`` (see ``EVENTS``)."""
        self._begin: Callable[..., int] = self._calls["begin"]
        self._step: Callable[[int], int] = self._calls["step"]
        # Bytes that each rank sends to this one, and the note of each rank, when all have arrived.
        self.lengths: Callable[[], list[int]] = partial(self._calls["of_ranks"], 0)
        self.notes: Callable[[], list[int]] = partial(self._calls["of_ranks"], 1)
        self.state = DONE
        self._over_nodes = 0 if is_alone else _OVER_NODES
        self.cells = self._calls["cells"].cast("q")
        """Integers that C shares with ``mpidist.collectives.channel.fast_path``."""

    def lead(self, comm: MPI.Intracomm, leaders: list[int]) -> None:
        """Make this rank the leader of its node. ``leaders``: the first rank of each node in ``comm``."""
        mpi, node = import_mpi(), leaders.index(comm.Get_rank())
        # Handles of MPICH are ints. mpi4py returns negative ones as large positive numbers.
        handles = [ctypes.c_ssize_t(handle).value for handle in (comm.handle, mpi.BYTE.handle)]
        functions = MpiFunctions(*mpi_functions(), *handles, mpi._sizeof(comm))
        ranks = (ctypes.c_int32 * len(leaders))(*leaders)
        if self._library.nc_lead(self._address, byref(functions), ranks, len(leaders), node, LEADERS) < 0:
            raise MemoryError("out of memory for the messages of a node leader. Start fewer processes per node")

    def halve_from(self, nbytes: int) -> None:
        """Use recursive halving between leaders from ``nbytes`` on."""
        self._library.nc_halve_from(self._address, nbytes)

    # Handshake --------------------------------------------------------------------------------------------------

    def meet(self, identity: int) -> None:
        """Start a handshake. The state becomes MISMATCH if a rank passes another identity."""
        self.resume(self._calls["meet"](identity, self._over_nodes))

    def resume(self, state: int) -> None:
        """Resume a call in ``state``. Raises OSError or MPI.Exception if the call has failed."""
        self.state = state
        if state in (_MPI, LOST):
            code = self.report.error
            raise import_mpi().Exception(code) if state == _MPI else OSError(code, os.strerror(code))

    def go_on(self) -> Steps[None]:
        """Yield until the call is finished or needs the caller."""
        polls = 0
        while self.state in WAITING:
            polls = self.pause(polls)
            yield
            self.look(polls)

    def look(self, polls: int | None = 0) -> None:
        """Advance the call after ``polls`` failed polls. Pass None if the caller has other work."""
        self.resume(self._step(0 if polls is None or polls >= _LONG_POLLS else _POLL_NANOSECONDS))

    def pause(self, polls: int, more: int = 1) -> int:
        """Back off after ``more`` failed polls. Return the number of failed polls."""
        if self.state == MOVED:
            return 0
        pause(self._comm, polls + more)
        return polls + more

    def meeting(self) -> Steps[None]:
        """Yield until all ranks of the node have arrived. Each rank then sees all earlier writes of the others."""
        self.resume(self._calls["meet"](0, 0))
        yield from self.go_on()

    @property
    def waited(self) -> int:
        """Nanoseconds in which this rank waited for others to arrive. Any thread may ask; 0 after the close."""
        address = self._address
        return cast(int, self._library.nc_waited(address)) if address else 0

    def ping(self, other: int, limit_seconds: float = _PING_SECONDS) -> int:
        """Return the latency to ``other`` in nanoseconds, or 0 after a timeout (collective, see nc_ping)."""
        nanoseconds: int = self._library.nc_ping(self._address, other, _PING_BATCHES, int(limit_seconds * 1e9))
        return nanoseconds

    def allow_push(self, nbytes: int, *, always: bool) -> None:
        """Allow all-reduces from ``nbytes`` on to write directly into the results of other ranks.

        They write into private memory only between cores that share no cache, or ``always``.
        """
        self._library.nc_allow_push(self._address, nbytes, always)

    def abandon(self, seconds: float) -> list[int]:
        """Stop writes into this rank's results. Return the ranks that still write after ``seconds``."""
        if not self._address:
            return []
        is_writing = ctypes.create_string_buffer(self.size)
        self._library.nc_abandon(self._address, int(seconds * 1e9), is_writing)
        return [rank for rank, writes in enumerate(is_writing.raw) if writes]

    # Calls ------------------------------------------------------------------------------------------------------

    def reduce(
        self,
        identity: int,
        op: ReduceOp,
        dtype: DType,
        inputs: list[list[Array]],
        outs: list[Array] | None,
        *,
        divisor: int | None = None,
        per_slice: int = 0,
        held: int = 0,
        is_wanted: bool = True,
        is_watched: bool = False,
        over_nodes: bool = False,
    ) -> None:
        """Start an all-reduce of the contiguous arrays of each replica, at most ``MOST_INPUTS``.

        The state becomes OVERLAP, without starting the call, if results would overwrite inputs too early. ``outs`` is
        None if the result may be shared, see ``targets``. ``held``: mask of the shared results that this rank still
        uses. ``is_watched``: return with MET after the handshake, and with CHUNK after each step of a chunk.
        ``over_nodes``: include all nodes, with at most ``SMALL_BETWEEN_NODES``. Otherwise the state becomes SLICE when
        a slice must be sent to other nodes.
        """
        flags = _SHARE * (outs is None) | _UNWANTED * (not is_wanted)
        flags |= (_STOP | _WATCH) * is_watched | _OVER_NODES * over_nodes
        if _code_of(dtype) == _BFLOAT16:
            inputs = [[_lending(array) for array in arrays] for arrays in inputs]
            outs = outs and [_lending(array) for array in outs]
        self.resume(self._begin(
            identity, _ALL_REDUCE, _OPS[op], _code_of(dtype), divisor or 0, flags, len(inputs), per_slice, held,
            inputs[0] if len(inputs) == 1 else list(chain.from_iterable(zip(*inputs, strict=True))), outs, None,
        ))  # fmt: skip

    def reduce_scatter(
        self, identity: int, op: ReduceOp, array: Array, borders: list[int], out: Array, divisor: int | None
    ) -> None:
        """Start a reduction. Each rank keeps the elements between two borders."""
        self.resume(self._begin(
            identity, _REDUCE_SCATTER, _OPS[op], _code_of(array.dtype), divisor or 0, 0, 1, 0, 0,
            [_lending(array)], [_lending(out)], borders,
        ))  # fmt: skip

    def move(self, identity: int, sent: Array, borders: list[int] | None, note: int) -> None:
        """Start to gather bytes, or to send each rank the bytes between two borders.

        The state becomes MET when ``lengths`` and ``notes`` are known.
        """
        kind = _ALL_GATHER if borders is None else _ALL_TO_ALL
        self.resume(self._begin(identity, kind, 0, _BYTE, 0, _STOP, 1, 0, note, [sent], None, borders))

    def targets(self, outs: list[Array] | None, shared: Array | None = None) -> None:
        """Set the arrays for the result, or one shared array, and continue the call."""
        self._calls["targets"](outs, 0 if shared is None else address_of(shared))
        self.look()

    def crossed(self, chunk: int) -> None:
        """Report, in the order of chunks, that a slice has arrived from other nodes."""
        self._library.nc_crossed(self._address, chunk)

    # The fast path ----------------------------------------------------------------------------------------------

    def open_fast_calls(self, take: Callable[..., Array], resume: Resume) -> FastCalls:
        """Return the functions of the fast path. ``take`` allocates an array of a shape and dtype."""
        names: list[object] = [name for op in _OPS for name in (op, op.name)]
        codes = [_OPS[op] + _IS_MEAN * (op is ReduceOp.MEAN) for op in _OPS for _ in range(2)]
        self._calls["open_fast_calls"](np.ndarray, np.empty, take, resume, names, codes)
        return FastCalls(*[self._calls[name] for name in FastCalls._fields])

    def cache(
        self,
        name: str,
        array: Array | list[Array],
        identity: int,
        op: ReduceOp | None,
        divisor: int | None,
        root: int,
    ) -> int | None:
        """Cache the signature of a call of ``FastCalls``. Return its number, or None if the fast path cannot run it."""
        dtype = (array if isinstance(array, np.ndarray) else array[0]).dtype
        dtype_code = _DTYPES.get((dtype.kind, dtype.itemsize))
        if dtype_code is None:
            return None
        code = 0 if op is None else _OPS[op] + _IS_MEAN * (op is ReduceOp.MEAN)
        number: int | None = self._calls["cache"](_KINDS[name], code, array, root, divisor or 0, identity, dtype_code)
        return number

    def record(self, began: Callable[[int], int], ended: Callable[[int], None]) -> None:
        """Record fast-path calls: call ``began`` with a signature, and ``ended`` with its result unless resumed."""
        self._calls["record"](began, ended)

    # Memory -----------------------------------------------------------------------------------------------------

    def use_slots(self, segments: list[Array], sizes: SlotSizes) -> None:
        """Use these segments, one per rank, as slots."""
        self._library.nc_room(self._address, _pointers(segments), byref(sizes))

    def add_segments(self, segments: list[Array]) -> None:
        """Read arrays in these segments in place. Pass one segment per rank, or one for all."""
        of_ranks = [segments[rank % len(segments)] for rank in range(self.size)]
        self._library.nc_segment(self._address, _pointers(of_ranks), segments[0].size)

    def close(self) -> None:
        """Unmap the control memory. No call may follow."""
        # ``_step`` keeps the core, which owns the memory of the cells.
        self._calls, self._address = {}, 0
        self._memory = self._memory[:0].copy()


def _pointers(arrays: list[Array]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*map(address_of, arrays))


def _lending(array: Array) -> Array:
    """Return an array with a buffer. bfloat16 arrays have none."""
    return array.view(np.uint16) if _code_of(array.dtype) == _BFLOAT16 else array


@lru_cache(maxsize=64)
def _code_of(dtype: DType) -> int:
    return _BFLOAT16 if dtype.name == "bfloat16" else _DTYPES[dtype.kind, dtype.itemsize]
