"""mpidist: the tf.distribute programming model on the ranks of an MPI job, without TensorFlow.

Write a program once against a strategy and start it with ``mpirun -n N python train.py``.
"""

from typing import TYPE_CHECKING

from mpidist.core import __version__
from mpidist.core.context import (
    experimental_set_strategy,
    get_loss_reduction,
    has_strategy,
    in_cross_replica_context,
    variable_creator_scope,
)
from mpidist.core.errors import CollectiveTimeoutError, LaunchError, MismatchError, OutOfRangeError, PeerError
from mpidist.core.lazy import ADVICE, on_first_use
from mpidist.core.options import ReduceOp, RunOptions, VariableAggregation, VariableSynchronization
from mpidist.core.settings import warn_about_unknown
from mpidist.topology import install_excepthook, prepare_environment, rank, size

prepare_environment()
install_excepthook()
warn_about_unknown()

# Rooms are imported on first use: MPI, which reads its environment when it starts, is so after the lines above, and a
# program pays for what it needs alone.
if TYPE_CHECKING:
    from mpidist import cluster_resolver, coordinator, elastic, errors, experimental, metrics, optimizers, v1
    from mpidist import keras as keras
    from mpidist import torch as torch
    from mpidist.checkpoint import Checkpoint, CheckpointManager, latest_checkpoint
    from mpidist.cli.notebook import launch_processes
    from mpidist.cluster_resolver import ClusterSpec
    from mpidist.collectives import Communicator
    from mpidist.collectives.tuning import tune
    from mpidist.compat.tpu import TPUStrategy
    from mpidist.cross_device_ops import CrossDeviceOps, HierarchicalCopyAllReduce, NcclAllReduce, ReductionToOneDevice
    from mpidist.estimator import EvalResult, EvalSpec, TrainContext, TrainSpec, launch, train_and_evaluate
    from mpidist.input import (
        AUTOTUNE,
        SHARD_HINT,
        ArraySpec,
        AutoShardPolicy,
        Dataset,
        DatasetSpec,
        DistributedDataset,
        DistributedIterator,
        InputContext,
        InputOptions,
        InputReplicationMode,
        Options,
        TextLineDataset,
    )
    from mpidist.parameter_server.parameter_server_strategy import ParameterServerStrategy
    from mpidist.parameter_server.server import Server
    from mpidist.strategies import (
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
        OneDeviceStrategy,
        ReplicaContext,
        Strategy,
        StrategyExtended,
    )
    from mpidist.training.losses import compute_average_loss, global_count, scale_regularization_loss
    from mpidist.training.random import common_rng, replica_rng, set_seed
    from mpidist.values import DistributedValues, IndexedSlices, Variable

    # core knows strategies by protocols, which have less than programs use.
    def get_replica_context() -> ReplicaContext | None:
        """Return the context of the replica that runs, or None in cross-replica context."""

    def get_strategy() -> Strategy:
        """Return the current strategy of this thread, the default strategy where none is active."""
else:
    from mpidist.core.context import get_replica_context, get_strategy

    __getattr__, __dir__ = on_first_use(
        __name__,
        {
            # Rooms whose other names docs tell users to take from there.
            "mpidist": "checkpoint cluster_resolver coordinator elastic errors estimator experimental keras "
            "metrics optimizers parameter_server torch v1",
            "mpidist.checkpoint": "Checkpoint CheckpointManager latest_checkpoint",
            "mpidist.cli.notebook": "launch_processes",
            "mpidist.cluster_resolver": "ClusterSpec",
            "mpidist.collectives": "Communicator",
            "mpidist.collectives.tuning": "tune",
            "mpidist.compat.tpu": "TPUStrategy",
            "mpidist.cross_device_ops": "CrossDeviceOps HierarchicalCopyAllReduce NcclAllReduce ReductionToOneDevice",
            "mpidist.estimator": "EvalResult EvalSpec TrainContext TrainSpec launch train_and_evaluate",
            "mpidist.input": "AUTOTUNE SHARD_HINT ArraySpec AutoShardPolicy Dataset DatasetSpec DistributedDataset "
            "DistributedIterator InputContext InputOptions InputReplicationMode Options TextLineDataset",
            "mpidist.parameter_server.parameter_server_strategy": "ParameterServerStrategy",
            "mpidist.parameter_server.server": "Server",
            "mpidist.strategies": "MirroredStrategy MultiWorkerMirroredStrategy OneDeviceStrategy ReplicaContext "
            "Strategy StrategyExtended",
            "mpidist.training.losses": "compute_average_loss global_count scale_regularization_loss",
            "mpidist.training.random": "common_rng replica_rng set_seed",
            "mpidist.values": "DistributedValues IndexedSlices Variable",
        },
        ADVICE,
    )

# Not for programs, and not to be shown to those who look what there is.
del ADVICE, TYPE_CHECKING, install_excepthook, on_first_use, prepare_environment, warn_about_unknown

__all__ = [
    "AUTOTUNE",
    "SHARD_HINT",
    "ArraySpec",
    "AutoShardPolicy",
    "Checkpoint",
    "CheckpointManager",
    "ClusterSpec",
    "CollectiveTimeoutError",
    "Communicator",
    "CrossDeviceOps",
    "Dataset",
    "DatasetSpec",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "EvalResult",
    "EvalSpec",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "LaunchError",
    "MirroredStrategy",
    "MismatchError",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "Options",
    "OutOfRangeError",
    "ParameterServerStrategy",
    "PeerError",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "TextLineDataset",
    "TrainContext",
    "TrainSpec",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "__version__",
    "cluster_resolver",
    "common_rng",
    "compute_average_loss",
    "coordinator",
    "elastic",
    "errors",
    "experimental",
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "global_count",
    "has_strategy",
    "in_cross_replica_context",
    "latest_checkpoint",
    "launch",
    "launch_processes",
    "metrics",
    "optimizers",
    "rank",
    "replica_rng",
    "scale_regularization_loss",
    "set_seed",
    "size",
    "train_and_evaluate",
    "tune",
    "v1",
    "variable_creator_scope",
]
