"""Faults of ranks: killed, stopped for a while, and asked to end by signals."""

from __future__ import annotations

import os
import signal
import time

from tests.chaos.job import ULFM, Ended, NotReachedError
from tests.chaos.trial import FailedError, Found, Trial, last_step

# The second of two ranks is killed so long after the first: at once, or while the others go on without it.
_LONGEST_GAP = 0.6
_LONGEST_START = 0.8
# At least; in the short form only until the others have said that it does not answer.
_PAUSE = 10.0
_WARN_AFTER = 1.0
PREEMPTED = 42


def kill(trial: Trial) -> Found:
    """Kill a rank after a random step; the others go on."""
    victim, step = trial.any_rank(), trial.any_step()
    with trial.start("--elastic", flags=ULFM) as job:
        killed = _kill(job.until_step(victim, step))
        ended = job.end()
    return went_on(trial, ended, killed, f"rank {victim} after step {step}")


def kill_two(trial: Trial) -> Found:
    """Kill one rank after a random step, and another a moment later; the others go on."""
    first, second = trial.random.sample(range(trial.ranks), 2)
    step, gap = trial.any_step(), trial.random.choice([0.0, trial.random.uniform(0, _LONGEST_GAP)])
    with trial.start("--elastic", flags=ULFM) as job:
        one, two = (job.until(lambda note, rank=rank: note.rank == rank).pid for rank in (first, second))
        job.until_step(first, step)
        killed = _kill(one)
        time.sleep(gap)
        killed = _kill(two, or_gone=True) or killed
        ended = job.end()
    return went_on(trial, ended, killed, f"ranks {first} and {second} after step {step}, {gap:.2f} s apart")


def kill_at_start(trial: Trial) -> Found:
    """Kill a rank within the first moments of the program, mostly before the first step; the others train."""
    victim, wait = trial.any_rank(), trial.random.uniform(0, _LONGEST_START)
    with trial.start("--elastic", flags=ULFM) as job:
        pid = job.until(lambda note: note.rank == victim and note.what == "starts").pid
        time.sleep(wait)
        killed = _kill(pid)
        ended = job.end()
    return went_on(trial, ended, killed, f"rank {victim} {wait:.2f} s after its start")


def kill_and_resume(trial: Trial) -> Found:
    """Kill a rank of a job that cannot go on without it; the launcher ends the job, and it is started again."""
    victim, step = trial.any_rank(), trial.any_step()
    with trial.start("--resume") as job:
        _kill(job.until_step(victim, step))
        ended = job.end()
    trial.check_clear_error(ended, r"signal 9|rank \d+ .*(lost|ended|gone)")
    return trial.resume(f"rank {victim} after step {step}", ended)


def stop(trial: Trial) -> Found:
    """Stop a rank for a while; the others say that it does not answer, and all go on as soon as it does."""
    victim, step = trial.any_rank(), trial.any_step()
    is_elastic = trial.random.random() < 0.5
    options, flags = (("--elastic",), ULFM) if is_elastic else ((), ())
    with trial.start(*options, flags=flags, env={"MPIDIST_WARN_AFTER": f"{_WARN_AFTER:g}"}) as job:
        pid = job.until_step(victim, step)
        os.kill(pid, signal.SIGSTOP)
        stopped = time.monotonic()
        time.sleep(0 if trial.is_short else _PAUSE)
        job.until_printed(f"rank {victim}: gave no answer")
        before = last_step(job.notes())
        os.kill(pid, signal.SIGCONT)
        continued = time.monotonic()
        ended = job.end()
    trial.check_right(ended)
    first = next(note.time for note in ended.notes if note.what == "step" and note.step > before)
    pause = continued - stopped
    detail = f"rank {victim} after step {step}, {pause:.1f} s{', with ULFM' if is_elastic else ''}"
    return Found("went on", detail, 0, first - continued)


def ask_to_end(trial: Trial) -> Found:
    """Send a signal to one rank; all save after the same step, end with code 42, and the next run goes on there."""
    victim, step = trial.any_rank(), trial.any_step()
    number = trial.random.choice([signal.SIGTERM, signal.SIGUSR1])
    detail = f"{number.name} to rank {victim} after step {step}"
    with trial.start("--resume") as job:
        os.kill(job.until_step(victim, step), number)
        ended = job.end()
    if ended.returncode == 0:
        # It was through before the ranks had agreed.
        trial.check_right(ended)
        return Found("went on", detail, 0)
    trial.check_clear_error(ended, "preempted: saved")
    if ended.returncode != PREEMPTED:
        raise FailedError(f"the job ended with code {ended.returncode}; expected {PREEMPTED}\n{ended.stderr}")
    found = trial.resume(detail, ended)
    if found.lost:
        raise FailedError(f"{found.lost} steps were done after the one that was saved\n{ended.stderr}")
    return found


def interrupt(trial: Trial) -> Found:
    """Send SIGINT to one rank: its traceback ends the job, and the next run goes on from the checkpoint."""
    victim, step = trial.any_rank(), trial.any_step()
    with trial.start("--resume") as job:
        os.kill(job.until_step(victim, step), signal.SIGINT)
        ended = job.end()
    trial.check_clear_error(ended, "KeyboardInterrupt")
    return trial.resume(f"rank {victim} after step {step}", ended)


def _kill(pid: int, or_gone: bool = False) -> float:
    """Return when it was killed; 0.0 where it had been gone."""
    killed = time.monotonic()
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        if or_gone:
            return 0.0
        raise NotReachedError("the rank had come to its end before it was killed") from None
    return killed


def went_on(trial: Trial, ended: Ended, killed: float, detail: str) -> Found:
    """Insist that those that were left came to the right end; say what they lost, and how soon they went on."""
    trial.check_right(ended)
    begun = [note for note in ended.notes if note.what == "begins" and note.time > killed]
    if not begun:
        raise FailedError(f"nobody began again after the kill, and the job came to its end\n{ended.stderr}")
    again = begun[0].time
    done = last_step([note for note in ended.notes if note.time < again])
    lost = max(0, done - min(note.step for note in begun))
    first = next((note.time for note in ended.notes if note.what == "step" and note.time > again), None)
    return Found("went on", detail, lost, None if first is None else first - killed)
