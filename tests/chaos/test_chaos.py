"""The short form: a few trials of each fault, with seeds that are new each time and are printed."""

from __future__ import annotations

import random

import pytest

from tests.chaos.driver import try_fault
from tests.chaos.faults import FAULTS
from tests.chaos.report import FAILED
from tests.chaos.trial import Reference, train_undisturbed

pytestmark = [pytest.mark.jobs, pytest.mark.long, pytest.mark.one_rank, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return train_undisturbed(tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.short_times])
def test_every_committed_step_is_there_in_the_end(
    name: str, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> None:
    why = FAULTS[name].missing()
    if why is not None:
        pytest.skip(why)
    first = random.SystemRandom().randrange(10**6)
    for seed in range(first, first + FAULTS[name].short_times):
        outcome = try_fault(name, seed, reference, tmp_path_factory.mktemp("chaos"), is_short=True)
        again = f"repeat: python -m tests.chaos --short --only {name} --times 1 --seed {seed}"
        assert outcome.outcome != FAILED, f"{again}\n{outcome.detail}"
