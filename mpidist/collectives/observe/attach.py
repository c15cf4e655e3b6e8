"""Attaches the observers to a new channel."""

from __future__ import annotations

from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.observe.hangs import HangObserver
from mpidist.collectives.observe.stragglers import straggler_watch
from mpidist.collectives.rpc import service
from mpidist.core import settings


def observe_channel(channel: Channel) -> None:
    """Add all observers to a channel (collective)."""
    # Imported late, because few jobs are recorded.
    if settings.REPORT.read() or settings.TRACE.read() or settings.FLIGHT_RECORD.read():
        from mpidist.collectives.observe.recorder import record_channel

        record_channel(channel)
    observe_waits(channel)


def observe_waits(channel: Channel) -> None:
    """Add the observers that show waits: the status file, and hang reports.

    Hang reports need several ranks, and threads that may call MPI.
    """
    if settings.STATUS.read() is not None or settings.METRICS.read() is not None:
        from mpidist.collectives.observe.job_status import report_channel

        report_channel(channel)
    if channel.size > 1 and settings.GUARD.read() and service.is_allowed():
        observer = HangObserver(channel)
        channel.observers.add(observer)
        straggler_watch().add(channel, observer)
