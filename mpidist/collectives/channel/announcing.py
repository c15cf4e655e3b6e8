"""Announcing: how an error of one rank alone reaches the others, in place of the collective that they wait in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.collectives.channel.handshake import FAILED
from mpidist.core.callsite import user_call_site
from mpidist.core.errors import AlgorithmError, CollectiveTimeoutError, MismatchError, PeerError

if TYPE_CHECKING:
    from mpidist.collectives.channel.channel import Channel

# All ranks raise these together, or the channel has been given up already.
COMMON_ERRORS = (AlgorithmError, MismatchError, PeerError, CollectiveTimeoutError)
# A rank that failed on its own tells the others, but does not keep its error back for longer than this.
_FAILURE_SECONDS = 2.0
# Set on an error that the other ranks have been told of.
_ANNOUNCED = "_mpidist_announced"


def announce(channel: Channel, error: Exception, doing: str) -> None:
    """Do what ``Channel.announce`` says."""
    nobody_listens = channel.size == 1 or not channel.is_usable
    if nobody_listens or isinstance(error, COMMON_ERRORS) or hasattr(error, _ANNOUNCED):
        return
    setattr(error, _ANNOUNCED, True)
    call_site = user_call_site()
    news = channel.handshake.signal(FAILED, f"raised {type(error).__name__}: {error}", call_site)
    work = channel.submit(news, f"telling the other ranks of {type(error).__name__} in {doing}", call_site)
    try:
        channel.complete(work, _FAILURE_SECONDS)
    except TimeoutError:
        # They are busy. The news waits in the queue for their next call, or for the end of this program.
        return
