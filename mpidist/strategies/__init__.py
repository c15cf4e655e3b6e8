"""The synchronous strategies, and what users call on them; importing the room registers the default strategy."""

from mpidist.strategies.central_storage import CentralStorageStrategy
from mpidist.strategies.default import default_strategy
from mpidist.strategies.extended import StrategyExtended
from mpidist.strategies.mirrored import MirroredStrategy, OneDeviceStrategy
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpidist.strategies.replica_context import ReplicaContext
from mpidist.strategies.strategy import Strategy

__all__ = [
    "CentralStorageStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ReplicaContext",
    "Strategy",
    "StrategyExtended",
    "default_strategy",
]
