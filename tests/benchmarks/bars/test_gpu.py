"""The bars on a GPU."""

from __future__ import annotations

import pytest

from benchmarks.bars.gpu import verdicts
from benchmarks.measuring.rows import Row
from tests.benchmarks.support import row

pytestmark = pytest.mark.one_rank

MIB = 1 << 20


def judge(rows: list[Row]) -> dict[str, bool]:
    return {verdict.what: verdict.met for verdict in verdicts(rows)}


@pytest.mark.parametrize(("microseconds", "met"), [(117.0, True), (118.0, False)])
def test_staging_against_the_link(microseconds: float, met: bool) -> None:
    rows = [
        row("gpu_staging", "copy", "device to host", MIB, 100.0),
        row("gpu_staging", "copy", "host to device", MIB, 1.0),
        row("gpu_staging", "mpidist", "device to host", MIB, microseconds),
    ]
    assert judge(rows) == {"staging, device to host: of the host link": met}


@pytest.mark.parametrize(("microseconds", "met"), [(14.9, True), (15.1, False)])
def test_a_call_of_nccl(microseconds: float, met: bool) -> None:
    rows = [row("gpu_nccl_call", "alone", "CuPy", 4096, 5.0)]
    rows.append(row("gpu_nccl_call", "mpidist", "NcclComm", 4096, microseconds))
    assert judge(rows) == {"a call of NCCL: over CuPy's own": met}


@pytest.mark.parametrize(("microseconds", "met"), [(114.0, True), (116.0, False)])
def test_an_all_reduce_against_its_slowest_stage(microseconds: float, met: bool) -> None:
    rows = []
    for size in (MIB, 16 * MIB):
        rows += [
            row("gpu_all_reduce", "mpidist", "whole", size, microseconds, algorithm="hierarchical"),
            row("gpu_all_reduce", "alone", "device to host", size, 50.0),
            row("gpu_all_reduce", "alone", "between nodes", size, 100.0),
            row("gpu_all_reduce", "alone", "host to device", size, 60.0),
        ]
    assert judge(rows) == {"all_reduce between nodes, 16 MiB: time of its slowest stage, between nodes": met}
