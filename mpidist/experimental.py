"""The names of ``tf.distribute.experimental``."""

from mpidist.checkpoint.preemption import PreemptionCheckpointHandler
from mpidist.checkpoint.termination import TerminationConfig
from mpidist.core.enums import CommunicationImplementation
from mpidist.core.options import CollectiveHints, CommunicationOptions
from mpidist.input import ValueContext
from mpidist.strategies import MultiWorkerMirroredStrategy

CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "PreemptionCheckpointHandler",
    "TerminationConfig",
    "ValueContext",
]
