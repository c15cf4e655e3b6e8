"""The pytest fixture ``fake_gpus``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mpidist.collectives.gpu.device_streams import device_watch
from tests.support import fake_cupy


@pytest.fixture
def fake_gpus(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Pretend that there are GPUs; the value is the module ``cupy``.

    Two devices, streams without delay; other ones with
    ``@pytest.mark.parametrize("fake_gpus", [{"devices": 4, "jitter": 0.002, "nccl": False}], indirect=True)``.
    """
    yield fake_cupy.install(**getattr(request, "param", {}))
    # Of a test that failed with work under way there is nothing more to watch.
    device_watch.stop()
    fake_cupy.uninstall()
