"""What failures cost by simulation is what Daly's formula says, and no other interval costs less."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.suite.faults import Costs, daly_interval, elastic_share, predicted_share, simulate, simulated_share

pytestmark = pytest.mark.one_rank

HOUR, DAY = 3600.0, 86400.0


@pytest.mark.parametrize("mtbf", [HOUR, 8 * HOUR, 10 * DAY])
@pytest.mark.parametrize("save", [5.0, 60.0])
def test_the_simulation_agrees_with_the_formula(save: float, mtbf: float) -> None:
    costs = Costs(save=save, restart=300.0)
    for interval in (300.0, daly_interval(save, mtbf)):
        shares = [simulated_share(300, interval, mtbf, costs, random.Random(seed)) for seed in range(30)]
        assert statistics.mean(shares) == pytest.approx(predicted_share(interval, mtbf, costs), abs=0.005)


def test_other_intervals_cost_more() -> None:
    costs, mtbf = Costs(save=60.0), 4 * HOUR
    best = daly_interval(costs.save, mtbf)

    def share(interval: float) -> float:
        return statistics.mean(simulated_share(300, interval, mtbf, costs, random.Random(seed)) for seed in range(30))

    assert share(best) > max(share(best / 3), share(3 * best)) + 0.01


def test_where_nothing_fails_only_commits_cost() -> None:
    costs = Costs(commit=1.0, between_commits=9.0, between_restarts=1e12)
    assert elastic_share(10, 100, 1e15, costs, random.Random(1)) == pytest.approx(0.9, abs=1e-4)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "faults.json"
    given = ["faults", "--nodes", "1,1250", "--days", "5", "--trials", "3", "--save", "20", "--json", str(path)]
    assert main(given) == 0
    table = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in table.splitlines()] == ["nodes", "---:", "1", "1,250"]
    content = json.loads(path.read_text())
    assert content["costs"]["save"] == 20.0
    assert content["lines"][1]["useful"] == simulate(1250, 154 * DAY, Costs(save=20.0), 5, 3, 1).useful
    assert main(given) == 0
    assert capsys.readouterr().out == table
    with pytest.raises(SystemExit):
        main(["faults", "--nodes", "0"])
