"""Who keeps the others waiting: verdicts about simulated clocks, and about real ranks."""

from __future__ import annotations

import numpy as np
import pytest

from mpidist.collectives.observe.lateness import (
    CHECKPOINT_PHASE,
    COMPUTE_PHASE,
    INPUT_PHASE,
    KEPT_SECONDS,
    LateRanks,
    Sampler,
    Samples,
    find_straggler,
    moving_share,
    slow_link,
)
from mpidist.collectives.observe.link_probe import LinkTime

RANKS, RANKS_PER_HOST, STEP = 64, 8, 0.02


def job(
    seconds=40.0, *, ranks=RANKS, step=STEP, noise=0.05, seed=0, late=(), by=0.0, kind="compute", steps=None, rows=1.0
):
    """Return the samples of a simulated job. ``late`` ranks take ``by`` seconds longer in ``steps``."""
    random = np.random.default_rng(seed)
    clock, number = 0.0, 0
    spent = np.zeros((ranks, KEPT_SECONDS + 1 + int(seconds), 5))
    while clock < seconds:
        own = step * (1 + noise * random.exponential(size=ranks))
        is_late = np.isin(np.arange(ranks), late) & (steps is None or number in steps)
        own[is_late] += by
        end = clock + own.max()
        second = int(end)
        spent[:, second, 0] += own.max() - own
        spent[:, second, 4] += 1e-3
        if kind != "compute":
            spent[is_late, second, {"input": 2, "checkpoint": 3}[kind]] += by
        clock, number = end, number + 1
    kept = spent[:, max(0, int(seconds) - KEPT_SECONDS) : int(seconds)]
    numbers = np.minimum(np.round(kept * 1000), 65535).astype(np.uint16)
    return {
        rank: Samples(
            rank=rank,
            host=f"node{rank // RANKS_PER_HOST}",
            second=1_000_000 + int(seconds),
            steps=number,
            rows_per_step=rows * 64 if rank in late else 64.0,
            numbers=numbers[rank].tobytes(),
        )
        for rank in range(ranks)
    }


@pytest.mark.parametrize("step", [0.002, 0.02, 0.3, 2.0])
def test_one_late_rank_is_named(step):
    verdict = find_straggler(job(128 if step > 1 else 60, step=step, late=[5], by=max(0.005, step / 4)))
    assert verdict is not None
    assert (verdict.ranks, verdict.hosts, verdict.phase) == ((5,), ("node0",), COMPUTE_PHASE)
    assert verdict.frequency > 0.9
    assert verdict.milliseconds == pytest.approx(1e3 * max(0.005, step / 4), rel=0.3)


def test_the_late_one_of_two_ranks_is_named():
    verdict = find_straggler(job(ranks=2, late=[1], by=0.005))
    assert verdict is not None
    assert verdict.ranks == (1,)


def test_a_late_host_is_named():
    verdict = find_straggler(job(late=range(8, 16), by=0.006))
    assert verdict is not None
    assert (verdict.ranks, verdict.hosts, verdict.is_host) == (tuple(range(8, 16)), ("node1",), True)
    assert str(verdict).startswith("host node1 (ranks 8-15) is ")


@pytest.mark.parametrize(("kind", "phase"), [("input", INPUT_PHASE), ("checkpoint", CHECKPOINT_PHASE)])
def test_the_phase_is_named(kind, phase):
    verdict = find_straggler(job(late=[3], by=0.01, kind=kind))
    assert verdict is not None
    assert verdict.phase == phase


def test_more_rows_are_named():
    verdict = find_straggler(job(late=[3], by=0.006, rows=1.3))
    assert verdict is not None
    assert verdict.more_rows == pytest.approx(0.3)
    assert "with 30% more rows than other ranks" in str(verdict)


def test_the_step_since_which_it_is_late_is_named():
    verdict = find_straggler(job(60, late=[9], by=0.02, steps=range(1200, 10**6)))
    assert verdict is not None
    assert verdict.since == pytest.approx(1200, abs=150)


def test_a_rank_that_was_late_is_forgotten():
    late_for_a_while = {"late": [9], "by": 0.01, "steps": range(500, 1000)}
    assert find_straggler(job(28, **late_for_a_while)) is not None
    assert find_straggler(job(60, **late_for_a_while)) is None


def test_a_verdict_takes_at_most_30_seconds():
    assert find_straggler(job(12, late=[5], by=0.005)) is not None


def test_a_job_may_begin_without_steps() -> None:
    samples = job(30, late=[5], by=0.005)
    idle = np.zeros((KEPT_SECONDS - 30, 5), np.uint16).tobytes()
    verdict = find_straggler({rank: each._replace(numbers=idle + each.numbers) for rank, each in samples.items()})
    assert verdict is not None
    assert verdict.ranks == (5,)


@pytest.mark.parametrize("noise", [0.05, 0.5])
def test_healthy_jobs_get_no_verdict(noise):
    assert not any(find_straggler(job(60, noise=noise, seed=seed)) for seed in range(20))


def test_pauses_get_no_verdict():
    assert find_straggler(job(late=[5], by=0.5, steps=range(400, 404))) is None


def test_ranks_sampled_at_different_times_are_aligned():
    samples = job(late=[5], by=0.01)
    old = samples[7]
    samples[7] = old._replace(second=old.second - 3, numbers=old.numbers[: -3 * 10])
    verdict = find_straggler(samples)
    assert verdict is not None
    assert verdict.ranks == (5,)


def test_samples_begin_again_after_the_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [1000.0, 1001.0, 1002.0, 9000.0, 9001.0, 1003.0, 1003.2, 1004.0]
    monkeypatch.setattr("mpidist.collectives.observe.lateness.time.time", lambda: times[0])
    sampler = Sampler()
    kept = []
    while len(times) > 1:
        times.pop(0)
        sampler.sample()
        kept.append((sampler.samples().second, len(sampler.samples().numbers) // 10))
    assert kept == [(1001, 1), (1002, 2), (9000, 0), (9001, 1), (1003, 0), (1003, 0), (1004, 1)]


def test_clocks_that_differ_by_hours_give_no_verdict() -> None:
    samples = job(late=[5], by=0.01)
    samples[7] = samples[7]._replace(second=samples[7].second + 200)
    assert find_straggler(samples) is None
    assert moving_share(samples) == moving_share({}) == 0.0


def test_ranks_are_those_of_the_job() -> None:
    samples = job(ranks=4, late=[1], by=0.01)
    verdict = find_straggler({rank: each._replace(rank=rank + 4) for rank, each in samples.items()})
    assert verdict is not None
    assert verdict.ranks == (5,)


def test_the_slow_way_of_a_link_is_named() -> None:
    hosts = {0: "node0", 2: "node1", 4: "node2"}
    fast = [LinkTime(0.01, rank, is_back) for rank in (2, 4) for is_back in (False, True)]
    assert slow_link(fast, hosts, 0.5) is None
    assert slow_link([], hosts, 0.5) is None
    verdict = slow_link([*fast[:-1], LinkTime(0.1, 4, True)], hosts, 0.5)
    assert verdict is not None
    assert (verdict.source, verdict.target) == ("node2", "node0")


def test_a_verdict_says_what_to_do():
    verdict = LateRanks((5,), ("node03",), False, COMPUTE_PHASE, 0.18, 0.92, 11.8, 1200, 0.0)
    assert str(verdict) == (
        "rank 5 (node03) is 11.8 ms late in 92% of steps, in compute, since step 1,200: 18% of the job's time. "
        "Next: `python -m mpidist doctor --burn 30` on node03"
    )
