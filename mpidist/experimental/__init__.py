"""The names of ``tf.distribute.experimental``."""

from mpidist.checkpoint.preemption import PreemptionCheckpointHandler
from mpidist.checkpoint.termination import TerminationConfig
from mpidist.core.enums import CommunicationImplementation
from mpidist.core.options import CollectiveHints, CommunicationOptions
from mpidist.experimental import partitioners
from mpidist.input import ValueContext
from mpidist.parameter_server.remote import cache_variable_reads
from mpidist.parameter_server.sharded_variable import ShardedVariable
from mpidist.parameter_server.strategy import ParameterServerStrategy
from mpidist.strategies import CentralStorageStrategy, MultiWorkerMirroredStrategy

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
    "TerminationConfig",
    "ValueContext",
    "cache_variable_reads",
    "partitioners",
]
