"""The parts of ``make test-torch``, ``test-keras`` and ``test-jax``, run in the environment of each library.

CI runs a share of one of them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from tests.checks.parts import Part, one_rank, session


@dataclass(frozen=True)
class Share:
    """Parts that CI runs together.

    Attributes:
        library: Which ``make test-...`` has them.
        packages: What CI installs for them: versions that are there for the CPU alone.
        names: Of the parts.
    """

    library: str
    packages: str
    names: list[str]


_TORCH, _JAX = "torch==2.13.0", "jax==0.10.2"
# Which share a commit gets is decided by its hash. None takes more than four minutes, with the installation.
SHARES = [
    Share("torch", f"{_TORCH} expecttest", ["torch, leaks", "torch, programs"]),
    Share("torch", f"{_TORCH} expecttest", ["torch, jobs", "torch, 1 rank"]),
    Share("torch", f"{_TORCH} expecttest", ["torch, 2 nodes x 2 ranks", "torch, 2 ranks"]),
    Share(
        "torch",
        f"{_TORCH} expecttest",
        ["exam of mpi 1", "exam of mpi 2", *(f"exam of mpidist {number}" for number in range(1, 5))],
    ),
    Share("keras", _TORCH, [f"keras on torch, {part}" for part in ("jobs", "1 rank")]),
    Share("keras", _TORCH, [f"keras on torch, {part}" for part in ("3 ranks", "2 ranks")]),
    Share("keras", _JAX, [f"keras on jax, {part}" for part in ("3 ranks", "jobs")]),
    Share("keras", _JAX, [f"keras on jax, {part}" for part in ("2 ranks", "1 rank")]),
    Share("jax", f"{_JAX} optax flax equinox", ["jax, training", "jax, 1 rank", "jax, 2 ranks"]),
]
# Those that take longest as jobs of their own.
_PROGRAMS = ["tests/torch/test_frameworks.py", "tests/torch/test_compiling.py"]
_LEAKS = "tests/torch/test_leaks.py"
_JOBS = [f"tests/torch/test_{name}.py" for name in ("jobs", "leaving", "horovod_page", "pages")]
# Tests of other rooms that skip what they have for torch and JAX where these are missing.
_ROOMS = (
    "tests/training/test_losses_with_gradients.py",
    "tests/strategies/test_results_are_apart.py",
    "tests/strategies/test_shared_inputs.py",
    "tests/acceptance/test_arrays_of_others.py",
    "tests/acceptance/test_public_paths.py",
    "tests/arrays/test_convert_devices.py",
    "tests/input/test_dataset_libraries.py",
    "tests/input/test_loaders.py",
    "tests/input/test_ownership.py",
    "tests/checkpoint/test_arrays_of_others.py",
    "tests/values/test_models_as_variables.py",
)


# A cache of programs, which every rank and test would otherwise compile for each number of rows.
_COMPILED_BY_JAX = {
    "JAX_COMPILATION_CACHE_DIR": str(Path(sys.prefix, "jax-cache")),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
_KERAS, _KERAS_JOBS = "tests/keras", ["tests/keras/test_jobs.py", "tests/keras/test_pages.py"]
_JAX_TRAINING = "tests/jax/test_training.py"


def torch() -> list[Part]:
    """Return the parts of ``make test-torch``."""
    return [
        # 10,000 steps of ranks that would take turns on one core are minutes.
        one_rank("torch, leaks", [_LEAKS], takes_all_cores=True),
        one_rank("torch, programs", _PROGRAMS),
        one_rank("torch, jobs", _JOBS),
        one_rank(
            "torch, 1 rank", [*_ROOMS, "tests/torch"], *(f"--ignore={path}" for path in [*_PROGRAMS, _LEAKS, *_JOBS])
        ),
        session("torch, 2 nodes x 2 ranks", 4, paths=["tests/torch"], MPIDIST_RANKS_PER_NODE="2"),
        session("torch, 2 ranks", 2, paths=[*_ROOMS, "tests/torch"]),
        *(_exam("mpidist", number, 4) for number in range(1, 5)),
        *(_exam("mpi", number, 2) for number in range(1, 3)),
    ]


def _exam(backend: str, number: int, parts: int) -> Part:
    """Return a part of PyTorch's own tests of a backend."""
    command = [sys.executable, "-m", "tests.torch.exam", "--backend", backend, "--part", f"{number}/{parts}"]
    return Part(f"exam of {backend} {number}", command, is_pytest=False, keeps_to_one_core=True)


def keras() -> list[Part]:
    """Return the parts of ``make test-keras``, for each backend of Keras."""
    return [
        replace(part, environment={"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", **_COMPILED_BY_JAX})
        for backend, other in (("torch", "jax"), ("jax", "torch"))
        for part in (
            one_rank(f"keras on {backend}, jobs", _KERAS_JOBS),
            session(f"keras on {backend}, 3 ranks", 3, paths=[_KERAS]),
            session(f"keras on {backend}, 2 ranks", 2, paths=[_KERAS]),
            one_rank(
                f"keras on {backend}, 1 rank",
                [_KERAS, "mpidist/keras"],
                *(f"--ignore={path}" for path in _KERAS_JOBS),
                # The environment may have one backend only. The other's modules import theirs.
                f"--ignore-glob=mpidist/keras/{other}_*.py",
            ),
        )
    ]


def jax() -> list[Part]:
    """Return the parts of ``make test-jax``."""
    parts = [
        one_rank("jax, training", [_JAX_TRAINING]),
        one_rank("jax, 1 rank", ["tests/jax", "mpidist/jax"], f"--ignore={_JAX_TRAINING}"),
        session("jax, 2 ranks", 2, paths=["tests/jax"]),
    ]
    return [replace(part, environment=_COMPILED_BY_JAX) for part in parts]


LIBRARIES = {"torch": torch, "keras": keras, "jax": jax}
