"""Leaves out files that cannot be imported where torch or JAX is missing: all are looked through for doctests."""

from __future__ import annotations

from importlib.util import find_spec

_OF_LIBRARY = {
    "torch": ["mpidist/torch/*.py", "tests/torch/exam*.py", "tests/support/torch_on_gpu.py"],
    "jax": ["mpidist/jax/*.py"],
}

collect_ignore_glob = [file for library, files in _OF_LIBRARY.items() if not find_spec(library) for file in files]
