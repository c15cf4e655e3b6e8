"""Modules, layers and optimizers of other libraries, given as a value of one variable."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import mpidist

pytestmark = pytest.mark.one_rank


@pytest.mark.torch
def test_a_torch_module_or_optimizer_is_many_values() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")
    module = torch.nn.Linear(2, 1)
    with pytest.raises(TypeError, match=r"a torch module, a Linear.*Variable\(p\) for p in module\.parameters\(\)\]"):
        mpidist.Variable(module)
    with pytest.raises(TypeError, match=r"a torch optimizer, a SGD.*mpidist\.optimizers.*context\.all_reduce\("):
        mpidist.Variable(torch.optim.SGD(module.parameters(), 0.1))
    # What the messages say does work, within a strategy and on its own.
    variables = [mpidist.Variable(p) for p in module.parameters()]
    assert [v.shape for v in variables] == [(1, 2), (1,)]
    module(torch.ones(1, 2)).sum().backward()
    with mpidist.OneDeviceStrategy("cpu:0") as strategy:
        strategy.run(lambda: mpidist.get_replica_context().all_reduce("MEAN", [p.grad for p in module.parameters()]))


def test_a_keras_layer_is_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer:
        def __call__(self) -> Any:
            raise AssertionError("a layer is no function that makes a value")

    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(layers=SimpleNamespace(Layer=Layer)))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a Keras layer, a Layer.*Variable\(w\) for w in layer\.get_weights\(\)\]"):
        mpidist.Variable(Layer())
