"""The collectives of torch.distributed over mpidist."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import mpidist

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.counts,
    pytest.mark.powers,
    pytest.mark.nodes,
    # torch warns of its own deprecated parts.
    pytest.mark.filterwarnings("default"),
]

# torch 2.14 takes a backend in Python; before it was a whole ProcessGroup.
IS_BACKEND = hasattr(torch._C._distributed_c10d.Backend, "supports_reconfigure")
HOLDER = "torch's PyWorkHolder (PyProcessGroup.hpp) lets wait and get_future through, and nothing else"

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
]


def of_rank(rank: int, shape: tuple[int, ...] = (3, 2), dtype: Any = torch.float32) -> Any:
    return torch.full(shape, rank + 1).to(dtype)


@pytest.mark.parametrize("is_async", [False, True], ids=["now", "async"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_in_place(dist: Any, dtype: Any, is_async: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = of_rank(rank, dtype=dtype)
    work = dist.all_reduce(tensor, async_op=is_async)
    if is_async:
        assert work.wait()
        assert work.get_future().done()
    assert torch.equal(tensor, of_rank(sum(range(1, size + 1)) - 1, dtype=dtype))


@pytest.mark.skipif(IS_BACKEND, reason=f"of these {HOLDER}")
def test_a_work_says_whether_it_is_done(dist: Any) -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    while not work.is_completed():
        pass
    assert work.is_success()


@pytest.mark.parametrize(
    ("op", "expected"),
    [("SUM", True), ("MAX", True), ("BOR", True), ("PRODUCT", False), ("MIN", False), ("BAND", False)],
)
def test_bools(dist: Any, op: str, expected: bool) -> None:
    tensor = torch.tensor([dist.get_rank() == 0, True, False])
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
    first = expected if dist.get_world_size() > 1 else True
    assert tensor.tolist() == [first, True, False]


@pytest.mark.parametrize("op", ["BAND", "BOR", "BXOR"])
def test_bits(dist: Any, op: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.tensor([1 << rank, 6])
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
    of_all = [1 << each for each in range(size)]
    expected = {"BAND": of_all[0] if size == 1 else 0, "BOR": sum(of_all), "BXOR": sum(of_all)}[op]
    assert tensor.tolist() == [expected, 6 if op != "BXOR" or size % 2 else 0]


def test_a_mean_of_integers_is_rounded_down(dist: Any) -> None:
    size = dist.get_world_size()
    tensor = torch.tensor([dist.get_rank(), 7])
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert tensor.tolist() == [sum(range(size)) // size, 7]


@pytest.mark.parametrize("is_async", [False, True], ids=["now", "async"])
def test_tensors_with_gaps(dist: Any, is_async: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(4, 6)
    part = whole.t()[::2]
    part.fill_(rank + 1)
    work = dist.all_reduce(part, async_op=is_async)
    if is_async:
        work.wait()
    assert torch.equal(part, torch.full((3, 4), sum(range(1, size + 1))))
    assert whole.sum() == part.sum()


def test_empty_tensors(dist: Any) -> None:
    tensor = torch.empty(0, 3)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    parts = [torch.empty(0, 3) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    assert all(part.shape == (0, 3) for part in parts)


def test_broadcast_and_reduce(dist: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = of_rank(rank)
    dist.broadcast(tensor, size - 1)
    assert torch.equal(tensor, of_rank(size - 1))
    tensor = of_rank(rank)
    dist.reduce(tensor, size - 1)
    if rank == size - 1:
        assert torch.equal(tensor, of_rank(sum(range(1, size + 1)) - 1))


@pytest.mark.parametrize("is_async", [False, True], ids=["now", "async"])
def test_all_gather(dist: Any, is_async: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [torch.empty(3, 2) for _ in range(size)]
    work = dist.all_gather(parts, of_rank(rank), async_op=is_async)
    whole = torch.empty(3 * size, 2)
    single = dist.all_gather_into_tensor(whole, of_rank(rank), async_op=is_async)
    if is_async:
        work.wait()
        single.wait()
    for other in range(size):
        assert torch.equal(parts[other], of_rank(other))
        assert torch.equal(whole[3 * other : 3 * other + 3], of_rank(other))


def test_all_gather_of_other_shapes(dist: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [torch.empty(other + 1, 2) for other in range(size)]
    dist.all_gather(parts, of_rank(rank, (rank + 1, 2)))
    assert all(torch.equal(part, of_rank(other, (other + 1, 2))) for other, part in enumerate(parts))


@pytest.mark.parametrize("is_even", [True, False], ids=["even", "uneven"])
def test_reduce_scatter(dist: Any, is_even: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [of_rank(rank, (2 if is_even else other + 1, 3)) for other in range(size)]
    output = torch.empty_like(parts[rank])
    dist.reduce_scatter(output, parts)
    assert torch.equal(output, of_rank(sum(range(1, size + 1)) - 1, tuple(output.shape)))


def test_a_mean_of_integers_in_parts(dist: Any) -> None:
    size = dist.get_world_size()
    output = torch.empty(2, dtype=torch.int64)
    dist.reduce_scatter(output, [torch.tensor([dist.get_rank(), 7])] * size, dist.ReduceOp.AVG)
    assert output.tolist() == [sum(range(size)) // size, 7]


def test_reduce_scatter_of_one_tensor(dist: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    output = torch.empty(2, 3)
    dist.reduce_scatter_tensor(output, torch.arange(6.0 * size).reshape(2 * size, 3), dist.ReduceOp.AVG)
    assert torch.equal(output, torch.arange(6.0).reshape(2, 3) + 6 * rank)


def test_gather_and_scatter(dist: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    root = size - 1
    parts = [torch.empty(3, 2) for _ in range(size)] if rank == root else None
    dist.gather(of_rank(rank), parts, dst=root)
    if parts is not None:
        assert all(torch.equal(part, of_rank(other)) for other, part in enumerate(parts))
    output = torch.empty(3, 2)
    dist.scatter(output, parts, src=root)
    assert torch.equal(output, of_rank(rank))


def test_all_to_all(dist: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    given = [torch.full((rank + 1, other + 1), 10 * rank + other) for other in range(size)]
    taken = [torch.empty(other + 1, rank + 1, dtype=torch.int64) for other in range(size)]
    dist.all_to_all(taken, given)
    assert all((tensor == 10 * other + rank).all() for other, tensor in enumerate(taken))
    whole = torch.arange(size) + size * rank
    out = torch.empty_like(whole)
    dist.all_to_all_single(out, whole)
    assert out.tolist() == [size * other + rank for other in range(size)]
    counts = [other + 1 for other in range(size)]
    uneven = torch.cat([torch.full((other + 1, 2), 10 * rank + other) for other in range(size)])
    rows = torch.empty(size * (rank + 1), 2, dtype=torch.int64)
    dist.all_to_all_single(rows, uneven, [rank + 1] * size, counts)
    assert rows[:, 0].tolist() == [10 * other + rank for other in range(size) for _ in range(rank + 1)]


def test_all_to_all_of_parts_that_are_alike_on_one_rank_only(dist: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

    def length(source: int, target: int) -> int:
        return 3 if source == target == size - 1 else 2

    given = [torch.full((length(rank, other),), 10 * rank + other) for other in range(size)]
    taken = [torch.empty(length(other, rank), dtype=torch.int64) for other in range(size)]
    dist.all_to_all(taken, given)
    assert all((tensor == 10 * other + rank).all() for other, tensor in enumerate(taken))


def test_objects(dist: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "more": "x" * rank})
    assert [each["rank"] for each in found] == list(range(size))
    told: list[Any] = ["hello", rank] if rank == 0 else [None, None]
    dist.broadcast_object_list(told, 0)
    assert told == ["hello", 0]
    one: list[Any] = [None]
    dist.scatter_object_list(one, list(range(size)) if rank == 0 else None, 0)
    assert one == [rank]
    gathered: list[Any] | None = [None] * size if rank == size - 1 else None
    dist.gather_object({rank}, gathered, size - 1)
    assert gathered == (None if gathered is None else [{other} for other in range(size)])
    if rank == 0:
        dist.send_object_list(["told", size], size - 1) if size > 1 else None
    elif rank == size - 1:
        told = [None, None]
        dist.recv_object_list(told, 0)
        assert told == ["told", size]


def test_messages(dist: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        pytest.skip("a message needs two ranks")
    before, behind = (rank - 1) % size, (rank + 1) % size
    got = torch.empty(3, 2)
    ops = [dist.P2POp(dist.irecv, got, before), dist.P2POp(dist.isend, of_rank(rank), behind)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert torch.equal(got, of_rank(before))


def test_messages_of_any_rank(dist: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    got = torch.empty(3, 2)
    if rank > 0:
        dist.send(of_rank(rank), 0)
        return
    sources = set()
    for _ in range(size - 1):
        work = dist.irecv(got)
        work.wait()
        sources.add(int(got[0, 0]) - 1)
        if not IS_BACKEND:
            assert work._source_rank() in sources
    assert sources == set(range(1, size))


@pytest.mark.min_ranks(2)
@pytest.mark.skipif(IS_BACKEND, reason=f"dist.recv asks the work for its source rank, and of these {HOLDER}")
def test_recv_returns_the_rank_that_has_sent(dist: Any) -> None:
    got = torch.empty(3, 2)
    if dist.get_rank() == 1:
        dist.send(of_rank(1), 0)
    elif dist.get_rank() == 0:
        assert dist.recv(got) == 1


@pytest.mark.parametrize("is_async", [False, True], ids=["now", "async"])
def test_sparse_sum(dist: Any, is_async: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 2.0], (size + 2,))
    work = dist.all_reduce(tensor, async_op=is_async)
    if is_async:
        work.wait()
    assert tensor.to_dense().tolist() == [size, *[2.0] * size, 0.0]


def test_groups(dist: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for local in (False, True):
        halves = [[r for r in range(size) if r % 2 == odd] for odd in (0, 1)]
        mine = halves[rank % 2]
        asked = [mine] if local else [half for half in halves if half]
        groups = [dist.new_group(ranks, use_local_synchronization=local) for ranks in asked]
        group = groups[0] if local else groups[rank % 2]
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == sum(mine)
        dist.broadcast(tensor, mine[-1], group=group)
        dist.barrier(group)
        dist.destroy_process_group(group)


def test_split_groups(dist: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = [other for other in range(size) if other % 2 == rank % 2]
    group = dist.group.WORLD.split_group(mine, timeout=timedelta(seconds=50), group_name=f"parity {rank % 2}")
    assert (group.rank(), group.size(), group.group_name) == (mine.index(rank), len(mine), f"parity {rank % 2}")
    tensor = torch.tensor([rank])
    group.allreduce([tensor]).wait()
    assert tensor.item() == sum(mine)
    group.shutdown()


@pytest.mark.min_ranks(2)
def test_a_group_is_split_by_its_members(dist: Any) -> None:
    with pytest.raises((ValueError, RuntimeError), match="among them"):
        dist.group.WORLD.split_group([1 - min(dist.get_rank(), 1)])


def test_the_future_completes_by_itself(dist: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = of_rank(rank)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: 2 * done.value()[0]).wait()
    assert torch.equal(doubled, 2 * of_rank(sum(range(1, size + 1)) - 1))


def test_works_in_any_order(dist: Any) -> None:
    size = dist.get_world_size()
    tensors = [torch.full((1000,), float(number)) for number in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    assert all((tensor == number * size).all() for number, tensor in enumerate(tensors))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.float8_e5m2], ids=str)
def test_memory_can_still_be_given_back(dist: Any, dtype: Any) -> None:
    """FSDP takes and frees the memory of a tensor that lives on."""
    tensor = torch.ones(4).to(dtype)
    dist.broadcast(tensor, 0)
    dist.all_reduce(tensor)
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().size() == 0


def test_coalesced(dist: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [of_rank(rank), of_rank(rank, (5,))]
    dist.all_reduce_coalesced(tensors)
    assert all((tensor == sum(range(1, size + 1))).all() for tensor in tensors)


def test_several_tensors_are_gathered_by_rank(dist: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = [of_rank(rank), of_rank(rank, (5,))]
    lists = [[torch.empty(3, 2), torch.empty(5)] for _ in range(size)]
    dist.all_gather_coalesced(lists, mine)
    assert all(torch.equal(lists[other][1], of_rank(other, (5,))) for other in range(size))
    with pytest.raises(ValueError, match=r"output_tensor_lists\[rank\]\[i\]"):
        dist.all_gather_coalesced([[torch.empty(3, 2)] * size, [torch.empty(5)] * size], mine)
    dist.barrier()


@pytest.mark.parametrize("op", ["SUM", "AVG"])
def test_several_tensors_are_reduced_in_parts(dist: Any, op: str) -> None:
    size = dist.get_world_size()
    inputs = [torch.arange(2 * size), torch.ones(3 * size, dtype=torch.int64)]
    outputs = [torch.empty(2, dtype=torch.int64), torch.empty(3, dtype=torch.int64)]
    with dist._coalescing_manager():
        for output, given in zip(outputs, inputs, strict=True):
            dist.reduce_scatter_tensor(output, given, getattr(dist.ReduceOp, op))
    factor, first = size if op == "SUM" else 1, 2 * dist.get_rank()
    assert [output.tolist() for output in outputs] == [[factor * first, factor * (first + 1)], [factor] * 3]


def test_functional_collectives(dist: Any) -> None:
    import torch.distributed._functional_collectives as functional

    rank, size = dist.get_rank(), dist.get_world_size()
    total = functional.all_reduce(of_rank(rank), "sum", dist.group.WORLD)
    assert torch.equal(total + 0, of_rank(sum(range(1, size + 1)) - 1))
    rows = functional.all_gather_tensor(of_rank(rank), 0, dist.group.WORLD)
    assert rows.shape == (3 * size, 2)
    part = functional.reduce_scatter_tensor(torch.ones(size, 2), "sum", 0, dist.group.WORLD)
    assert torch.equal(part + 0, torch.full((1, 2), float(size)))
    dealt = functional.all_to_all_single(torch.arange(size) + size * rank, None, None, dist.group.WORLD)
    assert (dealt + 0).tolist() == [size * other + rank for other in range(size)]
    told = functional.broadcast(of_rank(rank), size - 1, dist.group.WORLD)
    assert torch.equal(told + 0, of_rank(size - 1))
    several = functional.all_reduce_coalesced([of_rank(rank), of_rank(rank, (5,))], "max", dist.group.WORLD)
    assert all((each == size).all() for each in several)
    whole = functional.all_gather_tensor_autograd(torch.ones(2, requires_grad=True), 0, dist.group.WORLD)
    assert whole.shape == (2 * size,)
    whole.sum().backward()


def test_events_of_the_profiler(dist: Any) -> None:
    with torch.autograd.profiler.profile() as profile:
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(3), async_op=True).wait()
        dist.broadcast(torch.ones(3), 0)
    names = [event.name for event in profile.function_events]
    assert names.count("mpidist:all_reduce") == 2
    assert names.count("mpidist:broadcast") == 1


def test_options_of_the_group(dist: Any) -> None:
    options = mpidist.experimental.CommunicationOptions(deterministic=True)
    group = dist.new_group(pg_options=options)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor[0] == dist.get_world_size()
    dist.destroy_process_group(group)
