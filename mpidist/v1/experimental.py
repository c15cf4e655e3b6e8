"""The names of ``tf.compat.v1.distribute.experimental``."""

from mpidist.core.enums import CommunicationImplementation
from mpidist.core.options import CollectiveHints, CommunicationOptions
from mpidist.strategies.v1 import MultiWorkerMirroredStrategyV1 as MultiWorkerMirroredStrategy

CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
]
