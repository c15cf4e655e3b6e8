"""The names of ``tf.distribute.experimental``."""

from typing import TYPE_CHECKING

from mpidist.compat.tpu import TPUStrategy
from mpidist.core.lazy import on_first_use
from mpidist.core.options import CollectiveHints, CommunicationImplementation, CommunicationOptions
from mpidist.input import ValueContext
from mpidist.strategies import CentralStorageStrategy, MultiWorkerMirroredStrategy

if TYPE_CHECKING:
    from mpidist.checkpoint.preemption import PreemptionCheckpointHandler, TerminationConfig
    from mpidist.experimental import coordinator, partitioners
    from mpidist.parameter_server.parameter_server_strategy import ParameterServerStrategy
    from mpidist.parameter_server.remote import cache_variable_reads
    from mpidist.parameter_server.sharded_variable import ShardedVariable
else:
    __getattr__, __dir__ = on_first_use(
        __name__,
        {
            "mpidist.checkpoint.preemption": "PreemptionCheckpointHandler TerminationConfig",
            "mpidist.experimental": "coordinator partitioners",
            "mpidist.parameter_server.parameter_server_strategy": "ParameterServerStrategy",
            "mpidist.parameter_server.remote": "cache_variable_reads",
            "mpidist.parameter_server.sharded_variable": "ShardedVariable",
        },
    )

CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "ShardedVariable",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "cache_variable_reads",
    "coordinator",
    "partitioners",
]
