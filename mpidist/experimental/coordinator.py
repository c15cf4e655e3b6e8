"""The names of ``tf.distribute.experimental.coordinator``, which are those of ``mpidist.coordinator``."""

from mpidist.parameter_server.coordinator import ClusterCoordinator
from mpidist.parameter_server.remote_value import PerWorkerDataset, PerWorkerValues, RemoteValue, RemoteValueStatus
from mpidist.parameter_server.worker_loop import current_worker_index as experimental_get_current_worker_index

__all__ = [
    "ClusterCoordinator",
    "PerWorkerDataset",
    "PerWorkerValues",
    "RemoteValue",
    "RemoteValueStatus",
    "experimental_get_current_worker_index",
]
