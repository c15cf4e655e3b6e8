"""The command: its tables, files, comparison and errors."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.predicting.comparing import compared
from benchmarks.predicting.reductions import LEADERS, predicted
from benchmarks.reports.files import save
from mpidist.collectives.reduce import tuning_file
from mpidist.collectives.reduce.cost_model import SHIPPED_NETWORK, leaders_seconds
from mpidist.collectives.reduce.registry import SHIPPED, wire_algorithms
from mpidist.collectives.reduce.tuning_file import Setup
from tests.benchmarks.support import results, row

pytestmark = pytest.mark.one_rank

MIB = 1 << 20


def predict(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["predict", *arguments])
    return capsys.readouterr().out


def test_a_large_message_takes_what_the_link_takes() -> None:
    each = predicted(SHIPPED_NETWORK, 4, 2, 64 * MIB)
    # Each node sends 2 (n - 1) / n of it.
    assert each.sent == pytest.approx(1.5 * 64 * MIB, rel=0.001)
    assert each.seconds == pytest.approx(each.sent / SHIPPED_NETWORK.bandwidth, rel=0.05)
    assert each.algorithm in wire_algorithms.costs


def test_a_small_message_goes_by_leaders() -> None:
    each = predicted(SHIPPED_NETWORK, 8, 2, 4)
    assert (each.algorithm, each.sent) == (LEADERS, 12)
    assert each.seconds == leaders_seconds(8, 2, 4, SHIPPED_NETWORK)


def test_an_algorithm_is_forced_or_refused() -> None:
    assert predicted(SHIPPED_NETWORK, 64, 1, MIB, "ring").algorithm == "ring"
    with pytest.raises(ValueError, match="algorithm is 'other'; expected one of leaders, halving_doubling"):
        predicted(SHIPPED_NETWORK, 64, 1, MIB, "other")


def test_plain_is_one_piece_without_a_handshake() -> None:
    network = SHIPPED_NETWORK._replace(reduce=0.0, copy=0.0, far_bandwidth=SHIPPED_NETWORK.bandwidth)
    each = predicted(network, 8, 1, 64 * MIB, "ring", plain=True)
    assert (each.slice_bytes, each.sent) == (64 * MIB, 1.75 * 64 * MIB)
    rounds = 14 * (network.latency + network.overhead)
    assert each.seconds == pytest.approx(rounds + each.sent / network.bandwidth)
    assert predicted(network, 8, 1, 64 * MIB, plain=True).seconds <= each.seconds
    met = predicted(network, 8, 1, 4096, LEADERS).seconds
    assert met - predicted(network, 8, 1, 4096, LEADERS, plain=True).seconds == pytest.approx(network.meeting)


def test_json_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = predict(capsys, "--nodes", "2,16", "--sizes", "1M", "--json", "--out", str(tmp_path), "--name", "some")
    document = json.loads(printed)
    assert [each["nodes"] for each in document["reductions"]] == [2, 16]
    assert document["network"] == SHIPPED_NETWORK._asdict()
    assert json.loads((tmp_path / "some.json").read_text()) == document
    with (tmp_path / "some.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["seconds"]) for line in lines] == [each["seconds"] for each in document["reductions"]]


def test_options_replace_costs(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--latency", "2us", "--bandwidth", "100mbit", "--rail-bandwidth", "50mbit", "--reduce", "4")
    network = json.loads(predict(capsys, "--nodes", "2", "--json", *given))["network"]
    assert (network["latency"], network["bandwidth"], network["far_bandwidth"]) == (2e-6, 12.5e6, 12.5e6)
    assert (network["rail_bandwidth"], network["reduce"]) == (6.25e6, 0.25e-9)
    assert network["overhead"] == SHIPPED_NETWORK.overhead


def test_costs_of_a_tuning_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tuning.json"
    for nodes, latency in ((2, 1e-3), (4, 2e-3)):
        network = SHIPPED_NETWORK._replace(latency=latency)
        setup = Setup("host", "mpi", f"{nodes} nodes x 1 rank")
        tuning_file.merge(path, setup, SHIPPED._replace(between_nodes=network))
    found = predict(capsys, "--json", "--tuning", str(path), "--layout", "4 nodes x 1 rank")
    assert json.loads(found)["network"]["latency"] == 2e-3
    with pytest.raises(SystemExit, match="has costs of '2 nodes x 1 rank', '4 nodes x 1 rank'; expected one"):
        predict(capsys, "--tuning", str(path))
    with pytest.raises(SystemExit, match=r"absent.json cannot be read"):
        predict(capsys, "--tuning", str(tmp_path / "absent.json"))


def test_results_are_held_against(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = predicted(SHIPPED_NETWORK, 4, 2, MIB, "ring").seconds
    rows = [
        row("all_reduce", "mpidist", "block", MIB, 1e6 * seconds / 1.1, ranks=8, algorithm="ring"),
        row("all_reduce", "mpidist", "block, wire_dtype=bfloat16", MIB, 1.0, ranks=8, algorithm="pairwise"),
        row("all_reduce", "mpidist", "uneven", MIB, 1.0, ranks=6, algorithm="ring"),
        row("all_reduce", "mpidist", "block", 4096, 1.0, ranks=8, algorithm="mpi"),
        row("all_reduce", "mpi", "block", MIB, 1.0, ranks=8),
        row("overlap", "mpidist", "2x1", MIB, 1.0),
    ]
    found, left_out = compared(rows, 4, SHIPPED_NETWORK)
    assert [each.error for each in found] == [pytest.approx(0.1)]
    assert len(left_out) == 3
    path, _ = save(results(rows, nodes=4, ranks=8), tmp_path, "cluster")
    assert main(["predict", "--compare", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "+10.0%" in printed
    assert "from 1 MiB: 1 of 1 within 15%, largest error 10.0%, median 10.0%" in printed
    assert "# not compared: uneven, 1048576 bytes, ring: nodes have different numbers of ranks" in printed
    off = [row("all_reduce", "mpidist", "block", MIB, 1e6 * seconds / 1.2, ranks=8, algorithm="ring")]
    path, _ = save(results(off, nodes=4, ranks=8), tmp_path, "off")
    assert main(["predict", "--compare", str(path)]) == 1


def test_a_trace_is_written_with_all_that_replays_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = predict(
        capsys, "--nodes", "3", "--ranks-per-node", "2", "--sizes", "1M", "--simgrid", str(tmp_path / "new")
    )
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"trace.txt", "platform.xml", "hosts", "traces"}
    ranks = {line.split()[0] for line in (tmp_path / "new" / "trace.txt").read_text().splitlines()}
    hosts = (tmp_path / "new" / "hosts").read_text().split()
    assert len(hosts) == len(ranks)
    assert set(hosts) == {"node0", "node1", "node2"}
    assert "smpirun" in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--compute", "1s"), "--compute needs the gradients"),
        (("--model", "resnet50"), "need the time of a step"),
        (("--plot",), "--plot needs a folder"),
        (("--replay", "5"), "need a folder for the trace"),
        (("--plain", "--simgrid", "x"), "--plain is of other libraries"),
        (("--simgrid", "x", "--nodes", "1"), "expected two nodes"),
        (("--simgrid", "x", "--nodes", "2", "--sizes", "4"), "goes by leaders"),
    ],
)
def test_options_that_do_not_go_together(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(SystemExit, match=says):
        main(["predict", *arguments])


@pytest.mark.parametrize(
    "option", [("--latency", "20"), ("--bandwidth", "fast"), ("--nodes", "0"), ("--backward", "2")]
)
def test_values_that_cannot_be(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["predict", *option])
    assert "expected" in capsys.readouterr().err


def test_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    predict(capsys, "--nodes", "2,64", "--compute", "1s", "--gradients", "4M,16M", "--out", str(tmp_path), "--plot")
    assert (tmp_path / "predict.png").stat().st_size > 5_000
