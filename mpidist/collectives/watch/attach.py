"""The observers of a new channel: flight record, trace, report, status and guard."""

from __future__ import annotations

from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.observe.job_status import report_channel
from mpidist.collectives.observe.recorder import record_channel
from mpidist.collectives.watch.guard import Guard
from mpidist.collectives.watch.side_thread import side_thread
from mpidist.core import settings


def watch_channel(channel: Channel) -> None:
    """Add all of them to a channel (collective)."""
    record_channel(channel)
    guard_channel(channel)


def guard_channel(channel: Channel) -> None:
    """Add those that show where ranks wait: the status file, and a guard.

    A guard needs several ranks, and threads that may call MPI.
    """
    report_channel(channel)
    if channel.size > 1 and settings.GUARD.read() and side_thread.is_allowed():
        channel.observers.add(Guard(channel))
