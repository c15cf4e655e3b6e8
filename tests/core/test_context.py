"""The stack of contexts, where a library calls back in a thread of its own."""

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
    """Ask in a thread that threading knows nothing of, as those of a library of C++."""
    found: SimpleQueue[Frame | None] = SimpleQueue()
    _thread.start_new_thread(lambda: found.put(replica_frame_elsewhere()), ())
    return found.get(timeout=10)


def test_a_thread_of_a_library_works_for_the_replica_that_waits() -> None:
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


def test_threads_of_the_program_have_contexts_of_their_own() -> None:
    found: list[Frame | None] = []

    def replica() -> None:
        thread = threading.Thread(target=lambda: found.append(replica_frame_elsewhere()))
        thread.start()
        thread.join()

    with mpidist.OneDeviceStrategy("cpu:0") as strategy:
        strategy.run(replica)
    assert found == [None]
