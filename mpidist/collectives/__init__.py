"""Bytes between ranks: the Communicator, its plans, algorithms and work handles; no nests, no strategies."""

from mpidist.collectives.communicator import Communicator
from mpidist.collectives.work import FinishedWork, PartOfWork, Work

__all__ = ["Communicator", "FinishedWork", "PartOfWork", "Work"]
