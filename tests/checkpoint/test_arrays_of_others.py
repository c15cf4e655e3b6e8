"""Tensors of PyTorch and arrays of JAX in checkpoints, and their nests."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import Checkpoint

OPTIONS = pytest.mark.parametrize(
    "options", [{}, {"sharded": True}, {"async_save": True}], ids=["plain", "sharded", "async"]
)


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax", reason="JAX is missing: pip install jax")


@pytest.fixture
def saving() -> Any:
    """A strategy of all ranks, in whose scope they save and restore together."""
    with mpidist.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        yield strategy


@pytest.mark.torch
@OPTIONS
def test_tensors_are_filled_in_place(torch: Any, saving: Any, options: dict[str, bool], tmp_path: Path) -> None:
    def tensors(fill: float) -> dict[str, Any]:
        dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
        made = {str(dtype): torch.full((2, 3), fill).to(dtype) for dtype in dtypes}
        made["column"] = torch.full((3, 2), fill).t()
        return {**made, "number": torch.tensor(fill), "leaf": torch.full((2,), fill, requires_grad=True)}

    checkpoint = Checkpoint(w=tensors(1.5), alone=torch.arange(3.0))
    path = checkpoint.save(tmp_path / "ckpt", **options)
    checkpoint.wait()
    fresh = Checkpoint(w=tensors(0.0), alone=torch.zeros(3))
    before = dict(fresh.w)
    fresh.restore(path).assert_consumed()
    for name, expected in checkpoint.w.items():
        assert fresh.w[name] is before[name]
        assert fresh.w[name].dtype == expected.dtype
        assert torch.equal(fresh.w[name], expected), name
    assert fresh.alone.tolist() == [0.0, 1.0, 2.0]
    if saving.extended.should_checkpoint:
        manifest = json.loads((Path(path) / "manifest.json").read_text())
        assert manifest["tensors"]["w/torch.bfloat16"]["dtype"] == "bfloat16"
    # What one library saved, another one takes.
    array = np.zeros(3, np.float32)
    Checkpoint(alone=array).restore(path).expect_partial()
    assert array.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match=r"'alone' has shape \(3,\) and dtype float32 .* and dtype float64 here"):
        Checkpoint(alone=torch.zeros(3, dtype=torch.float64)).restore(path)


@pytest.mark.torch
def test_modules_and_optimizers(torch: Any, saving: Any, tmp_path: Path) -> None:
    import mpidist.torch

    def made() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))

    def step(module: Any, optimizer: Any) -> Any:
        optimizer.zero_grad()
        module(torch.tensor([[1.0, 2.0], [0.5, 4.0]])).sum().backward()
        optimizer.step()
        return module[0].weight.detach().clone()

    torch.manual_seed(0)  # the same on all ranks: the first one's is what is saved
    module, fresh = made(), made()
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr) for m, lr in ((module, 0.1), (fresh, 0.5)))
    for one in (optimizer, other):
        mpidist.torch.independent(one)  # all ranks take the same steps
    step(module, optimizer)
    step(fresh, other)
    path = Checkpoint(model=module, optimizer=optimizer.state_dict()).save(tmp_path / "ckpt")
    # A module, its state_dict() and an attribute that holds it are the same names.
    expected = step(module, optimizer)
    checkpoint = Checkpoint(model=fresh.state_dict(), optimizer=other.state_dict())
    checkpoint.restore(path).assert_consumed()
    other.load_state_dict(checkpoint.optimizer)
    assert (other.param_groups[0]["lr"], other.param_groups[0]["betas"]) == (0.1, (0.9, 0.999))
    assert torch.equal(step(fresh, other), expected)
    assert fresh[1].num_batches_tracked == 2
    held = SimpleNamespace(net=module, number=torch.zeros(1))
    again = SimpleNamespace(net=made(), number=torch.ones(1))
    Checkpoint(held=again).restore(Checkpoint(held=held).save(tmp_path / "held")).assert_consumed()
    assert torch.equal(again.net[0].weight, module[0].weight)
    for wrong, name in ((optimizer, "opt"), (SimpleNamespace(opt=optimizer), "x")):
        with pytest.raises(TypeError, match=r"is a torch optimizer.*Checkpoint\(opt=optimizer\.state_dict\(\)\)"):
            Checkpoint(**{name: wrong})


@pytest.mark.torch
def test_autograd_sees_that_a_tensor_was_filled(torch: Any, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        w = torch.ones(2, dtype=dtype, requires_grad=True)
        path = Checkpoint(w=w).save(tmp_path / str(dtype))
        loss = (w**2).sum()
        Checkpoint(w=w).restore(path).assert_consumed()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        (w**2).sum().backward()
        assert w.grad.tolist() == [2.0, 2.0]
    with torch.inference_mode():
        frozen = torch.zeros(2, dtype=torch.bfloat16)
    Checkpoint(w=frozen).restore(path).assert_consumed()
    assert frozen.tolist() == [1.0, 1.0]
    # One element that shows as several cannot be filled, which is known before anything is.
    model = SimpleNamespace(w=torch.zeros(2), mask=torch.ones(1).expand(2))
    assert Checkpoint(model=model).restore(Checkpoint(model=model).save(tmp_path / "mask")).assert_consumed()
    with pytest.raises(ValueError, match="'mask' is a read-only array here"):
        Checkpoint(mask=model.mask).restore(Checkpoint(mask=torch.ones(2)).save(tmp_path / "two"))


@pytest.mark.torch
def test_variables_that_a_module_has_beside_its_tensors(torch: Any, tmp_path: Path) -> None:
    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)
            self.cached, self.optimizers = torch.ones(1), [torch.optim.SGD(self.parameters(), 0.1)]

    outer = torch.nn.Sequential(Net())
    path = Checkpoint(net=outer).save(tmp_path / "ckpt")
    assert json.loads((Path(path) / "manifest.json").read_text())["tensors"].keys() == {
        "net/0.linear.weight", "net/0.linear.bias",
    }  # fmt: skip
    scale = mpidist.Variable(1.0)
    outer[0].scales = {"a": scale}
    for wrong in (outer, SimpleNamespace(inner=outer)):
        with pytest.raises(TypeError, match=r"'net.*0.scales.* of a torch module.*state_dict\(\).*Checkpoint\(name="):
            Checkpoint(net=wrong)
    Checkpoint(net=outer, scale=scale).save(tmp_path / "both")


@pytest.mark.torch
def test_sparse_tensors_in_attributes_are_settings(torch: Any, tmp_path: Path) -> None:
    held = SimpleNamespace(w=torch.ones(2), adjacency=torch.eye(2).to_sparse())
    path = Checkpoint(held=held).save(tmp_path / "ckpt")
    held.w.zero_()
    Checkpoint(held=held).restore(path).assert_consumed()
    assert held.w.tolist() == [1.0, 1.0]
    with pytest.raises(TypeError, match="'adjacency' is a torch.Tensor that NumPy cannot read"):
        Checkpoint(adjacency=held.adjacency)


Moments = namedtuple("Moments", "count mu")


@dataclass(frozen=True)
class State:
    params: Any
    step: Any


@OPTIONS
def test_arrays_of_jax_are_replaced_where_they_stand(
    jax: Any, saving: Any, options: dict[str, bool], tmp_path: Path
) -> None:
    jnp = jax.numpy

    def nest(fill: float) -> dict[str, Any]:
        params = {
            "dense": [jnp.full((2, 3), fill), jnp.full(2, fill, jnp.bfloat16)],
            "half": jnp.full(1, fill, "float16"),
        }
        # As optax has it: named tuples in tuples.
        return {
            "params": params,
            "moments": (Moments(jnp.int32(fill), {"w": jnp.full(2, fill)}), ()),
            "alone": jnp.ones(2) * fill,
        }

    checkpoint = Checkpoint(**nest(3.0), model=SimpleNamespace(state=State({"w": jnp.ones(2)}, jnp.int32(7))))
    path = checkpoint.save(tmp_path / "ckpt", **options)
    checkpoint.wait()
    zeros = nest(0.0)
    dense = zeros["params"]["dense"]
    fresh = Checkpoint(**zeros, model=SimpleNamespace(state=State({"w": jnp.zeros(2)}, jnp.int32(0))))
    fresh.restore(path).assert_consumed()
    assert fresh.params["dense"] is dense
    assert isinstance(fresh.moments[0], Moments)
    for name in ("params", "moments", "alone"):
        found, expected = jax.tree.leaves(getattr(fresh, name)), jax.tree.leaves(getattr(checkpoint, name))
        assert jax.tree.structure(getattr(fresh, name)) == jax.tree.structure(getattr(checkpoint, name))
        for one, other in zip(found, expected, strict=True):
            assert (type(one), one.dtype, one.devices()) == (type(other), other.dtype, other.devices())
            np.testing.assert_array_equal(one, other)
    assert (fresh.model.state.params["w"].tolist(), int(fresh.model.state.step)) == ([1.0, 1.0], 7)


def test_arrays_of_jax_that_cannot_be_replaced(jax: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="'x/a' is a JAX array, which cannot be replaced where it stands"):
        Checkpoint(x=MappingProxyType({"a": jax.numpy.ones(2)}))
    with jax.enable_x64(True):
        checkpoint = Checkpoint(x=jax.numpy.full(2, 1 / 3, "float64"))
        path = checkpoint.save(tmp_path / "ckpt")
        checkpoint.restore(path).assert_consumed()
        assert (checkpoint.x.dtype, float(checkpoint.x[0])) == (np.float64, 1 / 3)
    with pytest.raises(ValueError, match="'x' is a JAX array of float64, which JAX makes no more.*jax_enable_x64"):
        checkpoint.restore(path)
