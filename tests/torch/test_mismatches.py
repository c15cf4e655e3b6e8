"""Ranks that call different things in torch.distributed: one error on all, with both lines, and the group goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mpidist.errors import MismatchError

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")
dist = torch.distributed

pytestmark = [
    pytest.mark.torch,
    pytest.mark.powers,
    pytest.mark.nodes,
    pytest.mark.min_ranks(2),
    # torch warns of its own deprecated parts.
    pytest.mark.filterwarnings("default"),
]

Call = Callable[[], Any]


def ones(*shape: int, dtype: Any = None) -> Any:
    return torch.ones(*shape, dtype=dtype)


def each(*shape: int, dtype: Any = None) -> Any:
    """A tensor for each rank."""
    return [torch.ones(*shape, dtype=dtype) for _ in range(dist.get_world_size())]


def rows(*more: int, dtype: Any = None) -> Any:
    """A tensor of as many rows as there are ranks."""
    return torch.ones(dist.get_world_size(), *more, dtype=dtype)


def at(root: int, tensors: Any) -> Any:
    """The tensors on one rank, None on the others."""
    return tensors if dist.get_rank() == root else None


# The call of rank 0, and that of all others.
KINDS: dict[str, tuple[Call, Call]] = {
    "all_reduce: shape": (
        lambda: dist.all_reduce(ones(3)),
        lambda: dist.all_reduce(ones(4)),
    ),
    "all_reduce: dtype": (
        lambda: dist.all_reduce(ones(3)),
        lambda: dist.all_reduce(ones(3, dtype=torch.float64)),
    ),
    "all_reduce: operation": (
        lambda: dist.all_reduce(ones(3), dist.ReduceOp.SUM),
        lambda: dist.all_reduce(ones(3), dist.ReduceOp.MAX),
    ),
    "all_reduce: started": (
        lambda: dist.all_reduce(ones(3), async_op=True).wait(),
        lambda: dist.all_reduce(ones(4), async_op=True).wait(),
    ),
    "all_reduce: number of tensors": (
        lambda: dist.all_reduce_coalesced([ones(3), ones(2)]),
        lambda: dist.all_reduce_coalesced([ones(3)]),
    ),
    "broadcast: root": (
        lambda: dist.broadcast(ones(3), 0),
        lambda: dist.broadcast(ones(3), 1),
    ),
    "broadcast: shape": (
        lambda: dist.broadcast(ones(3, 1), 0),
        lambda: dist.broadcast(ones(1, 3), 0),
    ),
    "broadcast: dtype": (
        lambda: dist.broadcast(ones(3), 0),
        lambda: dist.broadcast(ones(3, dtype=torch.int32), 0),
    ),
    "reduce: root": (
        lambda: dist.reduce(ones(3), 0),
        lambda: dist.reduce(ones(3), 1),
    ),
    "reduce: operation": (
        lambda: dist.reduce(ones(3), 0, dist.ReduceOp.MIN),
        lambda: dist.reduce(ones(3), 0, dist.ReduceOp.PRODUCT),
    ),
    "all_gather: dtype": (
        lambda: dist.all_gather(each(3), ones(3)),
        lambda: dist.all_gather(each(3, dtype=torch.int64), ones(3, dtype=torch.int64)),
    ),
    "all_gather: shape": (
        lambda: dist.all_gather(each(2, 3), ones(2, 3)),
        lambda: dist.all_gather(each(2, 4), ones(2, 4)),
    ),
    "all_gather_into_tensor: shape": (
        lambda: dist.all_gather_into_tensor(rows(3), ones(3)),
        lambda: dist.all_gather_into_tensor(rows(4), ones(4)),
    ),
    "reduce_scatter: operation": (
        lambda: dist.reduce_scatter(ones(3), each(3), dist.ReduceOp.SUM),
        lambda: dist.reduce_scatter(ones(3), each(3), dist.ReduceOp.AVG),
    ),
    "reduce_scatter: shape": (
        lambda: dist.reduce_scatter(ones(3), each(3)),
        lambda: dist.reduce_scatter(ones(2), each(2)),
    ),
    "reduce_scatter_tensor: dtype": (
        lambda: dist.reduce_scatter_tensor(ones(1, 3), rows(3)),
        lambda: dist.reduce_scatter_tensor(ones(1, 3, dtype=torch.float64), rows(3, dtype=torch.float64)),
    ),
    "gather: root": (
        lambda: dist.gather(ones(3), at(0, each(3)), 0),
        lambda: dist.gather(ones(3), at(1, each(3)), 1),
    ),
    "gather: dtype": (
        lambda: dist.gather(ones(3), at(0, each(3)), 0),
        lambda: dist.gather(ones(3, dtype=torch.bool), at(0, each(3)), 0),
    ),
    "scatter: root": (
        lambda: dist.scatter(ones(3), at(0, each(3)), 0),
        lambda: dist.scatter(ones(3), at(1, each(3)), 1),
    ),
    "scatter: shape": (
        lambda: dist.scatter(ones(3), at(0, each(3)), 0),
        lambda: dist.scatter(ones(4), at(0, each(4)), 0),
    ),
    "all_to_all: dtype": (
        lambda: dist.all_to_all(each(3), each(3)),
        lambda: dist.all_to_all(each(3, dtype=torch.int8), each(3, dtype=torch.int8)),
    ),
    "all_to_all_single: columns": (
        lambda: dist.all_to_all_single(rows(3), rows(3)),
        lambda: dist.all_to_all_single(rows(4), rows(4)),
    ),
    "another collective": (
        lambda: dist.all_reduce(ones(3)),
        lambda: dist.broadcast(ones(3), 0),
    ),
    "a barrier": (
        lambda: dist.barrier(),
        lambda: dist.all_reduce(ones(3)),
    ),
    "order": (
        lambda: (dist.all_reduce(ones(3)), dist.all_reduce(ones(2))),
        lambda: (dist.all_reduce(ones(2)), dist.all_reduce(ones(3))),
    ),
    "objects": (
        lambda: dist.all_gather_object([None] * dist.get_world_size(), "all"),
        lambda: dist.broadcast_object_list(["one"], 0),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_get_the_lines_of_all(dist: Any, kind: str) -> None:
    calls = KINDS[kind]
    with pytest.raises(MismatchError) as raised:
        calls[dist.get_rank() > 0]()
    assert str(raised.value).count(f"at {__file__}:") == 2
    for call in calls:
        assert f"at {__file__}:{call.__code__.co_firstlineno} (<lambda>)" in str(raised.value)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [dist.get_world_size()] * 3


@pytest.mark.parametrize("is_part", [False, True])
def test_the_advice_is_for_torch(dist: Any, is_part: bool) -> None:
    group = dist.new_group(list(range(1 + dist.get_world_size() // 2))) if is_part else None
    if dist.get_rank(group) < 0:
        return
    with pytest.raises(MismatchError) as raised:
        if dist.get_rank() == 0:
            dist.all_reduce(ones(3), group=group)
        dist.barrier(group)
    assert "with Join([model]):" in str(raised.value)
    assert "strategy" not in str(raised.value)
    if group is not None:
        dist.destroy_process_group(group)


def test_rows_for_which_there_is_no_room(dist: Any) -> None:
    size = dist.get_world_size()
    counts = [1] * (size - 1) + [2]
    with pytest.raises(MismatchError) as raised:
        dist.all_to_all_single(torch.empty(size), torch.ones(size + 1), [1] * size, counts)
    assert f"rank 0 gives rank {size - 1} 2 rows" in str(raised.value)
    assert f"rank {size - 1} expects 1 from it" in str(raised.value)
    dist.barrier()


@pytest.mark.min_ranks(2)
def test_split_sizes_of_the_right_sum(dist: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    ends = [3, 1] if rank == 0 else [2, 2]
    with pytest.raises(MismatchError) as raised:
        dist.all_to_all_single(torch.empty(2 * size), torch.ones(2 * size), [*ends, *[2] * (size - 2)], [2] * size)
    for line in ("rank 0 expects 3 from it", "rank 1 gives rank 0 2 rows", "rank 0 expects 1 from it"):
        assert f"{line}\n      at {__file__}:" in str(raised.value)
    with pytest.raises(MismatchError, match="rank 0 expects 3 from it"):
        dist.all_to_all([torch.empty(3 if rank == other == 0 else 2) for other in range(size)], [torch.ones(2)] * size)
    dist.barrier()


def test_a_call_more(dist: Any) -> None:
    """Rank 0 is still in its loop when the others are done with theirs."""
    with pytest.raises(MismatchError) as raised:
        for _ in range(3 if dist.get_rank() == 0 else 2):
            dist.all_reduce(torch.ones(3))
        dist.barrier()
    assert "barrier" in str(raised.value)
    assert "all_reduce SUM of float32(3,)" in str(raised.value)
    assert "with Join([model]):" in str(raised.value)
    assert "should_checkpoint" not in str(raised.value)
    # Rank 0 has not come to its barrier, nor have the others past it.
    dist.barrier()
