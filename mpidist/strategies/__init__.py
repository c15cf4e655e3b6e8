"""The synchronous strategies and their public methods.

Importing the room registers the default strategy, and has libraries that know no scopes hooked into.
"""

from mpidist.core.lazy import hook_into
from mpidist.strategies.base import ReplicaContext, Strategy, check_adopts_in_scope
from mpidist.strategies.central_storage import CentralStorageStrategy
from mpidist.strategies.default import default_strategy
from mpidist.strategies.mirrored import MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy
from mpidist.strategies.strategy_extended import StrategyExtended

hook_into("keras", "mpidist.keras.model_hooks")
hook_into("torch", "mpidist.torch.step_checks")
del hook_into

__all__ = [
    "CentralStorageStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ReplicaContext",
    "Strategy",
    "StrategyExtended",
    "check_adopts_in_scope",
    "default_strategy",
]
