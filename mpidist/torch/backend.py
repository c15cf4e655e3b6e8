"""The backend of torch 2.14 and newer, which mixes with those of other devices.

Written after torch's sources and not tried: torch 2.13, which the tests run with, has no Backend to be subclassed.
"""

from __future__ import annotations

import torch

from mpidist.collectives import Communicator
from mpidist.core.options import CommunicationOptions
from mpidist.torch.foreign import Foreign
from mpidist.torch.operations import Operations

_Backend: Foreign = torch._C._distributed_c10d.Backend
can_be_used = hasattr(_Backend, "supports_reconfigure")
"""Whether this torch lets Python be a backend."""


class MpidistBackend(Operations, _Backend):
    """A backend over a Communicator.

    Args:
        comm: Its ranks.
        name: Of the backend, as it was asked for.
        options: Laid over those of the communicator.
    """

    def __init__(self, comm: Communicator, name: str, options: CommunicationOptions | None = None) -> None:
        _Backend.__init__(self, comm.rank, comm.size)
        Operations.__init__(self, comm, name, options)

    def __repr__(self) -> str:
        return f"<MpidistBackend rank {self.comm.rank} of {self.comm.size}>"

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the backend."""
        return self.backend_name

    # As methods these two would call themselves without end.
    @property
    def supports_splitting(self) -> bool:
        """Whether it makes groups from groups by itself."""
        return False

    @property
    def supports_coalescing(self) -> bool:
        """Whether it collects calls to carry them out together."""
        return False

    def shutdown(self) -> None:
        """Finish the works on their way, and free the communicator (collective)."""
        self.close()
