"""Who looks on at a new channel: the trace and the flight record where settings ask for them, and the guard."""

from __future__ import annotations

from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.watch.flight_record import FlightObserver
from mpidist.collectives.watch.guard import Guard
from mpidist.collectives.watch.recorder import recorder_for
from mpidist.collectives.watch.side_thread import side_thread
from mpidist.collectives.watch.trace import ChannelTrace
from mpidist.core import settings


def watch_channel(channel: Channel) -> None:
    """Have the collectives of a channel be looked at as settings say (collective)."""
    recorder = recorder_for(channel.comm)
    if recorder is not None:
        if recorder.makes_spans:
            channel.observers.add(ChannelTrace(recorder, channel.name))
        if recorder.flight is not None:
            channel.observers.add(FlightObserver(recorder.flight, channel.name))
    guard_channel(channel)


def guard_channel(channel: Channel) -> None:
    """Have ranks that wait on a channel find out for whom, where there can be a thread for that."""
    if channel.size > 1 and settings.GUARD.read() and side_thread.is_allowed():
        channel.observers.add(Guard(channel))
