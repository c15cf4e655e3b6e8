"""Attaches the observers to a new channel."""

from __future__ import annotations

from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.observe.hangs import HangObserver
from mpidist.collectives.observe.job_status import report_channel
from mpidist.collectives.observe.recorder import record_channel
from mpidist.collectives.observe.stragglers import straggler_watch
from mpidist.collectives.rpc import service
from mpidist.core import settings


def observe_channel(channel: Channel) -> None:
    """Add all observers to a channel (collective)."""
    record_channel(channel)
    observe_waits(channel)


def observe_waits(channel: Channel) -> None:
    """Add the observers that show waits: the status file, and hang reports.

    Hang reports need several ranks, and threads that may call MPI.
    """
    report_channel(channel)
    if channel.size > 1 and settings.GUARD.read() and service.is_allowed():
        observer = HangObserver(channel)
        channel.observers.add(observer)
        straggler_watch().add(channel, observer)
