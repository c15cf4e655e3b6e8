"""Core: the native core of one node, where its ranks meet and move data.

What its functions do stands in ``mpidist/native/mpidist.h``. This is the only file that calls them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.collectives.mpi.waiting import Steps, looks_before_yield, pause
from mpidist.collectives.node.mapping import address_of
from mpidist.collectives.node.native import (
    ChunkEvent,
    Functions,
    MpiFunctions,
    PushSizes,
    SlotSizes,
    library,
    mpi_functions,
)
from mpidist.core.message_tags import LEADERS
from mpidist.core.options import ReduceOp
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

# As in mpidist.h: what a call does, ...
_ALL_REDUCE, _REDUCE_SCATTER, _ALL_GATHER, _ALL_TO_ALL = 1, 2, 3, 4
_KINDS = {"all_reduce": _ALL_REDUCE, "reduce_scatter": _REDUCE_SCATTER, "all_gather": _ALL_GATHER}
_KINDS |= {"all_to_all": _ALL_TO_ALL, "broadcast": 16}
_OPS = {ReduceOp.SUM: 0, ReduceOp.MEAN: 0, ReduceOp.PROD: 1, ReduceOp.MIN: 2, ReduceOp.MAX: 3}
_OPS |= {ReduceOp.BAND: 7, ReduceOp.BOR: 8, ReduceOp.BXOR: 9}
# Added to the code of an operation for the fast path, to tell a mean from a sum.
_IS_MEAN = 16
_BYTE, _BFLOAT16 = 4, 9
_DTYPES = {(kind, 1 << power): 4 * (kind == "u") + power for kind in "iu" for power in range(4)}
_DTYPES |= {("b", 1): 16, ("f", 2): 8, ("f", 4): 10, ("f", 8): 11, ("c", 8): 13, ("c", 16): 14}
_DTYPES |= {("f", np.dtype(np.longdouble).itemsize): 12, ("c", np.dtype(np.clongdouble).itemsize): 15}
# ... its flags, ...
_STOP, _SHARE, _UNWANTED, _WATCH, _OVER_NODES = 1, 2, 4, 8, 32
# ... and its states.
DONE, NOT_YET, MOVED, MET, SLICE, CHUNK, MISMATCH, _MPI, LOST = range(9)
OVERLAP = -1
WAITING = (NOT_YET, MOVED)
_EVENTS = ("fill chunk", "reduce chunk", "copy chunk")

# Nanoseconds for which a call goes on by itself: long enough for the others to come who are about to.
_BEGINS, _GOES_ON = 50_000, 200_000
# After so many of them in vain it only looks, and takes naps in between.
_LONG_LOOKS = 20
_ALIGNMENT, _PAGE = 64, 4096
# Batches of a ping, which take 25 us between cores without a common cache, and seconds to wait for the other rank.
_PING_BATCHES, _PING_SECONDS = 6, 0.01
# Timeout for a running write of another rank, which copies at most 256 KiB.
WRITE_SECONDS = 1.0
# Of a description in the flight record.
_MOST_TEXT = 280
# NC_INPUTS and NC_SHARED_BYTES of mpidist.h.
MOST_INPUTS = 8192
SHARED_BYTES = 2 << 20
# NC_MOST_OVER_NODES: of data that go to other nodes with the meeting.
SMALL_BETWEEN_NODES = 64 << 10


class FastCalls(NamedTuple):
    """The functions of the fast path. Each returns None for calls whose signature is not cached.

    Attributes:
        all_reduce: Takes operation, array or list or tuple of arrays, the same for the result or None, and the kind of
            structure that ranks compare (``mpidist.core.nest.flat_kind``), or None for the value's own.
        reduce_scatter: Takes operation, array, and an array for the result or None.
        all_gather: Takes the array, and one for the result or None. Concatenates along the first axis.
        broadcast: Takes array, root, and an array for the result or None.
        all_to_all: Takes the array, and one for the result or None. Sends equally many rows to each rank.
    """

    all_reduce: Callable[[object, object, object, int | None], Any]
    reduce_scatter: Callable[[object, object, object], Any]
    all_gather: Callable[[object, object], Any]
    broadcast: Callable[[object, object, object], Any]
    all_to_all: Callable[[object, object], Any]


def _not_cached(*_: object) -> None:
    return None


NO_FAST_CALLS = FastCalls(*[_not_cached] * len(FastCalls._fields))
"""The functions without a native core."""

Resume = Callable[[int, int, Array, Array, Array | None], Array]
"""Finishes a fast-path call. Takes signature, state, input, array for the result, and ``out`` or None."""


class Sizes(NamedTuple):
    """The sizes of a rank's slots, in bytes.

    Attributes:
        small: Of each of two, for what is shown before the ranks meet.
        chunk: Of each of two, for the inputs of others' slices.
        piece: Of a reduced slice, at most.
        lanes: How many reduced slices may be on their way.
        usual: Of a slice in calls that name no size.
    """

    small: int
    chunk: int
    piece: int
    lanes: int
    usual: int

    @property
    def nbytes(self) -> int:
        """The size of a segment: all slots, and a page for their offset."""
        return _PAGE + 2 * self.small + 2 * self.chunk + self.lanes * self.piece


class Slice(NamedTuple):
    """A reduced slice of this rank, which has to go to the other nodes.

    Attributes:
        chunk: Its number.
        start: Its first element.
        length: Its elements.
        lane: Where it lies in this rank's slots, in bytes.
    """

    chunk: int
    start: int
    length: int
    lane: int


class Core:
    """The core of one node.

    Args:
        functions: Of the library.
        comm: The ranks of the node.
        memory: Control memory of the node.
        pids: Their processes, whose memory each may read; None where that is forbidden.
        is_alone: Whether there are no other nodes.
        rails: How many ranks of the node reduce a slice.

    Attributes:
        state: Of the call that was begun last.
    """

    def __init__(
        self,
        functions: Functions,
        comm: MPI.Intracomm,
        memory: Array,
        pids: list[int] | None,
        is_alone: bool,
        rails: int,
    ) -> None:
        self._comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._memory = memory
        self._calls: dict[str, Any] = functions["open"](
            address_of(self._memory), self.rank, self.size, looks_before_yield(), pids, int(not is_alone), rails
        )
        self._library, self._address = library(), cast(int, self._calls["address"])
        self._begin: Callable[..., int] = self._calls["begin"]
        self._step: Callable[[int], int] = self._calls["step"]
        self.state = DONE
        self._over_nodes = 0 if is_alone else _OVER_NODES
        self.cells = self._calls["cells"].cast("q")
        """State that the fast path shares with ``mpidist.collectives.channel.fast_path``."""

    def lead(self, comm: MPI.Intracomm, leaders: list[int]) -> None:
        """Exchange small data with other nodes, as the first rank of this one.

        Args:
            comm: The ranks of all nodes.
            leaders: The first rank of each node, there.
        """
        mpi, node = import_mpi(), leaders.index(comm.Get_rank())
        # MPICH's are ints, some below zero, which mpi4py shows as large ones.
        handles = [ctypes.c_ssize_t(handle).value for handle in (comm.handle, mpi.BYTE.handle)]
        functions = MpiFunctions(*mpi_functions(), *handles, mpi._sizeof(comm))
        ranks = (ctypes.c_int32 * len(leaders))(*leaders)
        if self._library.nc_lead(self._address, ctypes.byref(functions), ranks, len(leaders), node, LEADERS) < 0:
            raise MemoryError("no memory for the leader of a node")

    def halve_from(self, nbytes: int) -> None:
        """Exchange so many bytes or more by recursive halving, as the first rank."""
        self._library.nc_halve_from(self._address, nbytes)

    # Meeting ----------------------------------------------------------------------------------------------------

    def meet(self, identity: int) -> None:
        """Begin a meeting of all ranks.

        Its ``state`` is MISMATCH where another rank passes another identity.
        """
        self._set(self._calls["meet"](identity, self._over_nodes))

    def _set(self, state: int) -> None:
        self.state = state
        if state == _MPI:
            raise import_mpi().Exception(self._library.nc_mpi_error(self._address))
        if state == LOST:
            self._calls["lost"]()

    def resume(self, state: int) -> None:
        """Resume a fast-path call that has reached ``state``.

        Raises:
            OSError: The memory of another rank could not be read or written.
            MPI.Exception: A message between nodes failed.
        """
        self._set(state)

    @property
    def waits(self) -> bool:
        """Whether the call has not got as far as it can by itself."""
        return self.state in WAITING

    def go_on(self) -> Steps[None]:
        """Yield until the call needs something, or is done."""
        looks = 0
        while self.state in WAITING:
            looks = self.pause(looks)
            yield
            self.look(looks)

    def look(self, looks: int | None = 0) -> None:
        """Go on with the call, after so many looks in vain.

        None if there is something else to do than to wait.
        """
        self._set(self._step(0 if looks is None or looks >= _LONG_LOOKS else _GOES_ON))

    def pause(self, looks: int, more: int = 1) -> int:
        """Let others have the core after ``more`` looks in vain; return how many in all."""
        if self.state == MOVED:
            return 0
        pause(self._comm, looks + more)
        return looks + more

    def meeting(self) -> Steps[None]:
        """Yield until all ranks of the node have come.

        Each then sees all earlier writes of the others.
        """
        self.state = self._calls["meet"](0, 0)
        yield from self.go_on()

    def tell(self, words: Sequence[int]) -> None:
        """Tell the others whole numbers, which they read after the next meeting."""
        to = self._library.nc_tell(self._address)
        for index, word in enumerate(words):
            to[index] = word

    def told(self, count: int) -> list[list[int]]:
        """Return the first ``count`` whole numbers that each rank told before the last meeting."""
        return [self._library.nc_told(self._address, rank)[:count] for rank in range(self.size)]

    def ping(self, other: int, limit_seconds: float = _PING_SECONDS) -> int:
        """Return the latency between this rank and ``other``, in nanoseconds one way.

        All ranks of the node call it, in pairs, equally often. It is 0 if ``other`` does not answer in time, as ranks
        that share a processor core do not.
        """
        if not 0 <= other < self.size:
            raise ValueError(f"ping of rank {other}; expected a rank from 0 to {self.size - 1} of this node")
        limit = int(limit_seconds * 1e9)
        nanoseconds: int = self._library.nc_ping(self._address, other, _PING_BATCHES, limit)
        return nanoseconds

    def allow_push(self, may_write: bool, near: int, far: int, mapped: int) -> None:
        """Allow all-reduces to write results directly into the results of other ranks.

        Args:
            may_write: Whether all ranks of the node may write into each other's private memory.
            near: Threshold in bytes for cores that share a cache.
            far: Threshold for other cores.
            mapped: Threshold for arrays in memory that all ranks map.
        """
        self._library.nc_allow_push(self._address, may_write, ctypes.byref(PushSizes(near, far, mapped)))

    def abandon(self, seconds: float) -> list[int]:
        """Stop other ranks from writing into the results of this rank after a failed call.

        Waits up to ``seconds`` for running writes. Returns the ranks that are still inside a write.
        """
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
        """Begin an all-reduce of contiguous arrays.

        The state is OVERLAP, and nothing has begun, where results would overwrite inputs that are still to be read.

        Args:
            identity: The same on all ranks.
            op: The operation.
            dtype: Of the arrays.
            inputs: The arrays of each replica of this rank, at most ``MOST_INPUTS`` in all; ranks and replicas are
                combined in their order.
            outs: Those for the result; None to learn after the meeting whether it may be shared, see ``targets``.
            divisor: By which the result is divided, if any.
            per_slice: Elements that travel together; 0 for what the core thinks best.
            held: Bits of the shared results that this rank still holds.
            is_wanted: Whether this rank wants the result.
            is_watched: Whether the state becomes MET after the meeting, and CHUNK after each step of a chunk.
            over_nodes: Whether it is with the ranks of all nodes, of at most ``SMALL_BETWEEN_NODES``; else the state
                becomes SLICE where other nodes are needed.
        """
        flags = _SHARE * (outs is None) | _UNWANTED * (not is_wanted)
        flags |= (_STOP | _WATCH) * is_watched | _OVER_NODES * over_nodes
        unit = _ALIGNMENT // dtype.itemsize or 1
        if _code_of(dtype) == _BFLOAT16:
            inputs = [[_lending(array) for array in arrays] for arrays in inputs]
            outs = outs and [_lending(array) for array in outs]
        self._set(self._begin(
            identity, _ALL_REDUCE, _OPS[op], _code_of(dtype), divisor or 0, flags, len(inputs), unit, per_slice, held,
            inputs[0] if len(inputs) == 1 else list(chain.from_iterable(zip(*inputs, strict=True))),
            outs, None, _BEGINS,
        ))  # fmt: skip

    def reduce_scatter(
        self, identity: int, op: ReduceOp, array: Array, borders: list[int], out: Array, divisor: int | None
    ) -> None:
        """Begin a reduction of which each rank keeps the elements between two borders."""
        given, kept = (_lending(array), _lending(out))
        self._set(self._begin(
            identity, _REDUCE_SCATTER, _OPS[op], _code_of(array.dtype), divisor or 0, 0, 1, 1, 0, 0, [given], [kept],
            borders, _BEGINS,
        ))  # fmt: skip

    def gather(self, identity: int, given: Array, note: int) -> None:
        """Begin to gather the bytes that each rank gives.

        The state becomes MET when all ``notes`` are there.
        """
        self._set(self._begin(identity, _ALL_GATHER, 0, _BYTE, 0, _STOP, 1, 1, 0, note, [given], None, None, _BEGINS))

    def deal(self, identity: int, given: Array, borders: list[int], note: int) -> None:
        """Begin to give each rank the bytes between two borders.

        The state becomes MET when all ``lengths`` and ``notes`` are there.
        """
        self._set(
            self._begin(identity, _ALL_TO_ALL, 0, _BYTE, 0, _STOP, 1, 1, 0, note, [given], None, borders, _BEGINS)
        )

    def lengths(self) -> list[int]:
        """Return how many bytes each rank gives to this one."""
        lengths: list[int] = self._calls["lengths"]()
        return lengths

    def notes(self) -> list[int]:
        """Return the number that each rank gave with its call."""
        notes: list[int] = self._calls["notes"]()
        return notes

    def shares(self) -> bool:
        """Return whether all ranks take a result that they share."""
        return bool(self._library.nc_shares(self._address))

    def targets(self, outs: list[Array] | None, shared: Array | None = None) -> None:
        """Say where the result goes, and go on with the call.

        Into arrays of this rank, or one that all share.
        """
        self._calls["targets"](outs, 0 if shared is None else address_of(shared))
        self.look()

    def slice(self) -> Slice:
        """Return the slice that is to go to the other nodes."""
        return Slice(*self._calls["slice"]())

    def crossed(self, chunk: int) -> None:
        """Take note that the slice of a chunk has come from the other nodes.

        In the order of chunks.
        """
        self._calls["crossed"](chunk)

    def event(self) -> tuple[str, int, int]:
        """Return name, number of the chunk, and nanoseconds of the step that was watched."""
        event = ChunkEvent()
        self._library.nc_get_event(self._address, ctypes.byref(event))
        return _EVENTS[event.what], event.chunk, event.nanoseconds

    # The fast path ----------------------------------------------------------------------------------------------

    def open_fast_calls(self, take: Callable[..., Array], resume: Resume) -> FastCalls:
        """Return the functions of the fast path. ``take`` returns memory for a shape and dtype."""
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
        text: str,
    ) -> int | None:
        """Cache the signature of a call. Return its number, or None if the fast path cannot run it.

        Args:
            name: Function of ``FastCalls``.
            array: The input.
            identity: Id of the call's description.
            op, divisor: Of a reduction.
            root: Root of a broadcast, or the kind of structure of an all-reduce.
            text: Description, for the flight record.
        """
        code = 0 if op is None else _OPS[op] + _IS_MEAN * (op is ReduceOp.MEAN)
        data = text.encode()[:_MOST_TEXT]
        number: int | None = self._calls["cache"](_KINDS[name], code, array, root, divisor or 0, identity, data)
        return number

    def keep_flight(self, memory: object, serial: object, last: object, name: bytes, line: Callable[[], str]) -> None:
        """Record fast-path calls in the flight record.

        Args:
            memory: Of its file.
            serial: The serial number of its last entry, which this counts up.
            last: Number on the communicator, and serial number, of the last collective; the same.
            name: Of the communicator.
            line: Returns the line of the program.
        """
        self._calls["flight"](memory, serial, last, name, line)

    # Memory -----------------------------------------------------------------------------------------------------

    def use_slots(self, segments: list[Array], sizes: Sizes) -> None:
        """Take the slots of all ranks, each segment of ``sizes.nbytes``, into use."""
        slots, bases = SlotSizes(*sizes), [address_of(segment) for segment in segments]
        needed = self._library.nc_segment_bytes(ctypes.byref(slots))
        assert needed == sizes.nbytes, f"slots of {sizes.nbytes} bytes, but the core needs {needed}"
        self._library.nc_room(self._address, _pointers(bases), ctypes.byref(slots))

    def know(self, segments: list[Array]) -> None:
        """Read arrays in place that lie in memory which all ranks map.

        One segment of each rank, or one for all.
        """
        bases = [address_of(segments[rank % len(segments)]) for rank in range(self.size)]
        self._library.nc_segment(self._address, _pointers(bases), segments[0].size)

    def close(self) -> None:
        """Unmap the control memory. No call may follow."""
        # But for the cells, which stay as long as this object does.
        self._calls, self._address = {"step": self._step}, 0
        self._memory = self._memory[:0].copy()


def _pointers(addresses: list[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _lending(array: Array) -> Array:
    """Return an array that lends its memory, as those of bfloat16 do not."""
    return array.view(np.uint16) if _code_of(array.dtype) == _BFLOAT16 else array


@lru_cache(maxsize=64)
def _code_of(dtype: DType) -> int:
    return _BFLOAT16 if dtype.name == "bfloat16" else _DTYPES[dtype.kind, dtype.itemsize]
