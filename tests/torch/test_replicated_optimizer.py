"""Optimizers of adopted modules: sums over replicas, whatever happens between backward and step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.torch.replicas import alone, linear, opened, replica, same_on_all

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")
nn = torch.nn

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


@pytest.fixture(params=[1, 2], ids=["one each", "two each"])
def strategy(request: pytest.FixtureRequest) -> Iterator[Any]:
    devices = [f"cpu:{number}" for number in range(request.param)]
    with mpidist.MultiWorkerMirroredStrategy(devices=devices) as made:
        yield made


def test_gradients_are_summed(strategy: Any) -> None:
    model, optimizer = opened(strategy, linear)

    def step() -> Any:
        model(torch.full((1, 1), replica() + 1.0, dtype=torch.float64)).sum().backward()
        optimizer.step()
        return model.weight.item()

    count = strategy.num_replicas_in_sync
    assert same_on_all(strategy, step) == 1.0 - count * (count + 1) / 2


@pytest.mark.parametrize("calls_backward", [True, False])
def test_a_replica_without_rows_takes_part(strategy: Any, calls_backward: bool) -> None:
    model, optimizer = opened(strategy, linear)

    def step() -> Any:
        rows = torch.ones(0 if replica() else 1, 1, dtype=torch.float64)
        if len(rows) or calls_backward:
            model(rows).sum().backward()
        optimizer.step()
        return model.weight.item()

    assert same_on_all(strategy, step) == 0.0


def test_what_no_replica_uses_has_no_gradient(strategy: Any) -> None:
    model, optimizer = opened(strategy, lambda: nn.ModuleList([linear(), linear(), linear()]), lr=1.0, weight_decay=0.5)

    def step() -> Any:
        used = [model[0]] if replica() else [model[0], model[1]]
        sum(net(torch.ones(1, 1, dtype=torch.float64)) for net in used).sum().backward()
        optimizer.step()
        assert model[2].weight.grad is None
        return [net.weight.item() for net in model]

    count = strategy.num_replicas_in_sync
    np.testing.assert_array_equal(same_on_all(strategy, step), [1 - count - 0.5, 1 - 1 - 0.5, 1.0])


def test_gradients_are_accumulated(strategy: Any) -> None:
    model, optimizer = opened(strategy, linear)

    def step() -> Any:
        optimizer.zero_grad()
        with optimizer.no_sync():
            model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
            model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        optimizer.step()
        return model.weight.grad.item()

    for _ in range(2):
        assert same_on_all(strategy, step) == 3 * strategy.num_replicas_in_sync


@pytest.mark.parametrize("calls_backward", [True, False])
def test_gradients_may_be_dropped_by_the_model(strategy: Any, calls_backward: bool) -> None:
    model, optimizer = opened(strategy, linear)

    def step() -> Any:
        model.zero_grad()
        if calls_backward or replica() == 0:
            model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        optimizer.step()
        return model.weight.grad.item()

    for _ in range(3):
        assert same_on_all(strategy, step) == (strategy.num_replicas_in_sync if calls_backward else 1)


def test_gradients_may_be_set_to_zero(strategy: Any) -> None:
    model, optimizer = opened(strategy, linear)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        optimizer.step()
        return model.weight.grad.item()

    for _ in range(3):
        assert same_on_all(strategy, step) == strategy.num_replicas_in_sync


def test_sums_are_clipped(strategy: Any) -> None:
    model, optimizer = opened(strategy, linear)

    def step() -> Any:
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return [float(norm), model.weight.item()]

    np.testing.assert_allclose(same_on_all(strategy, step), [strategy.num_replicas_in_sync, 0.5], rtol=1e-5)


def test_batches_without_no_sync_are_named() -> None:
    with mpidist.MirroredStrategy(["cpu:0", "cpu:1"], communicator=alone()) as strategy:
        model, optimizer = opened(strategy, linear)

        def backward() -> None:
            model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()

        def twice() -> None:
            backward()
            backward()

        with pytest.raises(RuntimeError, match=r"inside `with optimizer.no_sync\(\):`"):
            strategy.run(twice)
        optimizer.zero_grad()
        strategy.run(lambda: (backward(), optimizer.step()))
        with pytest.raises(RuntimeError, match=r"call optimizer.zero_grad\(\) before"):
            strategy.run(backward)


def test_bfloat16_autocast(strategy: Any) -> None:
    model, optimizer = opened(strategy, lambda: nn.Linear(4, 4))

    def step() -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(torch.ones(2, 4))
            assert out.dtype == torch.bfloat16
            loss = out.float().square().sum()
        loss.backward()
        optimizer.step()
        return model.weight.detach().numpy()

    same_on_all(strategy, step)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64"])
def test_other_dtypes(strategy: Any, dtype: str) -> None:
    model, optimizer = opened(strategy, lambda: nn.Linear(2, 2).to(getattr(torch, dtype)))

    def step() -> Any:
        model(torch.ones(1, 2, dtype=getattr(torch, dtype))).abs().sum().backward()
        optimizer.step()
        return torch.view_as_real(model.weight.detach().to(torch.complex64)).numpy()

    same_on_all(strategy, step)


def test_learning_rates_by_a_scheduler(strategy: Any) -> None:
    model, optimizer = opened(strategy, linear)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0),
    ]

    def step() -> Any:
        optimizer.zero_grad()
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        optimizer.step()
        return model.weight.item()

    first = same_on_all(strategy, step)
    schedulers[0].step()
    second = same_on_all(strategy, step)
    count = strategy.num_replicas_in_sync
    assert (first, second) == (1.0 - count, 1.0 - 1.5 * count)


def test_groups_of_parameters(strategy: Any) -> None:
    with strategy.scope():
        model = mpidist.torch.adopt(lambda: nn.ModuleList([linear(), linear()]))
        groups = lambda net: [{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 2.0}]
        optimizer = mpidist.torch.Optimizer(model, lambda net: torch.optim.SGD(groups(net), lr=1.0))

    def step() -> Any:
        sum(net(torch.ones(1, 1, dtype=torch.float64)) for net in model).sum().backward()
        optimizer.step()
        return [net.weight.item() for net in model]

    count = strategy.num_replicas_in_sync
    np.testing.assert_array_equal(same_on_all(strategy, step), [1.0 - count, 1.0 - 2 * count])
    with pytest.raises(NotImplementedError, match="all groups from the start"):
        optimizer.add_param_group({"params": []})


def test_two_optimizers_of_one_module(strategy: Any) -> None:
    """As a generator and its critic, whose gradients the other's loss makes, too."""
    with strategy.scope():
        model = mpidist.torch.adopt(lambda: nn.ModuleList([linear(), linear()]))
        both = [
            mpidist.torch.Optimizer(model, lambda net, n=n: torch.optim.SGD(net[n].parameters(), 1.0)) for n in (0, 1)
        ]

    def step() -> Any:
        for optimizer in both:
            both[0].zero_grad()
            both[1].zero_grad()
            model[1](model[0](torch.ones(1, 1, dtype=torch.float64))).sum().backward()
            optimizer.step()
        return [net.weight.item() for net in model]

    count = strategy.num_replicas_in_sync
    first = 1.0 - count
    np.testing.assert_array_equal(same_on_all(strategy, step), [first, 1.0 - count * first])


def gan_step(models: list[Any], optimizers: list[Any]) -> Any:
    (generator, discriminator), (of_generator, of_discriminator) = models, optimizers
    ones = torch.ones(1, 1, dtype=torch.float64)
    fake = generator(ones)
    of_discriminator.zero_grad()
    (discriminator(fake.detach()) - discriminator(ones)).sum().backward()
    of_discriminator.step()
    of_generator.zero_grad()
    discriminator(fake).sum().backward()  # adds to the discriminator's gradients, which its next zero_grad() drops
    of_generator.step()
    return [model.weight.item() for model in models]


def test_a_gan_trains_on_many_replicas_as_on_one(strategy: Any) -> None:
    (generator, of_generator), (discriminator, of_discriminator) = (
        opened(strategy, linear, lr=0.1 / strategy.num_replicas_in_sync) for _ in range(2)
    )
    models, optimizers = [generator, discriminator], [of_generator, of_discriminator]
    plain = [linear(), linear()]
    plain_optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in plain]
    for _ in range(3):
        found = same_on_all(strategy, lambda: gan_step(models, optimizers))
        np.testing.assert_allclose(found, gan_step(plain, plain_optimizers), rtol=1e-12)


def test_a_step_on_gradients_of_another_loss_is_an_error() -> None:
    with mpidist.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        (model, optimizer), _ = opened(strategy, linear), opened(strategy, linear)

        def step() -> None:
            optimizer.zero_grad()
            for _ in range(2):
                model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
                optimizer.step()

        with pytest.raises(RuntimeError, match="still has the sum over all replicas of the step before"):
            strategy.run(step)


def test_a_backward_between_synchronize_and_step_is_an_error() -> None:
    with mpidist.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        (model, optimizer), _ = opened(strategy, linear), opened(strategy, linear)

        def step() -> None:
            model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
            optimizer.synchronize()
            model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()

        with pytest.raises(RuntimeError, match="still has the sum over all replicas"):
            strategy.run(step)


def test_buffers_are_those_of_the_first_replica(strategy: Any) -> None:
    def net() -> Any:
        made = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        made.register_buffer("mask", torch.tensor([True, False]))
        made.register_buffer("endless", torch.tensor([float("inf"), float("nan"), -0.0]), persistent=False)
        return made

    model, optimizer = opened(strategy, net)

    def step() -> Any:
        optimizer.zero_grad()
        model(torch.full((3, 2), replica() + 1.0) * torch.arange(6.0).reshape(3, 2)).sum().backward()
        optimizer.step()
        return np.concatenate([buffer.double().numpy().reshape(-1) for buffer in model.buffers()])

    found = same_on_all(strategy, step)
    alone = nn.BatchNorm1d(2)
    alone(torch.arange(6.0).reshape(3, 2))
    expected = [buffer.double().numpy().reshape(-1) for buffer in alone.buffers()]
    np.testing.assert_array_equal(found, np.concatenate([[1, 0, np.inf, np.nan, -0.0], *expected]))


def test_synchronised_batch_norm(strategy: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(3 * strategy.num_replicas_in_sync, 4, 5, dtype=torch.float64, generator=generator)
    counts = [4, *[3] * (strategy.num_replicas_in_sync - 2), 2] if strategy.num_replicas_in_sync > 1 else [3]
    starts = [0, *np.cumsum(counts)]

    def net() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv1d(4, 4, 2), nn.BatchNorm1d(4), nn.Tanh(), nn.Conv1d(4, 1, 2)).double()

    model, optimizer = opened(strategy, lambda: mpidist.torch.SyncBatchNorm.convert_sync_batchnorm(net()))

    def step() -> Any:
        optimizer.zero_grad()
        mine = rows[starts[replica()] : starts[replica() + 1]]
        (model(mine).square().sum() / len(rows)).backward()
        optimizer.step()
        return np.concatenate([value.double().numpy().reshape(-1) for value in model.state_dict().values()])

    alone = net()
    plain = torch.optim.SGD(alone.parameters(), 1.0)
    for _ in range(3):
        found = same_on_all(strategy, step)
        plain.zero_grad()
        (alone(rows).square().sum() / len(rows)).backward()
        plain.step()
    expected = np.concatenate([value.double().numpy().reshape(-1) for value in alone.state_dict().values()])
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_settings_that_differ_between_ranks_are_named() -> None:
    if mpidist.size() == 1:
        pytest.skip("needs a second rank")
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        model, optimizer = opened(strategy, linear, lr=1.0 + mpidist.rank())

        def step() -> None:
            model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
            optimizer.step()

        with pytest.raises(mpidist.MismatchError, match="'lr': 2.0"):
            strategy.run(step)


def test_what_cannot_be_taken_is_named(strategy: Any) -> None:
    with strategy.scope():
        model = mpidist.torch.adopt(linear)
        with pytest.raises(TypeError, match=r"model = mpidist.torch.adopt\(model\)"):
            mpidist.torch.Optimizer(linear(), torch.optim.SGD, lr=1.0)
        with pytest.raises(TypeError, match="LBFGS calls the model several times"):
            mpidist.torch.Optimizer(model, torch.optim.LBFGS)
        with pytest.raises(TypeError, match="expected a class"):
            mpidist.torch.Optimizer(model, "adam")
        with pytest.raises(ValueError, match="parameters that its module has not"):
            mpidist.torch.Optimizer(model, lambda net: torch.optim.SGD(linear().parameters(), 1.0))
        optimizer = mpidist.torch.Optimizer(model, torch.optim.SGD, lr=1.0)
        with pytest.raises(TypeError, match="was given a closure"):
            optimizer.step(lambda: 0.0)
        if strategy.num_replicas_in_sync > 1:
            with pytest.raises(RuntimeError, match="outside of strategy.run"):
                optimizer.step()
            mpidist.torch.Optimizer(model, torch.optim.SGD, lr=1.0)
    if strategy.num_replicas_in_sync > 1 and mpidist.size() == 1:
        with pytest.raises(RuntimeError, match="a later one has taken"):
            strategy.run(optimizer.step)
        with pytest.raises(RuntimeError, match="was made inside strategy.run"):
            strategy.run(lambda: mpidist.torch.Optimizer(model, torch.optim.SGD, lr=1.0))
