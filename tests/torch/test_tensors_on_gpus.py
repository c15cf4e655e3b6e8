"""Tensors on GPUs, on stand-ins for PyTorch's CUDA, CuPy and NCCL whose streams are threads that are late."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import mpidist
from mpidist.arrays.streams import find_cupy
from mpidist.core.errors import DeviceError
from mpidist.core.settings import RANKS_PER_NODE
from mpidist.topology import world_topology

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")

from tests.support import torch_on_gpu  # noqa: E402
from tests.support.torch_on_gpu import OnGpu, Stream, current_stream, on_gpu, stream  # noqa: E402

LATE = {"devices": 6, "jitter": 0.001}
pytestmark = [
    pytest.mark.torch,
    pytest.mark.counts,
    pytest.mark.nodes,
    pytest.mark.filterwarnings("default"),
    pytest.mark.parametrize("fake_gpus", [LATE, LATE | {"nccl": False}], ids=["nccl", "staged"], indirect=True),
]
# Large enough for NCCL, and no multiple of anything.
COUNT = 70_001
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16),
    *(torch.int32, torch.int64, torch.complex64),
]
IS_BACKEND = hasattr(torch._C._distributed_c10d.Backend, "supports_reconfigure")


@pytest.fixture
def group(dist: Any, fake_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A group of all ranks, each with a GPU of its own."""
    device = world_topology().rank
    torch_on_gpu.install(monkeypatch, device)
    with fake_gpus.cuda.Device(device):
        made = dist.new_group()
        yield made
        dist.destroy_process_group(made)


@pytest.fixture
def methods(dist: Any, group: Any) -> Any:
    """The methods that PyTorch calls: its own works for a backend of Python let Python's futures through as C++'s."""
    return group._get_backend(torch.device("cpu")) if IS_BACKEND else group


def late(rank: int, shape: tuple[int, ...] = (COUNT,), dtype: Any = torch.float32) -> Any:
    """Return a tensor that is filled once the current stream has come to it."""
    return on_gpu(torch.full(shape, rank + 1).to(dtype))


def total(size: int) -> int:
    return size * (size + 1) // 2


@contextmanager
def held(chosen: Stream) -> Iterator[None]:
    """Keep a stream from doing what it is given in the block."""
    gate = threading.Event()
    chosen.worker.enqueue(lambda: gate.wait(30) and None)
    try:
        yield
    finally:
        gate.set()


def delayed(chosen: Stream) -> threading.Event:
    """Keep a stream from doing what it is given for a while, and return what tells the end of that."""
    opened = threading.Event()
    chosen.worker.enqueue(lambda: opened.wait(30) and None)
    threading.Timer(0.2, opened.set).start()
    return opened


def is_done_soon(chosen: Stream) -> bool:
    """Return whether a stream has done what it was given."""
    happened = threading.Event()
    chosen.worker.enqueue(happened.set)
    return happened.wait(10)


def finished(work: Any) -> None:
    if work is not None:
        assert work.wait()


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True], ids=["now", "async"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_in_place(dist: Any, group: Any, dtype: Any, is_async: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = late(rank, (300, 7), dtype)
    address = tensor.data_ptr()
    finished(dist.all_reduce(tensor, group=group, async_op=is_async))
    assert tensor.data_ptr() == address
    assert torch.equal(tensor.cpu(), torch.full((300, 7), total(size)).to(dtype))


@pytest.mark.parametrize("is_async", [False, True], ids=["now", "async"])
def test_every_collective(dist: Any, group: Any, methods: Any, is_async: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    how = {"group": group, "async_op": is_async}
    others = range(size)
    for shape in ((COUNT,), (3, 2)):
        tensor = late(rank, shape)
        finished(dist.broadcast(tensor, size - 1, **how))
        assert (tensor.cpu() == size).all()
        tensor = late(rank, shape)
        finished(dist.reduce(tensor, 0, **how))
        assert rank or (tensor.cpu() == total(size)).all()
        parts = [late(-1, shape) for _ in others]
        finished(dist.all_gather(parts, late(rank, shape), **how))
        assert [part.cpu().unique().tolist() for part in parts] == [[other + 1] for other in others]
        outs = [parts] if rank == 0 else []
        finished(methods.gather(outs, [late(rank, shape)], started("GatherOptions", is_async)))
        assert [part.cpu().unique().tolist() for part in parts] == [[other + 1] for other in others]
        whole = late(-1, (size * shape[0], *shape[1:]))
        finished(dist.all_gather_into_tensor(whole, late(rank, shape), **how))
        assert whole.cpu()[:: shape[0]].reshape(size, -1)[:, 0].tolist() == [other + 1 for other in others]
        tensor = late(-1, shape)
        finished(dist.scatter(tensor, [late(other, shape) for other in others] if rank == 0 else None, 0, **how))
        assert (tensor.cpu() == rank + 1).all()
        finished(dist.reduce_scatter(tensor, [late(rank + other, shape) for other in others], **how))
        assert (tensor.cpu() == total(size) + size * rank).all()
        finished(dist.reduce_scatter_tensor(tensor, late(rank, whole.shape), **how))
        assert (tensor.cpu() == total(size)).all()
        finished(dist.all_to_all(parts, [late(rank * size + other, shape) for other in others], **how))
        assert [part.cpu().unique().tolist() for part in parts] == [[other * size + rank + 1] for other in others]
        finished(dist.all_to_all_single(whole, late(rank, whole.shape), **how))
        assert whole.cpu()[:: shape[0]].reshape(size, -1)[:, 0].tolist() == [other + 1 for other in others]


@pytest.mark.parametrize("is_async", [False, True], ids=["now", "async"])
def test_tensors_with_gaps_and_of_unequal_sizes(dist: Any, group: Any, methods: Any, is_async: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    how = {"group": group, "async_op": is_async}
    whole = late(-1, (400, 600))
    part = whole.t()[::2]
    part.fill_(rank + 1)
    finished(dist.all_reduce(part, **how))
    assert (part.cpu() == total(size)).all()
    assert whole.cpu().sum() == part.cpu().sum()
    tensor = late(rank, (3,), torch.complex64).conj()
    finished(methods.allreduce([tensor], started(is_async=is_async)))
    assert tensor.cpu().tolist() == [total(size)] * 3
    parts = [late(-1, (other + 1, 2)) for other in range(size)]
    finished(dist.all_gather(parts, late(rank, (rank + 1, 2)), **how))
    assert [other.cpu().unique().tolist() for other in parts] == [[other + 1] for other in range(size)]
    kept = late(-1, (rank + 1,))
    finished(dist.reduce_scatter(kept, [late(rank, (other + 1,)) for other in range(size)], **how))
    assert kept.cpu().tolist() == [total(size)] * (rank + 1)


@pytest.mark.parametrize("is_async", [False, True], ids=["now", "async"])
def test_bools_bits_means_and_bytes_of_other_dtypes(dist: Any, group: Any, is_async: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    how = {"group": group, "async_op": is_async}
    tensor = on_gpu(torch.tensor([rank == 0, True, False]))
    finished(dist.all_reduce(tensor, **how))
    assert tensor.cpu().tolist() == [True, True, False]
    tensor = on_gpu(torch.tensor([1 << rank, 0]))
    finished(dist.all_reduce(tensor, dist.ReduceOp.BOR, **how))
    assert tensor.cpu().tolist() == [(1 << size) - 1, 0]
    tensor = on_gpu(torch.tensor([rank, 7]))
    finished(dist.all_reduce(tensor, dist.ReduceOp.AVG, **how))
    assert tensor.cpu().tolist() == [sum(range(size)) // size, 7]
    tensor = late(rank, (5,), torch.float8_e4m3fn)
    finished(dist.broadcast(tensor, size - 1, **how))
    assert tensor.cpu().float().tolist() == [size] * 5


def test_a_communicator_takes_them_and_gives_back_their_kind(dist: Any, group: Any) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        with mpidist.Communicator() as comm:
            tensor = on_gpu(torch.arange(5).to(dtype))
            result = comm.all_reduce("SUM", tensor)
            assert (type(result), result.dtype) == (OnGpu, dtype)
            assert result.cpu().tolist() == [comm.size * number for number in range(5)]


def test_messages(dist: Any, group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    sent = dist.isend(late(rank), after, group=group)
    got = late(-1)
    dist.irecv(got, before, group=group).wait()
    sent.wait()
    assert (got.cpu() == before + 1).all()


def test_a_sparse_tensor_is_refused(dist: Any, group: Any, methods: Any) -> None:
    class Sparse(OnGpu):
        is_sparse = True

    with pytest.raises(TypeError, match=r"a sparse tensor is on cuda:\d; expected .*: tensor.cpu\(\) or tensor.to_de"):
        methods.allreduce([late(0).as_subclass(Sparse)])


# Order ----------------------------------------------------------------------------------------------------------------


def test_a_call_follows_the_stream_that_is_current_and_no_other(dist: Any, group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(late(rank), group=group)  # NCCL starts, which waits for the whole GPU
    with held(current_stream()), stream(Stream()):
        tensor = late(rank)
        dist.all_reduce(tensor, group=group)
        assert (tensor.cpu() == total(size)).all()
        parts = [late(-1) for _ in range(size)]
        dist.all_gather(parts, late(rank), group=group)
        assert [part.cpu().unique().tolist() for part in parts] == [[other + 1] for other in range(size)]


def test_a_call_waits_for_what_its_stream_has_still_to_do(dist: Any, methods: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    delayed(current_stream())
    tensor = late(rank)
    work = methods.allreduce([tensor], started())
    work.wait()
    assert (tensor.cpu() == total(size)).all()


def test_whoever_waits_has_the_stream_that_is_current_wait(dist: Any, methods: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(5):
        tensor = late(rank)
        work = methods.allreduce([tensor], started())
        with stream(Stream()):
            work.wait()
            assert (tensor.cpu() == total(size)).all()
        parts = [late(-1) for _ in range(size)]
        work = methods.allgather([parts], [late(rank)], started("AllgatherOptions"))
        with stream(Stream()):
            work.wait()
            assert [part.cpu().unique().tolist() for part in parts] == [[other + 1] for other in range(size)]


def test_a_result_goes_nowhere_that_its_stream_still_reads(dist: Any, methods: Any) -> None:
    """Only a message waits for nothing that lies on the GPU before it comes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = methods.send([late(rank, (5,))], (rank + 1) % size, 0)
    with stream(Stream()):
        check_a_message_into_a_tensor_that_is_read(methods, rank, size)
    sent.wait()


def check_a_message_into_a_tensor_that_is_read(methods: Any, rank: int, size: int) -> None:
    target = late(-1, (5,))
    with torch._C.DisableTorchFunctionSubclass():
        memory = target.as_subclass(torch.Tensor)
    assert is_done_soon(current_stream())
    read: list[Any] = []
    opened = delayed(current_stream())
    current_stream().worker.enqueue(lambda: read.extend(memory.tolist()))
    methods.recv([target], (rank - 1) % size, 0).wait()
    assert opened.is_set()
    assert target.cpu().tolist() == [(rank - 1) % size + 1] * 5
    assert read == [0] * 5


def test_the_program_computes_on_while_a_collective_is_on_its_way(dist: Any, methods: Any, request: Any) -> None:
    if "staged" in request.node.name or RANKS_PER_NODE.read() is not None:
        pytest.skip("through host memory, as between nodes, the host waits")
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = late(rank)
    methods.allreduce([tensor], started()).wait()  # NCCL starts
    for _ in range(3):
        tensor = late(rank)
        assert is_done_soon(current_stream())
        apart = Stream()
        with held(apart):
            with stream(apart) if rank == size - 1 else stream(current_stream()):
                work = methods.allreduce([tensor], started())
            until(lambda work=work: work.get_future().done())
            # The collective cannot have ended: the last rank's stream has not come to it.
            assert is_done_soon(current_stream())
            dist.barrier()
        work.wait()
        assert (tensor.cpu() == total(size)).all()


def test_futures(dist: Any, methods: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for options in (started(), started(is_async=False)):
        for wait_in in (current_stream(), Stream()):
            tensor = late(rank)
            work = methods.allreduce([tensor], options)
            doubled = work.get_future().then(lambda done: [done.value()[0] * 2])
            with stream(wait_in):
                assert (doubled.wait()[0].cpu() == 2 * total(size)).all()
            with stream(Stream()):
                (result,) = work.get_future().wait()
                assert (result.cpu() == total(size)).all()


def test_futures_of_messages(dist: Any, methods: Any) -> None:
    """The progress thread ends them, also those of a rank that is alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for number in range(5):
        target = late(-1)
        future = methods.recv([target], before, number).get_future()
        doubled = future.then(lambda done: [done.value()[0] * 2])
        sent = methods.send([late(rank)], after, number)
        until(future.done)
        with stream(Stream()):
            (result,) = future.wait()
            assert (result.cpu() == before + 1).all()
        with stream(Stream()):
            assert (doubled.wait()[0].cpu() == 2 * (before + 1)).all()
        sent.wait()


def test_nothing_is_written_to_memory_that_was_let_go(dist: Any, methods: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for number in range(12):
        future = methods.recv([late(-1)], (rank - 1) % size, number).get_future()
        methods.send([late(rank)], (rank + 1) % size, number).wait()
        until(future.done)
        del future
    torch_on_gpu.check()


def test_a_future_of_several_collectives(dist: Any, methods: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    outs = [late(-1) for _ in range(3)]
    work = methods.reduce_scatter_tensor_coalesced(
        outs, [late(rank, (size * COUNT,)) for _ in outs], started("ReduceScatterOptions")
    )
    doubled = work.get_future().then(lambda done: [part * 2 for part in done.value()])
    with stream(Stream()):
        assert all((part.cpu() == 2 * total(size)).all() for part in doubled.wait())
        assert all((part.cpu() == total(size)).all() for part in work.get_future().wait())


def test_memory_that_is_let_go_is_used_to_the_end(dist: Any, methods: Any) -> None:
    """What is left of a work that nobody waits for happens on a stream apart, with memory of the program's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(8):
        targets = [late(-1, (40, 60)).t() for _ in range(size)]
        tensor = late(rank, (60, 40))
        work = methods.allgather([targets], [tensor], started("AllgatherOptions"))
        future = work.get_future()
        del tensor, work
        until(future.done)
        got = [part.clone() for part in future.wait()]
        summed = late(rank, (40, 60)).t()
        future = methods.allreduce([summed], started()).get_future()
        until(future.done)
        assert (future.wait()[0].cpu() == total(size)).all()
        assert [part.cpu().unique().tolist() for part in got] == [[other + 1] for other in range(size)]


def test_the_current_streams_are_left_as_they_were(dist: Any, group: Any, fake_gpus: Any) -> None:
    mine = fake_gpus.cuda.Stream(non_blocking=True)
    with mine, stream(Stream()) as _:
        in_torch = current_stream()
        finished(dist.all_reduce(late(0), group=group, async_op=True))
        dist.all_reduce(late(0), group=group)
        assert fake_gpus.cuda.get_current_stream() == mine
        assert current_stream() == in_torch


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cuda", "package"), [("12.8", "cupy-cuda12x"), ("13.0", "cupy-cuda13x")])
def test_without_cupy_it_says_what_to_type(
    dist: Any, group: Any, monkeypatch: pytest.MonkeyPatch, cuda: str, package: str
) -> None:
    tensor, rank, size = late(0), dist.get_rank(), dist.get_world_size()
    with monkeypatch.context() as patches:
        patches.setattr(torch.version, "cuda", cuda)
        patches.setitem(sys.modules, "cupy", None)
        find_cupy.cache_clear()
        for call in (dist.all_reduce, lambda *_, **how: dist.all_to_all_single(tensor, tensor, **how)):
            with pytest.raises(DeviceError, match=f"a tensor is on cuda:{rank}, .* type: pip install {package} "):
                call(tensor, group=group)
    find_cupy.cache_clear()
    # Nothing was sent.
    plain = torch.ones(3)
    dist.all_reduce(plain, group=group)
    assert plain.tolist() == [size] * 3


def test_a_torch_for_another_kind_of_gpu_is_refused(dist: Any, group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match=r"this PyTorch is not for CUDA; .*: tensor.cpu\(\)"):
        dist.all_reduce(late(0), group=group)


def test_a_call_while_a_graph_is_recorded_is_an_error(dist: Any, group: Any, fake_gpus: Any) -> None:
    tensor, recording = late(0), Stream()
    with stream(recording):
        recording.raw.begin_capture()
        with pytest.raises(RuntimeError, match="records a CUDA graph"):
            dist.all_reduce(tensor, group=group)
        recording.raw.end_capture()


def test_the_backend_is_registered_for_gpus(dist: Any, fake_gpus: Any) -> None:
    assert dist.Backend.backend_capability["mpidist"] == ["cpu", "cuda"]
    # Whoever names no backend gets what torch has for a device.
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    assert dist.Backend.default_device_backend_map["cuda"] == "nccl"


def started(kind: str = "AllreduceOptions", is_async: bool = True) -> Any:
    options = getattr(torch._C._distributed_c10d, kind)()
    options.asyncOp = is_async
    return options


def until(is_true: Callable[[], bool]) -> None:
    waited = threading.Event()
    while not is_true():
        assert not waited.wait(0.001)
