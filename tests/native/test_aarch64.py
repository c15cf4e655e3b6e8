"""The programs that check the native core, on aarch64, by qemu-user."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.building import Variant, compiled, run

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs, pytest.mark.long, pytest.mark.timeout(1200)]

# As Debian's packages qemu-user, gcc-aarch64-linux-gnu and libc6-dev-arm64-cross call them.
AARCH64 = Variant(
    "aarch64", ("aarch64-linux-gnu-gcc",), ("-O3", "-static"), emulators=("qemu-aarch64", "qemu-aarch64-static")
)


def test_kernels(built: Path) -> None:
    assert run([*compiled("check_kernels", AARCH64, built), "1"]) == "base: right\n"


@pytest.mark.all_cores
def test_random_calls(built: Path) -> None:
    assert run([*compiled("check_threads", AARCH64, built), "30", "1", "10000", "no"]) == "30 worlds: right\n"
