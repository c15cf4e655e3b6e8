"""The channel of all ranks, on which they agree to make communicators and strategies.

It lives as long as any communicator of all ranks, so a program that has closed them all may end MPI in its own way.
"""

from __future__ import annotations

from mpidist.collectives.channel.channel import Channel, open_channels
from mpidist.collectives.channel.operation import Operation, describe
from mpidist.collectives.channel.shutdown import check_not_forked
from mpidist.collectives.mpi.waiting import Comm
from mpidist.collectives.observe.attach import observe_waits
from mpidist.topology import import_mpi, world_topology


class WorldChannel:
    """The channel of all ranks, and the number of its users."""

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._users = 0

    def agree_to_make(self, product: str, comm: Comm | None) -> bool:
        """Wait until all ranks of the job are about to make ``product`` (collective).

        Return whether all ranks were asked, which a ``comm`` of some ranks cannot do. Then ``release`` must follow when
        the product is closed.
        """
        check_not_forked()
        mpi = import_mpi()
        if comm is not None and mpi.Comm.Compare(comm, mpi.COMM_WORLD) == mpi.UNEQUAL:
            return False
        if mpi.COMM_WORLD.Get_size() == 1 or (comm is None and world_topology().world.Get_size() == 1):
            return False
        if self._channel is not None and self._channel not in open_channels:
            # It lost a rank, and so did all its users.
            self._channel, self._users = None, 0
        making = describe(f"making a {product}", "" if comm is None else "a communicator of all ranks")
        if self._channel is None:
            self._channel = Channel(world_topology().world, None, "channel of all ranks", "all ranks")
            observe_waits(self._channel)
        self._users += 1
        try:
            self._channel.run(Operation(self._channel.open(making), making))
        except BaseException:
            self.release()
            raise
        return True

    def release(self) -> None:
        """Remove one user. The last one closes the channel (collective)."""
        self._users -= 1
        if self._users == 0 and self._channel is not None and self._channel.close(lambda: None):
            self._channel = None


world_channel = WorldChannel()
