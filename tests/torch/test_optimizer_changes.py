"""Optimizers of adopted modules: changes at unusual times, and several at once."""

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


def test_a_loaded_state_is_each_replicas_own(strategy: Any) -> None:
    model, optimizer = opened(strategy, linear, torch.optim.Adam, lr=0.1)

    def step() -> Any:
        optimizer.zero_grad()
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        optimizer.step()
        return model.weight.item()

    strategy.run(step)
    optimizer.load_state_dict(optimizer.state_dict())
    held = [inner.state[copy.weight] for inner, copy in zip(optimizer.inner, model.copies, strict=True)]
    assert len({id(state) for state in held}) == len(held)
    assert len({state["exp_avg"].data_ptr() for state in held}) == len(held)
    strategy.run(step)
    assert [float(state["step"]) for state in held] == [2.0] * len(held)


@pytest.mark.parametrize("has_rows", [True, False])
def test_sums_of_two_optimizers_are_kept_apart(strategy: Any, has_rows: bool) -> None:
    """Their layers are of one size, and backward comes to the second one first."""
    first, first_optimizer = opened(strategy, linear)
    second, second_optimizer = opened(strategy, linear, lr=0.0)

    def step() -> Any:
        first_optimizer.zero_grad()
        second_optimizer.zero_grad()
        if has_rows or replica() == 0:
            rows = torch.ones(1, 1, dtype=torch.float64)
            (second(2 * first(rows)) + 4 * second(rows)).sum().backward()
        first_optimizer.synchronize()
        second_optimizer.synchronize()
        return [first.weight.grad.item(), second.weight.grad.item()]

    count = strategy.num_replicas_in_sync if has_rows else 1
    np.testing.assert_array_equal(same_on_all(strategy, step), [2.0 * count, 6.0 * count])


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("how", ["dropped", "replaced", "clipped"])
def test_changes_before_the_sum_are_not_lost(optimizers: int, how: str) -> None:
    with mpidist.MirroredStrategy(["cpu:0", "cpu:1"], communicator=alone()) as strategy:
        model, optimizer = opened(strategy, linear)
        kept = [opened(strategy, linear) for _ in range(optimizers - 1)]

        def step() -> Any:
            model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
            if how == "clipped":
                model.weight.grad.mul_(0.5)
            elif how == "dropped" and replica():
                model.weight.grad = None
            elif how == "replaced":
                model.weight.grad = torch.full((1, 1), 5.0, dtype=torch.float64)
            optimizer.step()
            return model.weight.grad.item()

        if how == "clipped" or not kept:
            with pytest.raises(RuntimeError, match=r"optimizer.synchronize\(\) first"):
                strategy.run(step)
        else:
            assert same_on_all(strategy, step) == {"dropped": 1.0, "replaced": 10.0}[how]


def test_early_clipping_raises_on_one_replica() -> None:
    with mpidist.OneDeviceStrategy("cpu:0").scope():
        model = mpidist.torch.adopt(linear)
        optimizer = mpidist.torch.Optimizer(model, torch.optim.SGD, lr=1.0)
    for synchronizes in (False, True):
        optimizer.zero_grad()
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        if synchronizes:
            optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if synchronizes:
            optimizer.step()
        else:
            with pytest.raises(RuntimeError, match=r"optimizer.synchronize\(\) first"):
                optimizer.step()
    assert model.weight.item() == pytest.approx(0.5)


def test_gradients_of_another_loss_may_be_dropped_by_the_model(strategy: Any) -> None:
    model, optimizer = opened(strategy, linear)
    other, _ = opened(strategy, linear)

    def step() -> Any:
        optimizer.zero_grad()
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        model.zero_grad()
        model(other(torch.full((1, 1), 3.0, dtype=torch.float64))).sum().backward()
        optimizer.step()
        return model.weight.grad.item()

    if strategy.num_replicas_in_sync > 1:
        assert same_on_all(strategy, step) == 3.0 * strategy.num_replicas_in_sync


def test_changes_since_adopt_are_those_of_the_first_rank(strategy: Any) -> None:
    with strategy.scope():
        model = mpidist.torch.adopt(linear)
        with torch.no_grad():
            model.weight.fill_(2.0 + mpidist.rank())
        mpidist.torch.Optimizer(model, torch.optim.SGD, lr=1.0)
    if strategy.num_replicas_in_sync > 1:
        assert same_on_all(strategy, lambda: model.weight.item()) == 2.0


def train(strategy: Any, model: Any, optimizer: Any) -> None:
    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        optimizer.step()

    strategy.run(step)


def test_a_module_that_is_not_adopted_raises(strategy: Any) -> None:
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("needs a second replica")
    with strategy.scope():
        made_in_scope = torch.optim.SGD(linear().parameters(), 1.0)
    for step in (made_in_scope.step, lambda: strategy.run(torch.optim.SGD(linear().parameters(), 1.0).step)):
        with pytest.raises(RuntimeError, match=r"MultiWorkerMirroredStrategy.*model = mpidist.torch.adopt\(module\)"):
            step()


def test_an_own_optimizer_of_an_adopted_module_raises(strategy: Any) -> None:
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("needs a second replica")
    model, _ = opened(strategy, linear)
    plain = torch.optim.Adam(model.parameters(), 1.0)
    for step in (plain.step, lambda: train(strategy, model, plain)):
        with pytest.raises(RuntimeError, match=r"Use mpidist.torch.Optimizer\(model, torch.optim.Adam, ...\)"):
            step()


def test_a_module_of_another_strategy_raises(strategy: Any) -> None:
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("needs a second replica")
    model, optimizer = opened(mpidist.OneDeviceStrategy("cpu:0"), linear)
    with pytest.raises(RuntimeError, match="another OneDeviceStrategy has adopted.* inside `with strategy.scope"):
        train(strategy, model, optimizer)
    if strategy.extended.spans_ranks:
        with pytest.raises(RuntimeError, match="outside of the scope of MultiWorkerMirroredStrategy"):
            mpidist.torch.adopt(linear)


@pytest.mark.parametrize("takes_a_step", [True, False])
def test_init_of_one_copy_raises(strategy: Any, takes_a_step: bool) -> None:
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("needs a second replica")
    model, optimizer = opened(strategy, linear)
    if takes_a_step:
        train(strategy, model, optimizer)
    if mpidist.rank() == 0:
        nn.init.constant_(model.weight, 3.0)
    expected = ValueError if len(model.copies) > 1 else mpidist.MismatchError
    with pytest.raises((expected, mpidist.PeerError), match="copies on this rank differ|parameters with the checksum"):
        # Ranks without a change take the first step. The second one cannot begin.
        for _ in range(2):
            train(strategy, model, optimizer)


def test_equal_changes_of_all_copies_are_trained(strategy: Any) -> None:
    model, optimizer = opened(strategy, linear)
    for _ in range(2):
        model.apply(lambda module: nn.init.constant_(module.weight, 3.0))
        train(strategy, model, optimizer)
        assert [copy.weight.item() for copy in model.copies] == [3.0 - strategy.num_replicas_in_sync] * len(
            model.copies
        )


def test_independent_optimizers_are_not_checked(strategy: Any) -> None:
    module = linear()
    with strategy.scope():
        optimizer = mpidist.torch.independent(torch.optim.SGD(module.parameters(), 1.0))
    if len(strategy.extended.local_replica_ids) == 1:
        train(strategy, module, optimizer)
        assert module.weight.item() == 0.0
    outside = torch.optim.SGD(linear().parameters(), 1.0)
    outside.step()
    with pytest.raises(TypeError, match=r"Pass an optimizer of torch.optim"):
        mpidist.torch.independent(module)


def test_groups_and_state_are_those_of_the_replica(strategy: Any) -> None:
    model, optimizer = opened(strategy, linear, torch.optim.SGD, lr=1.0, momentum=0.5)

    def step() -> Any:
        optimizer.zero_grad()
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        optimizer.synchronize()
        (group,) = optimizer.param_groups
        assert group["params"][0] is model.weight
        nn.utils.clip_grad_norm_(group["params"], 1.0, foreach=False)
        optimizer.step()
        assert optimizer.state[model.weight]["momentum_buffer"].item() == pytest.approx(1.0)
        return [group["lr"], model.weight.item()]

    optimizer.param_groups[0]["lr"] = 0.25
    np.testing.assert_allclose(same_on_all(strategy, step), [0.25, 0.75], rtol=1e-5)
    assert optimizer.param_groups[0]["params"][0] is model.copies[0].weight


def test_settings_may_be_set_in_replicas(strategy: Any) -> None:
    model, optimizer = opened(strategy, linear)

    def step(rate: float) -> Any:
        optimizer.zero_grad()
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        optimizer.synchronize()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        return model.weight.item()

    count = strategy.num_replicas_in_sync
    assert same_on_all(strategy, lambda: step(0.5)) == 1 - 0.5 * count
    optimizer.param_groups[0]["lr"] = 2.0
    assert strategy.experimental_local_results(strategy.run(lambda: optimizer.param_groups[0]["lr"]))[-1] == 2.0
    assert same_on_all(strategy, lambda: step(0.25)) == 1 - 0.75 * count


def test_parameters_that_are_unfrozen_later_are_named(strategy: Any) -> None:
    with strategy.scope():
        model = mpidist.torch.adopt(lambda: nn.Sequential(linear(), linear().requires_grad_(False)))
        optimizer = mpidist.torch.Optimizer(model, torch.optim.SGD, lr=1.0)

    def step() -> Any:
        optimizer.zero_grad()
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        optimizer.step()
        return model[1].weight.item()

    assert same_on_all(strategy, step) == 1.0
    model.requires_grad_()
    if strategy.num_replicas_in_sync == 1:
        assert same_on_all(strategy, step) == 1.0 - model[0].weight.item() - 1.0
    else:
        with pytest.raises(RuntimeError, match="took no gradients when the optimizer was made"):
            strategy.run(step)


def test_weights_clipped_in_some_steps(strategy: Any) -> None:
    model, optimizer = opened(strategy, linear, torch.optim.SGD, lr=0.1)

    def step(number: int) -> Any:
        optimizer.zero_grad()
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        optimizer.step()
        if number % 3 == 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.01, 0.01)
        return model.weight.item()

    for number in range(7):
        strategy.run(step, args=(number,))
    same_on_all(strategy, lambda: model.weight.item())
