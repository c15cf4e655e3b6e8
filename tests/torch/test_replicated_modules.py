"""Adopted modules: a copy for each replica, one thing outside of them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import mpidist

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")
nn = torch.nn

pytestmark = [pytest.mark.torch, pytest.mark.one_rank]


@pytest.fixture
def strategy() -> Iterator[Any]:
    with mpidist.MirroredStrategy(["cpu:0", "cpu:1"]) as made:
        yield made


def test_each_replica_has_a_copy_and_outside_there_is_the_first(strategy: Any) -> None:
    linear = nn.Linear(3, 2)
    with strategy.scope():
        model = mpidist.torch.adopt(linear)
    assert model.copies[0] is linear
    assert model.copies[1] is not linear
    assert model.weight is linear.weight
    seen = strategy.experimental_local_results(strategy.run(lambda: id(model.weight)))
    assert seen == (id(model.copies[0].weight), id(model.copies[1].weight))
    assert all(torch.equal(copy.weight, linear.weight) for copy in model.copies)


def test_it_is_asked_as_a_module(strategy: Any) -> None:
    with strategy.scope():
        model = mpidist.torch.adopt(lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    assert isinstance(model, nn.Module)
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(model.state_dict()) == list(model.copies[0].state_dict())
    assert len(list(model.parameters())) == 4
    assert len(list(model.modules())) == 3
    assert model[0].in_features == 3
    assert model.get_submodule("1") is model.copies[0][1]
    assert "Linear" in repr(model)
    with pytest.raises(AttributeError, match="no_such"):
        model.no_such


def test_a_change_outside_is_one_of_all_copies(strategy: Any) -> None:
    with strategy.scope():
        model = mpidist.torch.adopt(lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout()))
    assert model.eval() is model
    assert not any(copy.training or copy[1].training for copy in model.copies)
    assert not model.training
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    assert all(bool((copy[0].weight == 1).all()) for copy in model.copies)
    model.double()
    assert {copy[0].weight.dtype for copy in model.copies} == {torch.float64}
    model.scale = 3
    assert [copy.scale for copy in model.copies] == [3, 3]
    model.requires_grad_(False)
    assert not any(parameter.requires_grad for copy in model.copies for parameter in copy.parameters())
    with pytest.raises(TypeError, match="the 2 copies would share"):
        model.extra = nn.Linear(2, 2)


def test_functions_of_torch_change_all_copies_alike(strategy: Any) -> None:
    with strategy.scope():
        model = mpidist.torch.adopt(lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
    draw = lambda module: nn.init.normal_(module.weight) if isinstance(module, nn.Linear) else None
    before = model[0].weight.detach().clone()
    assert model.apply(draw) is model
    assert not torch.equal(before, model[0].weight)
    assert torch.equal(model.copies[0][0].weight, model.copies[1][0].weight)
    assert model.type(torch.float64) is model
    assert {parameter.dtype for copy in model.copies for parameter in copy.parameters()} == {torch.float64}
    assert model.to_empty(device="meta") is model
    assert all(parameter.is_meta for copy in model.copies for parameter in copy.parameters())


def test_an_optimizer_makes_the_copies_equal(strategy: Any) -> None:
    with strategy.scope():
        model = mpidist.torch.adopt(lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
        nn.init.ones_(model[0].weight)
        model[1].running_mean.fill_(5.0)
        mpidist.torch.Optimizer(model, torch.optim.SGD, lr=1.0)
        assert all(bool((copy[0].weight == 1).all()) for copy in model.copies)
        assert all(bool((copy[1].running_mean == 5).all()) for copy in model.copies)
        model[1].requires_grad_(False)
        with pytest.raises(ValueError, match=r"which parameters have gradients: 1.bias"):
            mpidist.torch.Optimizer(model, torch.optim.SGD, lr=1.0)


class NamedByAge(nn.Module):
    """Copies name their parameters otherwise, as those of a Keras model do."""

    def __init__(self, age: int = 0) -> None:
        super().__init__()
        self.age = age
        self.add_module(f"layer_{age}", nn.Linear(3, 2))

    def __deepcopy__(self, memo: object) -> NamedByAge:
        return NamedByAge(self.age + 1)


def test_copies_of_other_names_are_refused(strategy: Any) -> None:
    with strategy.scope(), pytest.raises(ValueError, match="NamedByAge gives its copies parameters of other names"):
        mpidist.torch.adopt(NamedByAge())


def test_a_change_in_a_replica_is_its_own(strategy: Any) -> None:
    with strategy.scope():
        model = mpidist.torch.adopt(nn.Linear(3, 2))
    strategy.run(lambda: model.train(mpidist.get_replica_context().is_first_replica))
    assert [copy.training for copy in model.copies] == [True, False]


def test_tied_parameters_stay_tied(strategy: Any) -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    with strategy.scope():
        model = mpidist.torch.adopt(net)
    assert all(copy[0].weight is copy[1].weight for copy in model.copies)


def test_without_a_strategy_it_is_the_module() -> None:
    model = mpidist.torch.adopt(nn.Linear(1, 1, bias=False))
    optimizer = mpidist.torch.Optimizer(model, torch.optim.SGD, lr=1.0)
    before = model.weight.item()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert model.weight.item() == before - 1.0


def test_what_is_no_module_is_named(strategy: Any) -> None:
    with strategy.scope():
        with pytest.raises(TypeError, match=r"adopt\(\) was given 3"):
            mpidist.torch.adopt(3)
        with pytest.raises(TypeError, match="made 3 of type int"):
            mpidist.torch.adopt(lambda: 3)
        with pytest.raises(TypeError, match="what adopt"):
            mpidist.torch.adopt(mpidist.torch.adopt(nn.Linear(1, 1)))
    with pytest.raises(RuntimeError, match="inside strategy.run"):
        strategy.run(lambda: mpidist.torch.adopt(nn.Linear(1, 1)))


def test_a_module_that_was_not_adopted_is_named(strategy: Any) -> None:
    net = nn.Linear(2, 1)

    def step() -> None:
        net(torch.ones(1, 2)).sum().backward()
        mpidist.get_replica_context().all_reduce("SUM", net.weight.grad)

    with pytest.raises(ValueError, match=r"model = mpidist.torch.adopt\(model\)"):
        strategy.run(step)


def test_compiled_code_of_several_replicas_is_refused(strategy: Any) -> None:
    compiled = torch.compile(nn.Linear(1, 1), backend="eager")
    with strategy.scope(), pytest.raises(NotImplementedError, match="one replica per rank"):
        mpidist.torch.adopt(compiled)
    with strategy.scope():
        model = mpidist.torch.adopt(nn.Linear(1, 1))
    step = torch.compile(lambda x: model(x) * 2, backend="eager")
    with pytest.raises(NotImplementedError, match="one replica per rank"):
        strategy.run(step, args=(torch.ones(1, 1),))


def test_it_is_compiled_in_place_with_one_replica(strategy: Any) -> None:
    with strategy.scope():
        model = mpidist.torch.adopt(nn.Linear(2, 1))
    with pytest.raises(NotImplementedError, match="one replica per rank"):
        model.compile(backend="eager")
    alone = mpidist.torch.adopt(nn.Linear(2, 1))
    expected = alone(torch.ones(1, 2))
    alone.compile(backend="eager")
    assert torch.equal(alone(torch.ones(1, 2)), expected)


def test_a_deep_copy_is_one_of_this_replicas_module(strategy: Any) -> None:
    with strategy.scope():
        model = mpidist.torch.adopt(nn.Linear(2, 1))
    mpidist.torch.Optimizer(model, torch.optim.SGD, lr=1.0)
    made = copy.deepcopy(model)
    assert type(made) is nn.Linear
    assert made.weight is not model.weight
    assert torch.equal(made.weight, model.weight)


def test_what_reaches_no_copy_is_refused(strategy: Any) -> None:
    with strategy.scope():
        model = mpidist.torch.adopt(nn.Linear(2, 1))
    for save in (pickle.dumps, copy.copy, lambda it: torch.save(it, io.BytesIO())):
        with pytest.raises(TypeError, match=r"save model.state_dict\(\)"):
            save(model)
    for method in ("register_buffer", "register_parameter", "register_module", "add_module"):
        with pytest.raises(TypeError, match=rf"module.{method}\('extra', ...\); model = mpidist.torch.adopt"):
            getattr(model, method)("extra", None)


def test_batch_norm_of_a_process_group_is_refused() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2))
    scope = mpidist.MirroredStrategy(["cpu:0", "cpu:1"], communicator=None).scope()
    with scope, pytest.raises(TypeError, match=r"Layer '1' is a torch.nn.SyncBatchNorm.*convert_sync_batchnorm"):
        mpidist.torch.adopt(net)


def test_gpus_are_refused() -> None:
    from mpidist.torch.modules import check_strategy

    extended = SimpleNamespace(first_gpu="gpu:0", is_central=False, worker_devices=("gpu:0",))
    strategy: Any = SimpleNamespace(extended=extended)
    with pytest.raises(ValueError, match="host memory"):
        check_strategy(strategy)


def test_parameter_servers_are_refused() -> None:
    from mpidist.torch.modules import check_strategy

    strategy: Any = SimpleNamespace(extended=SimpleNamespace(is_central=True))
    with pytest.raises(ValueError, match="which no server reaches"):
        check_strategy(strategy)
