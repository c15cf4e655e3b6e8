"""The names of ``tf.compat.v1.distribute.experimental``."""

from mpidist.compat.tpu import TPUStrategy
from mpidist.compat.v1_strategies import CentralStorageStrategyV1 as CentralStorageStrategy
from mpidist.compat.v1_strategies import MultiWorkerMirroredStrategyV1 as MultiWorkerMirroredStrategy
from mpidist.compat.v1_strategies import ParameterServerStrategyV1 as ParameterServerStrategy
from mpidist.core.options import CollectiveHints, CommunicationImplementation, CommunicationOptions

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
