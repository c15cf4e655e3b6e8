"""Leaves out the files that cannot be imported where torch or Keras is missing: all are looked through for doctests."""

from __future__ import annotations

import os
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["mpidist/torch/*.py", "tests/torch/exam*.py"]
# Keras reads it when it is imported.
os.environ.setdefault("KERAS_BACKEND", "torch")
if not find_spec("keras"):
    collect_ignore_glob += ["mpidist/keras/[!_su]*.py"]
else:
    collect_ignore_glob += [f"mpidist/keras/{name}_step.py" for name in ("torch", "jax") if not find_spec(name)]
