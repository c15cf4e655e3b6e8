"""The names of ``tf.distribute.coordinator`` and ``tf.distribute.experimental.coordinator``."""

from mpidist.parameter_server.dispatcher import PerWorkerDataset, PerWorkerValues, RemoteValue, RemoteValueStatus
from mpidist.parameter_server.parameter_server_strategy import ClusterCoordinator
from mpidist.parameter_server.server import current_worker_index as experimental_get_current_worker_index

__all__ = [
    "ClusterCoordinator",
    "PerWorkerDataset",
    "PerWorkerValues",
    "RemoteValue",
    "RemoteValueStatus",
    "experimental_get_current_worker_index",
]
