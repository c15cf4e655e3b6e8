"""Training with PyTorch's own parts over mpidist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mpidist

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")
nn = torch.nn

pytestmark = [
    pytest.mark.torch,
    pytest.mark.powers,
    pytest.mark.nodes,
    # torch warns of its own deprecated parts.
    pytest.mark.filterwarnings("default"),
]

STEPS = 20


def network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 1))


def batch(rank: int, step: int) -> Any:
    return torch.randn(8, 10, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(model: Any, rank: int, optimizer: Any = None) -> Any:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        (model(batch(rank, step)) - 1).pow(2).mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def trained_alone(size: int) -> Any:
    """The parameters after training on the batches of all ranks in one process."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        whole = torch.cat([batch(rank, step) for rank in range(size)])
        (model(whole) - 1).pow(2).mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("as_view", [True, False], ids=["views", "copies"])
@pytest.mark.parametrize("megabytes", [0.01, 25])
def test_ddp_is_training_on_the_batches_of_all(dist: Any, as_view: bool, megabytes: float) -> None:
    model = nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=megabytes, gradient_as_bucket_view=as_view)
    found = train(model, dist.get_rank())
    for mine, expected in zip(found, trained_alone(dist.get_world_size()), strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


def test_ddp_gives_the_weights_of_gloo(dist: Any) -> None:
    gloo = dist.new_group(backend="gloo")
    found = [
        train(nn.parallel.DistributedDataParallel(network(), process_group=group), dist.get_rank())
        for group in (None, gloo)
    ]
    dist.destroy_process_group(gloo)
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)


def test_deterministic_sums_do_not_depend_on_buckets(dist: Any) -> None:
    import mpidist

    options = mpidist.experimental.CommunicationOptions(deterministic=True)
    group = dist.new_group(pg_options=options)
    found = []
    for megabytes in (0.001, 0.01, 25):
        model = nn.parallel.DistributedDataParallel(network(), process_group=group, bucket_cap_mb=megabytes)
        found.append(train(model, dist.get_rank()))
    dist.destroy_process_group(group)
    for others in found[1:]:
        assert all(torch.equal(mine, other) for mine, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook"])
def test_ddp_with_a_hook(dist: Any, name: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = nn.parallel.DistributedDataParallel(network())
    model.register_comm_hook(None, getattr(default_hooks, name))
    exactness = {"allreduce_hook": 1e-5, "fp16_compress_hook": 0.01}[name]
    found = train(model, dist.get_rank())
    for mine, expected in zip(found, trained_alone(dist.get_world_size()), strict=True):
        torch.testing.assert_close(mine, expected, atol=exactness, rtol=exactness)


def test_ddp_with_power_sgd(dist: Any) -> None:
    """Its hook starts collectives where a future completes, in an order that is the ranks' with one bucket alone."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=25)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    found = train(model, dist.get_rank())
    total = torch.stack([parameter.sum() for parameter in found])
    of_all = [torch.empty_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, total)
    assert all(torch.equal(total, other) for other in of_all)
    assert (model(batch(0, 0)) - 1).abs().mean() < (network()(batch(0, 0)) - 1).abs().mean()


def test_fsdp_of_the_first_kind(dist: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy([nn.Linear])
    model = FullyShardedDataParallel(network(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    train(model, dist.get_rank())
    with FullyShardedDataParallel.summon_full_params(model):
        for mine, expected in zip(model.parameters(), trained_alone(dist.get_world_size()), strict=True):
            torch.testing.assert_close(mine.detach(), expected, atol=1e-5, rtol=1e-5)


def test_join_with_uneven_inputs(dist: Any) -> None:
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with model.join():
        for step in range(3 + rank):
            optimizer.zero_grad()
            model(batch(rank, step)).pow(2).mean().backward()
            optimizer.step()
    total = torch.stack([parameter.detach().sum() for parameter in model.parameters()])
    of_all = [torch.empty_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, total)
    assert all(torch.equal(total, other) for other in of_all)


def test_zero_redundancy_optimizer(dist: Any) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
    found = train(model, dist.get_rank(), optimizer)
    for mine, expected in zip(found, trained_alone(dist.get_world_size()), strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


def fully_sharded(dist: Any, size: int | None = None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size or dist.get_world_size(),))
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_fsdp2_is_training_on_the_batches_of_all(dist: Any) -> None:
    found = train(fully_sharded(dist), dist.get_rank())
    for mine, expected in zip(found, trained_alone(dist.get_world_size()), strict=True):
        torch.testing.assert_close(mine.full_tensor(), expected, atol=1e-5, rtol=1e-5)


def test_a_distributed_checkpoint(dist: Any, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    folder: list[Any] = [str(tmp_path)]
    dist.broadcast_object_list(folder, 0)
    model = fully_sharded(dist)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    before = train(model, dist.get_rank(), optimizer)
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder[0])
    other = fully_sharded(dist)
    optimizer = torch.optim.Adam(other.parameters(), 0.01)
    weights, state = get_state_dict(other, optimizer)
    found = {"model": weights, "optimizer": state}
    checkpoint.load(found, checkpoint_id=folder[0])
    set_state_dict(other, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    for mine, expected in zip(other.parameters(), before, strict=True):
        assert torch.equal(mine.detach().to_local(), expected.to_local())
    dist.barrier()


def test_dtensor(dist: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(24.0 * size).reshape(6 * size, 4)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(rows.redistribute(mesh, [Replicate()]).to_local(), whole)
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.full_tensor(), whole)
    torch.testing.assert_close((rows.t() @ rows).full_tensor(), whole.t() @ whole)


def test_tensor_parallel_layers(dist: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = network()(batch(0, 0))
    model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.testing.assert_close(model(batch(0, 0)), expected)


@pytest.mark.min_ranks(4)
def test_a_mesh_of_two_dimensions(dist: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    found = train(fully_shard(network(), mesh=mesh), dist.get_rank())
    for mine, expected in zip(found, trained_alone(dist.get_world_size()), strict=True):
        torch.testing.assert_close(mine.full_tensor(), expected, atol=1e-5, rtol=1e-5)
    for group in mesh.get_all_groups():
        dist.destroy_process_group(group)


@pytest.mark.min_ranks(2)
def test_a_pipeline(dist: Any) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Linear(10, 10) for _ in range(size)]
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2)
    given = batch(0, 0)
    out = schedule.step(given) if rank == 0 else schedule.step()
    if rank == size - 1:
        torch.testing.assert_close(out, nn.Sequential(*layers)(given))
    dist.barrier()


def test_ddp_beside_a_strategy_is_not_checked(dist: Any) -> None:
    with mpidist.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        ddp = nn.parallel.DistributedDataParallel(network())
        optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
        ddp(torch.ones(2, 10)).sum().backward()
        optimizer.step()
