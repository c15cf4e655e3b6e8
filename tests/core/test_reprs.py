"""What a user holds says what it is, without asking other ranks or reading files."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

import mpidist
from mpidist.collectives import FinishedWork, PartOfWork
from mpidist.experimental import TerminationConfig, partitioners

pytestmark = pytest.mark.one_rank

ROOMS = [
    "mpidist",
    "mpidist.experimental",
    "mpidist.experimental.partitioners",
    "mpidist.checkpoint",
    "mpidist.cluster_resolver",
    "mpidist.collectives",
    "mpidist.coordinator",
    "mpidist.elastic",
    "mpidist.estimator",
]
# Classes that cannot be made, or of which there are only subclasses, and those of distributed data.
WITHOUT = {
    *("DistributedValues", "TPUStrategy"),
    *("GCEClusterResolver", "KubernetesClusterResolver", "SageMakerClusterResolver", "TPUClusterResolver"),
    *("DistributedDataset", "DistributedIterator"),
}


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_class_has_one_of_its_own(room: str) -> None:
    module = importlib.import_module(room)
    classes = {name for name in module.__all__ if inspect.isclass(getattr(module, name))}
    plain = {name for name in classes - WITHOUT if getattr(module, name).__repr__ is object.__repr__}
    assert plain == set()


def test_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = mpidist.Checkpoint(step=0, model=mpidist.Variable(1.0))
    manager = mpidist.CheckpointManager(checkpoint, tmp_path, max_to_keep=1)
    assert repr(manager) == f"<CheckpointManager of <Checkpoint of step, model> in {str(tmp_path)!r}>"
    status = checkpoint.restore(manager.save())
    assert repr(status) == f"<LoadStatus of {status.path!r}: 0 missing, 0 unused, 0 deferred>"
    assert repr(mpidist.NcclAllReduce()) == "<NcclAllReduce of no strategy yet>"
    ops = mpidist.ReductionToOneDevice()
    strategy = mpidist.MirroredStrategy(["cpu:0", "cpu:1"], ops)
    assert repr(ops) == "<ReductionToOneDevice of 2 replicas>"
    assert repr(strategy.extended).endswith(f" of {strategy!r}>")
    assert repr(partitioners.FixedShardsPartitioner(2)) == "FixedShardsPartitioner(num_shards=2)"
    assert repr(TerminationConfig(signals=[10], grace_period=3)) == "<TerminationConfig: (10,), 3 s of grace>"
    assert repr(PartOfWork(FinishedWork(1), abs)) == "<Work, done>"
    resolver = mpidist.cluster_resolver.SimpleClusterResolver(mpidist.ClusterSpec({"ps": ["a:1"]}), "", "ps", 0)
    assert repr(resolver) == "<SimpleClusterResolver: ps 0>"
    monkeypatch.setenv("TF_CONFIG", "no JSON")
    union = mpidist.cluster_resolver.UnionResolver(mpidist.cluster_resolver.TFConfigClusterResolver(), resolver)
    assert repr(union) == f"<UnionResolver of <TFConfigClusterResolver>, {resolver!r}>"
    assert repr(mpidist.elastic.State(step=0)) == "<State of ['step'], committed 0 times>"
