"""Reports, traces and flight records of torch's programs: collectives by name, with the line of the program."""

from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import dedent

import pytest

from mpidist.collectives.observe.record import Entry, read_flights
from tests.support.ranks import jobs

pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")

pytestmark = [pytest.mark.torch, pytest.mark.one_rank, pytest.mark.jobs]

PROGRAM = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group("mpidist")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(1000, 10))
for _ in range(3):
    loss = model(torch.ones(4, 1000)).sum()
    loss.backward()  # all_reduce SUM of float32(10010,)
layer = fully_shard(nn.Linear(10, 10))
loss = layer(torch.ones(2, 10)).sum()  # all_gather along axis 0 of float32(*, 55)
loss.backward()  # reduce_scatter MEAN over 2 of float32(2, 55)
dist.all_reduce(torch.ones(7))  # all_reduce SUM of float32(7,)
dist.all_reduce(torch.ones(8), async_op=True).wait()  # all_reduce SUM of float32(8,)
dist.broadcast(torch.ones(7), 1)  # broadcast from rank 1 of float32(7,)
dist.reduce(torch.ones(7), 1)  # reduce to rank 1 SUM of float32(7,)
dist.all_gather([torch.ones(7), torch.ones(7)], torch.ones(7))  # all_gather along axis 0 of float32(*, 7)
dist.reduce_scatter_tensor(torch.ones(7), torch.ones(14))  # reduce_scatter SUM of float32(2, 7)
dist.all_to_all_single(torch.ones(2, 3), torch.ones(2, 3))  # all_to_all of float32(*, 3) with expected rows
parts = [torch.ones(7), torch.ones(7)] if dist.get_rank() == 0 else None
dist.gather(torch.ones(7), parts)  # gather to rank 0 of float32(*, 7)
dist.scatter(torch.ones(7), parts)  # scatter from rank 0 of float32(*, 7)
dist.barrier()  # barrier
dist.destroy_process_group()
"""


def expected() -> dict[str, int]:
    """Line of the program of each collective that a comment names."""
    lines = enumerate(PROGRAM.splitlines(), 1)
    return {text: number for number, line in lines for text in line.split("  # ")[1:]}


def run(tmp_path: Path, **variables: str) -> str:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    done = jobs.run_script(program, 2, env=variables)
    assert done.returncode == 0, done.stderr
    return done.stderr


def entries(folder: Path) -> list[Entry]:
    problems: list[str] = []
    found = [entry for flight in read_flights(str(folder), problems) for entry in flight.entries]
    assert problems == []
    return found


def test_the_flight_record_has_the_lines_of_the_program(tmp_path: Path) -> None:
    run(tmp_path, MPIDIST_FLIGHT_RECORD=str(tmp_path / "flight"))
    found = entries(tmp_path / "flight")
    for text, line in expected().items():
        sites = {entry.call_site for entry in found if entry.text == text}
        assert f"{tmp_path}/train.py:{line} (<module>)" in sites, f"{text}: {sites}"
    assert {entry.call_site.split(":")[0] for entry in found} == {f"{tmp_path}/train.py"}


def test_the_trace_has_spans_of_all(tmp_path: Path) -> None:
    run(tmp_path, MPIDIST_TRACE=str(tmp_path / "trace"))
    events = json.loads((tmp_path / "trace" / "trace-merged.json").read_text())["traceEvents"]
    texts = [event["args"]["text"] for event in events if event.get("ph") == "X" and "number" in event.get("args", {})]
    for text in expected():
        assert texts.count(text) >= 2, f"{text}: {sorted(set(texts))}"


def test_the_report_counts_all(tmp_path: Path) -> None:
    report = run(tmp_path, MPIDIST_REPORT="1")
    calls = {name: int(count) for name, count in re.findall(r"^ +(\w+) +(\d+) ", report, re.M)}
    both_ways = {"all_reduce", "reduce", "all_gather", "gather", "reduce_scatter", "scatter"}
    assert calls.keys() >= {*both_ways, "broadcast", "all_to_all", "barrier"}, report
    assert calls["all_reduce"] == 5


def test_lines_behind_a_library_are_the_programs(tmp_path: Path) -> None:
    """What is installed beside torch calls it for its users, too."""
    program = """
    import sys, sysconfig, types, torch, torch.distributed as dist
    dist.init_process_group("mpidist")
    path = sysconfig.get_path("purelib") + "/trainer.py"
    trainer = {"dist": dist, "torch": torch}
    exec(compile("def fit():\\n    dist.all_reduce(torch.ones(2))", path, "exec"), trainer)
    trainer["fit"]()
    dist.destroy_process_group()
    """
    (tmp_path / "train.py").write_text(dedent(program))
    done = jobs.run_script(tmp_path / "train.py", 2, env={"MPIDIST_FLIGHT_RECORD": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    sites = {entry.call_site for entry in entries(tmp_path) if entry.text.startswith("all_reduce")}
    assert sites == {f"{tmp_path}/train.py:7 (<module>)"}
