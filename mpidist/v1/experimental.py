"""The names of ``tf.compat.v1.distribute.experimental``."""

from mpidist.core.enums import CommunicationImplementation
from mpidist.core.options import CollectiveHints, CommunicationOptions
from mpidist.parameter_server.v1_strategy import ParameterServerStrategyV1 as ParameterServerStrategy
from mpidist.strategies import TPUStrategy
from mpidist.strategies.v1 import CentralStorageStrategyV1 as CentralStorageStrategy
from mpidist.strategies.v1 import MultiWorkerMirroredStrategyV1 as MultiWorkerMirroredStrategy

CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
]
