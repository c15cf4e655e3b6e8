"""Bytes between ranks: the Communicator, its plans, algorithms and work handles; no nests, no strategies."""

from mpidist.collectives.channel.mismatch import Advice
from mpidist.collectives.channel.observers import Chunk, Observer
from mpidist.collectives.channel.operation import FinishedWork, Operation, PartOfWork, Work
from mpidist.collectives.communicator import Communicator

__all__ = ["Advice", "Chunk", "Communicator", "FinishedWork", "Observer", "Operation", "PartOfWork", "Work"]
