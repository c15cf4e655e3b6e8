"""Leaves out the files that cannot be imported where a library is missing: all are looked through for doctests."""

from __future__ import annotations

import os
from importlib.util import find_spec

_OF_LIBRARY = {
    "torch": ["mpidist/torch/*.py", "tests/torch/exam*.py", "tests/support/torch_on_gpu.py"],
    "jax": ["mpidist/jax/*.py"],
    "keras": ["mpidist/keras/[!_su]*.py"],
}

collect_ignore_glob = [file for library, files in _OF_LIBRARY.items() if not find_spec(library) for file in files]
# Keras reads it when it is imported.
os.environ.setdefault("KERAS_BACKEND", "torch")
if find_spec("keras"):
    collect_ignore_glob += [f"mpidist/keras/{name}_step.py" for name in ("torch", "jax") if not find_spec(name)]
