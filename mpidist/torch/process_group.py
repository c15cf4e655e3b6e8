"""The process group of torch up to 2.13: a subclass of ProcessGroup."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from mpidist.collectives import Communicator
from mpidist.core.options import CommunicationOptions
from mpidist.core.text import skip_frames_of
from mpidist.torch.backend import MpidistBackend, are_of_other_backends, can_be_used
from mpidist.torch.foreign import Foreign
from mpidist.torch.groups import new_communicator
from mpidist.torch.operations import Operations

_ProcessGroup: Foreign = dist.ProcessGroup
skip_frames_of(torch.__file__)


class MpidistProcessGroup(Operations, _ProcessGroup):
    """A process group over a Communicator.

    Args:
        comm: Its ranks.
        name: Of the backend, as it was asked for.
        store: Of the group, from torch.
        options: Laid over those of the communicator.
    """

    def __init__(
        self, comm: Communicator, name: str, store: Foreign, options: CommunicationOptions | None = None
    ) -> None:
        _ProcessGroup.__init__(self, comm.rank, comm.size)
        Operations.__init__(self, comm, name, options)
        self._store = store
        self._group_name = self._group_desc = ""

    def __repr__(self) -> str:
        return f"<MpidistProcessGroup rank {self.comm.rank} of {self.comm.size}>"

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the backend."""
        return self.backend_name

    _get_backend_name = name = getBackendName

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the name that torch finds the group by."""
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Take the name that torch finds the group by."""
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """Return the program's description of the group."""
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - torch's name
        """Take the program's description of the group."""
        self._group_desc = desc

    def get_group_store(self) -> Foreign:
        """Return the store of the group."""
        return self._store

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Foreign = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Foreign = None,
    ) -> MpidistProcessGroup:
        """Return a group of some ranks, this one among them (collective over them)."""
        name = group_name or f"{self._group_name}:split:{ranks}"
        options = self._calls.options if timeout is None else self._calls.options_within(timeout)
        group = MpidistProcessGroup(
            self.comm.group(ranks), self.backend_name, dist.PrefixStore(f"{name}/", self._store), options
        )
        group.setGroupName(name)
        group.setGroupDesc(group_desc or "")
        return group

    def shutdown(self) -> None:
        """Finish the works on their way, and free the communicator (collective)."""
        self.close()


def create(name: str, given: Foreign, options: Foreign) -> Foreign:
    """Return the process group, or the backend, that torch asks for (collective over its ranks).

    Args:
        name: Of the backend, as it was asked for.
        given: torch's _DistributedBackendOptions.
        options: The ``pg_options`` of the program: CommunicationOptions, or None.
    """
    chosen = _options(given, options)
    comm = new_communicator(given, chosen)
    # Calls without options are the fastest, and those of the default group are in its communicator.
    own = chosen if given.global_ranks_in_group and chosen != CommunicationOptions() else None
    if can_be_used:
        return MpidistBackend(comm, name, own)
    return MpidistProcessGroup(comm, name, given.store, own)


def _options(given: Foreign, options: Foreign) -> CommunicationOptions:
    if are_of_other_backends(options):
        options = None
    if not (options is None or isinstance(options, CommunicationOptions)):
        raise TypeError(f"pg_options is {options!r}; expected None or mpidist.experimental.CommunicationOptions(...)")
    chosen: CommunicationOptions = CommunicationOptions() if options is None else options
    timeout: timedelta = given.timeout
    if chosen.timeout_seconds is not None or timeout == dist.default_pg_timeout:
        # MPIDIST_TIMEOUT holds where the program has not said another.
        return chosen
    return chosen.merge(CommunicationOptions(timeout_seconds=timeout.total_seconds()))
