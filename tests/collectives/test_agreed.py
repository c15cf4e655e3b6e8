"""Errors that all ranks raise together."""

from __future__ import annotations

import pytest

from mpidist import Communicator
from mpidist.collectives.channel.operation import Operation, describe
from mpidist.collectives.mpi.exchange import first_does


class TwoArgumentsError(Exception):
    """Can be pickled, and not be read again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("no such file"), ValueError),
        (TwoArgumentsError(1, 2), RuntimeError),
        (type("Local", (Exception,), {})("of a function"), RuntimeError),
    ],
    ids=["plain", "of two arguments", "of a local class"],
)
def test_all_raise_the_error_of_the_first_rank(error: Exception, kind: type[Exception]) -> None:
    def fail() -> None:
        raise error

    with Communicator() as comm:
        with pytest.raises(kind, match=str(error)):
            comm._channel.run(Operation(first_does(comm._channel.comm, fail), describe("a test")))
        comm.barrier()
