"""Run parts in parallel, most on a core of their own so that waiting ranks do not disturb other parts."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.checks.parts import Part
from tests.support.ranks.jobs import JOB, ROOT, child_environment, end_all, gets_second_chance
from tests.support.speed import scaled

_LOOK_SECONDS, _TAKING_DOWN_SECONDS = 0.05, 30.0


@dataclass(frozen=True)
class Done:
    """A part that has ended. Its status is None if it ran past its time limit."""

    part: Part
    status: int | None
    wall_seconds: float
    cpu_seconds: float
    log: Path
    results: Path

    @property
    def has_failed(self) -> bool:
        """Whether the command failed or was ended."""
        return self.status != 0


class _Running:
    """A running part, which may use all cores of its places."""

    def __init__(self, part: Part, places: list[tuple[int, ...]], folder: Path) -> None:
        self.part, self.places = part, places
        cores = set().union(*places)
        self._log, self._results = (folder / f"{part.name.replace(' ', '-')}.{kind}" for kind in ("log", "json"))
        self._results.unlink(missing_ok=True)
        self._job = uuid.uuid4().hex
        command = [*part.command, *(["--results", str(self._results)] if part.is_pytest else [])]
        environment = child_environment({**part.environment, JOB: f"{os.environ.get(JOB, '')}{self._job}."})
        self._began = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )

    def ended(self) -> Done | None:
        """Return the outcome, or None while the part runs."""
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        seconds = time.monotonic() - self._began
        late = pid == 0 and seconds > scaled(self.part.seconds)
        if late:
            _, status, usage = self._stopped()
        elif pid == 0:
            return None
        self._process.returncode = os.waitstatus_to_exitcode(status)
        end_all(self._process, self._job)
        code = None if late else self._process.returncode
        return Done(self.part, code, seconds, usage.ru_utime + usage.ru_stime, self._log, self._results)

    def _stopped(self) -> tuple[int, int, resource.struct_rusage]:
        """End the command, with SIGKILL if it does not react."""
        self.ask_to_end()
        deadline = time.monotonic() + _TAKING_DOWN_SECONDS
        while time.monotonic() < deadline:
            if (found := os.wait4(self._process.pid, os.WNOHANG))[0] != 0:
                return found
            time.sleep(_LOOK_SECONDS)
        os.kill(self._process.pid, signal.SIGKILL)
        return os.wait4(self._process.pid, 0)

    def ask_to_end(self) -> None:
        """Send SIGTERM, because the part may have hosts or files to remove."""
        os.kill(self._process.pid, signal.SIGTERM)

    def end(self) -> None:
        """End the command and every process that it started."""
        _, status, _ = self._stopped()
        self._process.returncode = os.waitstatus_to_exitcode(status)
        end_all(self._process, self._job)


def _places() -> list[tuple[int, ...]]:
    """Return the places of parallel parts: one per core, and one with all cores.

    Tests of hangs and deadlines leave their core idle for a third of the time.
    """
    cores = sorted(os.sched_getaffinity(0))
    return sorted({*((core,) for core in cores), tuple(cores)})


def _places_for(part: Part, free: list[tuple[int, ...]], everything: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the free places that a part takes, or none if it must wait."""
    if part.takes_all_cores:
        return free if free == everything else []
    return [place for place in free if len(place) == 1 or not part.keeps_to_one_core][:1]


def run_parts(parts: Iterable[Part], folder: Path, tell: Callable[[Done], None]) -> list[Done]:
    """Run all parts, in their order if cores are free, write logs to ``folder``, and call ``tell`` as each one ends."""
    folder.mkdir(parents=True, exist_ok=True)
    waiting, running, done, again = list(parts), list[_Running](), list[Done](), list[Part]()
    free = all_places = _places()
    try:
        while waiting or running:
            for part in list(waiting):
                taken = _places_for(part, free, all_places)
                if taken:
                    waiting.remove(part)
                    free = [place for place in free if place not in taken]
                    running.append(_Running(part, taken, folder))
                elif part.takes_all_cores:
                    # Later parts would keep it waiting.
                    break
            time.sleep(_LOOK_SECONDS)
            for each in list(running):
                if (ended := each.ended()) is not None:
                    running.remove(each)
                    printed = ended.log.read_text(errors="replace")
                    if each.part not in again and gets_second_chance(ended.status, printed, each.part.name):
                        again.append(each.part)
                        running.append(_Running(each.part, each.places, folder))
                        continue
                    free = sorted([*free, *each.places])
                    done.append(ended)
                    tell(ended)
    finally:
        for each in running:
            each.ask_to_end()
        for each in running:
            each.end()
    return done
