"""Leaves out the files that cannot be imported where torch is missing: all are looked through for doctests."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = (
    [] if find_spec("torch") else ["mpidist/torch/*.py", "tests/torch/exam*.py", "tests/support/torch_on_gpu.py"]
)
