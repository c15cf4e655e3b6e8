"""Pending: a checkpoint that a thread writes while the program goes on, and what becomes of errors in it."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from typing import Any

from mpidist.checkpoint.saving import Job, Record
from mpidist.core.errors import PeerError

_log = logging.getLogger("mpidist")
_untold: set[Pending] = set()


class Pending:
    """A job in a thread of its own, which makes no MPI call.

    The thread is none of the daemons: the interpreter waits for it before it ends.

    Args:
        job: What to write.
        path: The checkpoint, for messages.
    """

    def __init__(self, job: Job, path: str) -> None:
        self.job, self.path = job, path
        self._part_is_done = threading.Event()
        self._gave_up = threading.Event()
        self._record: Record = None
        self._result: Any = None
        self._is_whole = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=f"mpidist-checkpoint {path}")
        _untold.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no more threads; told to all ranks when they settle
            self._error = error
            self._part_is_done.set()

    def _work(self) -> None:
        job = self.job
        try:
            try:
                self._record = job.write_part()
                if job.rank > 0:
                    job.leave_note(self._record)
            finally:
                self._part_is_done.set()
            records = job.await_notes(self._record, self._gave_up.wait) if job.rank == 0 else None
            if records is not None:
                self._result = job.publish(records)
                self._is_whole = True
        except Exception as error:  # raised by result() or part(), or printed at exit
            self._error = error
            # Where other ranks may still be writing, settle() does it.
            if job.ranks == 1:
                job.discard()
        finally:
            self._part_is_done.set()
            job.arrays.clear()

    def part(self) -> Record:
        """Wait until this rank's part is written.

        Raises:
            Exception: What went wrong with it.
        """
        self._part_is_done.wait()
        if self.job.rank > 0:
            self._join()
        if self._error is not None:
            raise self._error
        return self._record

    def result(self) -> Any:
        """Wait until the checkpoint is there; on the first rank.

        Raises:
            Exception: What went wrong.
        """
        self._join()
        if self._error is not None:
            raise self._error
        return self._result

    def settle(self, failed: bool) -> None:
        """End the thread, once the ranks have told each other how it went; without effect where it has ended."""
        if failed:
            self._gave_up.set()
        self._join()
        if failed:
            self.job.discard()
        _untold.discard(self)

    def give_up(self) -> None:
        """End the thread without waiting for other ranks, and discard what is not whole; local."""
        self._gave_up.set()
        self._join()
        if self._is_whole:
            _log.info("mpidist: checkpoint %s was whole when it was given up, and is there", self.path)
        else:
            reason = self._error or PeerError("it was given up, as ranks that were to write parts of it are lost")
            self._error = reason
            self.job.discard()
            if self.job.rank == 0:
                _log.warning("mpidist: checkpoint %s was not written: %s", self.path, reason)
        _untold.discard(self)

    def _join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()


def finish_writing() -> None:
    """Wait until all that threads of this process write is on the disk; local.

    Raises:
        Exception: What went wrong with one of them; then it is told only here.
    """
    for pending in list(_untold):
        try:
            pending.result()
        except Exception:
            _untold.discard(pending)
            raise


def give_up_all() -> None:
    """End the saves of this process that its threads have not finished, since ranks are lost; local.

    What needs no other rank any more is finished. The others, which would wait for notes of ranks that are gone, are
    discarded, so that the next save under their names finds the place free; the first rank's log says so.
    """
    for pending in list(_untold):
        pending.give_up()


@atexit.register
def _tell_at_exit() -> None:
    """Treat errors that nobody has waited for as uncaught ones, which in a job of several ranks ends it."""
    for pending in list(_untold):
        _untold.discard(pending)
        try:
            pending.result()
        except Exception as error:
            sys.stderr.write(f"mpidist: checkpoint {pending.path} was not written, which its thread found out:\n")
            sys.excepthook(type(error), error, error.__traceback__)
