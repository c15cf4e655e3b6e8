"""Every error of mpidist's own, to be imported from one place: public names only.

Wrong arguments raise ``ValueError``, ``TypeError`` or ``RuntimeError``, as in TensorFlow.

>>> issubclass(RankLostError, PeerError)
True
"""

from typing import TYPE_CHECKING

from mpidist.core.errors import (
    AlgorithmError,
    CollectiveTimeoutError,
    DeviceError,
    LaunchError,
    MessageTimeoutError,
    MismatchError,
    NcclFailure,
    NonFiniteError,
    OutOfRangeError,
    PeerError,
    RankLostError,
    RequestTimeoutError,
)
from mpidist.core.files import NotAFileError
from mpidist.core.lazy import on_first_use
from mpidist.topology.launchers import LauncherVariableError

if TYPE_CHECKING:
    from mpidist.checkpoint.format import DamagedCheckpointError
    from mpidist.parameter_server.pickling import CannotTravelError
else:
    __getattr__, __dir__ = on_first_use(
        __name__,
        {
            "mpidist.checkpoint.format": "DamagedCheckpointError",
            "mpidist.parameter_server.pickling": "CannotTravelError",
        },
    )

__all__ = [
    "AlgorithmError",
    "CannotTravelError",
    "CollectiveTimeoutError",
    "DamagedCheckpointError",
    "DeviceError",
    "LaunchError",
    "LauncherVariableError",
    "MessageTimeoutError",
    "MismatchError",
    "NcclFailure",
    "NonFiniteError",
    "NotAFileError",
    "OutOfRangeError",
    "PeerError",
    "RankLostError",
    "RequestTimeoutError",
]
