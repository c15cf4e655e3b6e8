"""Bytes between ranks: the Communicator, its plans, algorithms and work handles; no nests, no strategies."""

from mpidist.collectives.channel.work import FinishedWork, PartOfWork, Work
from mpidist.collectives.communicator import Communicator

__all__ = ["Communicator", "FinishedWork", "PartOfWork", "Work"]
