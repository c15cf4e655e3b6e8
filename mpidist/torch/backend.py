"""The backend of torch 2.14 and newer, which mixes with those of other devices.

Programs get its works from torch, which lets ``wait`` and ``get_future`` through and answers the rest itself
(PyWorkHolder): ``is_completed`` is never True there, and ``source_rank`` an error. ``get_future().done()`` is right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.distributed_c10d import default_pg_timeout

from mpidist.collectives import Communicator
from mpidist.core.options import CommunicationOptions
from mpidist.torch.foreign import Foreign
from mpidist.torch.operations import Operations

_Backend: Foreign = torch._C._distributed_c10d.Backend
can_be_used = hasattr(_Backend, "supports_reconfigure")
"""Whether this torch lets Python be a backend."""
# Under TORCH_DISTRIBUTED_DEBUG=DETAIL torch keeps its half of a backend alive, and not the Python object.
_open: list[MpidistBackend] = []


def are_of_other_backends(options: Foreign) -> bool:
    """Return whether options are meant for the other backends of a group.

    torch hands the same to all of them.
    """
    return can_be_used and isinstance(options, _Backend.Options)


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
        _open.append(self)

    def __repr__(self) -> str:
        return f"<MpidistBackend rank {self.comm.rank} of {self.comm.size}>"

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the backend."""
        return self.backend_name

    def _get_sequence_number_for_group(self) -> int:
        # Compared under TORCH_DISTRIBUTED_DEBUG=DETAIL.
        return self._calls.count

    # Methods in place of these properties, and those of torch, would call themselves without end.
    @property
    def supports_splitting(self) -> bool:
        """Whether it makes groups from groups by itself."""
        return True

    @property
    def supports_coalescing(self) -> bool:
        """Whether it collects calls to carry them out together."""
        return False

    @property
    def supports_shrinking(self) -> bool:
        """Whether it makes a group of the ranks that are left."""
        return True

    @property
    def supports_reconfigure(self) -> bool:
        """Whether its ranks can become others."""
        # Nothing gives a Backend of Python another rank and size than it was made with.
        return False

    @property
    def supports_window(self) -> bool:
        """Whether ranks reach into one another's memory."""
        return False

    @property
    def supports_time_estimate(self) -> bool:
        """Whether it tells how long a call would take."""
        return False

    # Its name from torch 2.15 on.
    _supports_time_estimate = supports_time_estimate

    @property
    def options(self) -> Foreign:
        """The options that torch makes groups of this one with."""
        return _Backend.Options(self.backend_name, self.timeout)

    def split(self, store: Foreign, ranks: Sequence[int], opts: Foreign) -> MpidistBackend:
        """Return a backend of some ranks, this one among them (collective over them)."""
        return MpidistBackend(self.comm.group(ranks), self.backend_name, self._options_of_another(opts))

    def shrink(
        self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: Foreign = None
    ) -> MpidistBackend:
        """Return a backend of the other ranks, and leave this one (collective over them).

        What is on its way ends with an error, whatever the flags say: the excluded ranks take no part in it.
        """
        del shrink_flags
        left = [rank for rank in range(self.comm.size) if rank not in ranks_to_exclude]
        self.abort()
        return MpidistBackend(self.comm.group(left), self.backend_name, self._options_of_another(opts_override))

    def _options_of_another(self, given: Foreign) -> CommunicationOptions | None:
        # torch hands on the default where the program has not said another.
        is_said = given is not None and given._timeout != default_pg_timeout
        return self._calls.options_within(given._timeout) if is_said else self._calls.options

    def abort(self) -> None:
        """Leave the group without the other ranks; works end with an error (local)."""
        super().abort()
        self._let_go()

    def _let_go(self) -> None:
        if self in _open:
            _open.remove(self)

    def shutdown(self) -> None:
        """Finish the works on their way, and free the communicator (collective)."""
        self._let_go()
        self.close()
