"""The observers of a new channel: trace, flight record, status and guard, as settings say."""

from __future__ import annotations

from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.observe.hangs import HangObserver
from mpidist.collectives.rpc import service
from mpidist.collectives.watch.channel_trace import ChannelTrace
from mpidist.collectives.watch.flight_record import FlightObserver
from mpidist.collectives.watch.recorder import recorder_for
from mpidist.collectives.watch.status_writer import watch_status
from mpidist.core import settings


def watch_channel(channel: Channel) -> None:
    """Add the observers that settings ask for to a channel (collective)."""
    recorder = recorder_for(channel.comm)
    if recorder is not None:
        if recorder.makes_spans:
            channel.observers.add(ChannelTrace(recorder, channel.name))
        if recorder.flight is not None:
            core = channel.node.core
            channel.observers.add(FlightObserver(recorder.flight, channel.name, core), sees_short=core is not None)
    guard_channel(channel)


def guard_channel(channel: Channel) -> None:
    """Add those that say where ranks wait: the status file, and a guard.

    That takes several ranks, and threads that may call MPI.
    """
    watch_status(channel)
    if channel.size > 1 and settings.GUARD.read() and service.is_allowed():
        channel.observers.add(HangObserver(channel))
