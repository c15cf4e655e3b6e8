"""The replica context in threads of other libraries."""

from __future__ import annotations

import _thread
import threading
from queue import SimpleQueue
from typing import Any

import pytest

import mpidist
from mpidist.core.context import Frame, replica_frame_elsewhere

pytestmark = pytest.mark.one_rank


def called_back() -> Frame | None:
    """Return the frame in a thread that threading does not know, like those of a C++ library."""
    found: SimpleQueue[Frame | None] = SimpleQueue()
    _thread.start_new_thread(lambda: found.put(replica_frame_elsewhere()), ())
    return found.get(timeout=10)


def test_thread_of_a_library_gets_the_replica() -> None:
    with mpidist.OneDeviceStrategy("cpu:0") as strategy:

        def replica() -> Any:
            frame = called_back()
            assert frame is not None
            assert replica_frame_elsewhere() is None
            return frame.replica_context is mpidist.get_replica_context()

        assert strategy.run(replica)
        with strategy.scope():
            assert called_back() is None
    assert called_back() is None


def test_thread_of_the_program_gets_no_replica() -> None:
    found: list[Frame | None] = []

    def replica() -> None:
        thread = threading.Thread(target=lambda: found.append(replica_frame_elsewhere()))
        thread.start()
        thread.join()

    with mpidist.OneDeviceStrategy("cpu:0") as strategy:
        strategy.run(replica)
    assert found == [None]
