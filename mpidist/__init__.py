"""mpidist: the tf.distribute programming model on the ranks of an MPI job, without TensorFlow.

Write a program once against a strategy and start it with ``mpirun -n N python train.py``.
"""

from typing import TYPE_CHECKING

from mpidist.core.advice import IN_PLACE_OF
from mpidist.core.first_use import on_first_use
from mpidist.core.settings import warn_about_unknown
from mpidist.core.version import __version__
from mpidist.topology import install_excepthook, prepare_environment, rank, size

prepare_environment()
install_excepthook()
warn_about_unknown()

# MPI reads its environment when it starts, so the lines above come before everything that could start it.
from mpidist import cluster_resolver, experimental, metrics, optimizers  # noqa: E402
from mpidist.cluster_resolver import ClusterSpec  # noqa: E402
from mpidist.collectives import Communicator  # noqa: E402
from mpidist.core.context import (  # noqa: E402
    experimental_set_strategy,
    get_loss_reduction,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    variable_creator_scope,
)
from mpidist.core.enums import ReduceOp, VariableAggregation, VariableSynchronization  # noqa: E402
from mpidist.core.errors import (  # noqa: E402
    CollectiveTimeoutError,
    LaunchError,
    MismatchError,
    OutOfRangeError,
    PeerError,
)
from mpidist.core.options import RunOptions  # noqa: E402
from mpidist.cross_device_ops import (  # noqa: E402
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from mpidist.input import (  # noqa: E402
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
)
from mpidist.strategies import (  # noqa: E402
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ReplicaContext,
    Strategy,
    StrategyExtended,
    TPUStrategy,
)
from mpidist.training import (  # noqa: E402
    common_rng,
    compute_average_loss,
    global_count,
    replica_rng,
    scale_regularization_loss,
    set_seed,
)
from mpidist.values import DistributedValues, IndexedSlices, Variable  # noqa: E402

if TYPE_CHECKING:
    from mpidist import coordinator, elastic, errors, v1
    from mpidist.checkpoint import Checkpoint, CheckpointManager, latest_checkpoint
    from mpidist.collectives.tuning import tune
    from mpidist.estimator import EvalResult, EvalSpec, TrainContext, TrainSpec, launch, train_and_evaluate
    from mpidist.parameter_server.server import Server
    from mpidist.parameter_server.strategy import ParameterServerStrategy
else:
    __getattr__, __dir__ = on_first_use(
        __name__,
        {
            # Rooms whose other names docs tell users to take from there.
            "checkpoint": "mpidist.checkpoint",
            "estimator": "mpidist.estimator",
            "parameter_server": "mpidist.parameter_server",
            "coordinator": "mpidist.coordinator",
            "elastic": "mpidist.elastic",
            "errors": "mpidist.errors",
            "v1": "mpidist.v1",
            **dict.fromkeys(("Checkpoint", "CheckpointManager", "latest_checkpoint"), "mpidist.checkpoint"),
            **dict.fromkeys(("EvalResult", "EvalSpec", "TrainContext", "TrainSpec"), "mpidist.estimator"),
            **dict.fromkeys(("launch", "train_and_evaluate"), "mpidist.estimator"),
            "ParameterServerStrategy": "mpidist.parameter_server.strategy",
            "Server": "mpidist.parameter_server.server",
            "tune": "mpidist.collectives.tuning",
        },
        IN_PLACE_OF,
    )

# Not for programs, and not to be shown to those who look what there is.
del IN_PLACE_OF, TYPE_CHECKING, install_excepthook, on_first_use, prepare_environment, warn_about_unknown

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
