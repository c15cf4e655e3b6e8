"""Tuning files: reading and writing them, and that all ranks take the table that rank 0 finds."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpidist import Communicator
from mpidist.collectives.reduce import tuning_file
from mpidist.collectives.reduce.choice import place_of
from mpidist.collectives.reduce.registry import SHIPPED, Table
from mpidist.collectives.reduce.tuning_file import Setup, merge, read, setup_of
from mpidist.experimental import CommunicationOptions

pytestmark = [pytest.mark.nodes, pytest.mark.counts]

HERE = Setup("some CPU, 4 cores", "some MPI 1.0", "1 node x 4 ranks")
SETTING = "MPIDIST_TUNING_FILE"
# Works at every place, and is in no shipped row of one node.
GPU = [((None, "nccl"),)] * 2
MPI_ONLY = Table(*[((None, "mpi"),)] * 2, SHIPPED.between_nodes, *GPU)
REDUCE_BROADCAST = Table(*[((None, "reduce_broadcast"),)] * 2, SHIPPED.between_nodes._replace(latency=1e-3), *GPU)


def taken(comm: Communicator, **options: Any) -> str:
    """Return which algorithm an all-reduce takes, after checking that it is right."""
    value = np.arange(1000.0)
    got = comm.all_reduce("SUM", value, options=CommunicationOptions(**options))
    np.testing.assert_array_equal(got, comm.size * value)
    return comm.last_algorithm


@pytest.fixture
def setup(comm: Communicator) -> Setup:
    return setup_of(comm._channel.node)


# One process ----------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    other = HERE._replace(layout="2 nodes x 4 ranks")
    merge(path, HERE, SHIPPED)
    merge(path, other, MPI_ONLY)
    assert read(path) == {HERE: SHIPPED, other: MPI_ONLY}
    merge(path, HERE, REDUCE_BROADCAST)
    assert read(path) == {HERE: REDUCE_BROADCAST, other: MPI_ONLY}
    assert [entry.name for entry in tmp_path.iterdir()] == ["tuning.json"]


def test_a_file_has_a_line_per_row(tmp_path: Path) -> None:
    merge(tmp_path / "t", HERE, SHIPPED)
    lines = (tmp_path / "t").read_text().splitlines()
    assert '      "several_nodes": [[65536, "leaders"], [null, "hierarchical"]],' in lines
    assert '      "layout": "1 node x 4 ranks",' in lines


def test_an_older_file_gets_the_shipped_costs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [[65536, "halving_doubling"], [None, "ring"]]
    (tmp_path / "t").write_text(json.dumps({"tables": [entry(between_nodes=rows)]}))
    with caplog.at_level(logging.INFO, "mpidist"):
        assert read(tmp_path / "t") == {HERE: SHIPPED}
    assert "is of an older mpidist and has no costs of messages between nodes" in caplog.text
    merge(tmp_path / "t", HERE._replace(host="another"), MPI_ONLY)
    assert '"version": 2' in (tmp_path / "t").read_text()


def test_a_link_is_read_and_not_written(tmp_path: Path) -> None:
    merge(tmp_path / "real", HERE, SHIPPED)
    (tmp_path / "link").symlink_to("real")
    assert read(tmp_path / "link") == {HERE: SHIPPED}
    with pytest.raises(ValueError, match="link cannot be written: .* a symbolic link to 'real'"):
        merge(tmp_path / "link", HERE, MPI_ONLY)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder in which this user may write"):
        merge(tmp_path / "missing" / "t", HERE, SHIPPED)
    (tmp_path / "t").write_text("a letter")
    with pytest.raises(ValueError, match=r"t is not JSON \(.*\)\. Use a file that 'python -m mpidist tune --out"):
        merge(tmp_path / "t", HERE, SHIPPED)
    assert (tmp_path / "t").read_text() == "a letter"


def entry(**changed: Any) -> dict[str, Any]:
    """An entry of a file, with some of it changed."""
    return {**HERE._asdict(), **tuning_file.table_to_json(SHIPPED), **changed}


BAD = {
    "no JSON": ("{", "is not JSON"),
    "deep": ("[" * 100_000, "is not JSON"),
    "no text": (b"\xff\xfe\x00", "is not JSON"),
    "a list": ("[]", 'has no list "tables"'),
    "no entry": ('{"tables": [3]}', "table 1, is 3. It must have strings host, mpi, layout"),
    "no host": (json.dumps({"tables": [entry(host=None)]}), "table 1, is .*must have strings host, mpi, layout"),
    "no rows": (json.dumps({"tables": [HERE._asdict()]}), "has no rows. The rows must be one_node, several_nodes"),
    "wrong row": (json.dumps({"tables": [entry(one_node=[[9, "mpi"]])]}), "table 1: one_node is .*Use null"),
    "another version": ('{"version": 3, "tables": []}', "has version 3, of another mpidist. Use a file that"),
    "twice": (json.dumps({"tables": [entry(), entry()]}), "table 2, is a second table for some CPU"),
}


def write(path: Path, content: str | bytes) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("kind", BAD)
def test_a_wrong_file_is_not_read(kind: str, tmp_path: Path) -> None:
    content, message = BAD[kind]
    write(tmp_path / "t", content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "t")


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be read \(No such file or directory\). Use a file that"):
        read(tmp_path / "t")
    with pytest.raises(ValueError, match=r"cannot be read \(Is a directory\)"):
        read(tmp_path)


# All ranks ------------------------------------------------------------------------------------------------------------


def test_the_setup_says_where_the_ranks_are(comm: Communicator, setup: Setup) -> None:
    node = comm._channel.node
    counts = sorted(len(ranks) for ranks in node.ranks)
    per_node = str(counts[0]) if counts[0] == counts[-1] else "uneven"
    assert setup.layout.split()[0] == str(len(counts))
    assert setup.layout.split(" x ")[1].split()[0] == per_node
    assert setup.host.endswith(" cores")
    assert any(character.isdigit() for character in setup.mpi)
    assert comm.all_gather_object(setup) == [setup] * comm.size


@pytest.mark.min_ranks(2)
def test_only_the_file_of_rank_0_counts(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comm: Communicator
) -> None:
    # On rank 1 the file is wrong, and on further ranks it is missing.
    if comm.rank == 0:
        merge(tmp_path / "t", setup, REDUCE_BROADCAST)
        merge(tmp_path / "t", HERE, MPI_ONLY)
    elif comm.rank == 1:
        (tmp_path / "t").write_text("{")
    monkeypatch.setenv(SETTING, str(tmp_path / "t"))
    with Communicator() as tuned:
        assert tuned._engine.table == REDUCE_BROADCAST
        assert taken(tuned) == "reduce_broadcast"
    if comm.rank == 0:
        monkeypatch.delenv(SETTING)
    with Communicator() as tuned:
        assert tuned._engine.table == SHIPPED


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("kind", ["no JSON", "twice", "missing"])
def test_a_wrong_file_raises_on_all_ranks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comm: Communicator
) -> None:
    content, message = BAD.get(kind, (None, "cannot be read"))
    if comm.rank == 0:
        monkeypatch.setenv(SETTING, str(tmp_path / "t"))
        if content is not None:
            write(tmp_path / "t", content)
    with pytest.raises(ValueError, match=f"^{SETTING}: .*{message}") as caught:
        Communicator()
    assert comm.all_gather_object(str(caught.value)) == [str(caught.value)] * comm.size
    monkeypatch.delenv(SETTING, raising=False)
    with Communicator() as after:
        assert after._engine.table == SHIPPED


def test_one_rank_alone_reads_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    monkeypatch.setenv(SETTING, str(tmp_path / "missing"))
    with Communicator(MPI.COMM_SELF) as alone:
        assert taken(alone) == "alone"


@pytest.mark.min_ranks(2)
def test_rank_0_logs_the_table_once(
    setup: Setup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    comm: Communicator,
) -> None:
    monkeypatch.setattr(tuning_file, "_logged", set())
    caplog.set_level(logging.INFO, "mpidist")
    path = tmp_path / "t"
    for _ in range(2):
        Communicator().close()
    merge(path, HERE, MPI_ONLY)
    monkeypatch.setenv(SETTING, str(path))
    for _ in range(2):
        Communicator().close()
    merge(path, setup, MPI_ONLY)
    for _ in range(2):
        Communicator().close()
    texts = [record.message for record in caplog.records]
    if comm.rank:
        assert texts == []
        return
    shipped, missing, own = texts
    on = f"mpidist: all-reduce on {setup.layout}: "
    assert shipped == f"{on}{tuning_file.table_text(SHIPPED, place_of(comm._channel.node))} (the shipped table)"
    assert missing.startswith(
        f"mpidist: {path} has no table for {setup.host}, {setup.mpi}, {setup.layout}, so the shipped"
    )
    assert own.startswith(f"{on}mpi at any size")
    assert own.endswith(f"(from {path})")


@pytest.mark.min_ranks(2)
def test_a_table_argument_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comm: Communicator) -> None:
    monkeypatch.setenv(SETTING, str(tmp_path / "missing"))
    with Communicator(table=REDUCE_BROADCAST if comm.rank == 0 else MPI_ONLY) as given:
        assert taken(given) == "reduce_broadcast"


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(TypeError, match="table is 3. Pass None or the result of mpidist.tune"):
        Communicator(table=3)  # type: ignore[arg-type]


@pytest.mark.min_ranks(2)
def test_deterministic_sums_replace_the_algorithm() -> None:
    with Communicator(table=MPI_ONLY) as comm:
        assert taken(comm) == "mpi"
        assert taken(comm, deterministic=True) in ("hierarchical", "pairwise")
