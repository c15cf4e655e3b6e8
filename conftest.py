"""Leaves out the files that cannot be imported where torch or Keras is missing: all are looked through for doctests."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["mpidist/torch/*.py", "tests/torch/exam*.py"]
if not find_spec("keras"):
    collect_ignore_glob += ["mpidist/keras/*.py"]
elif not find_spec("torch"):
    collect_ignore_glob += ["mpidist/keras/torch_step.py"]
