"""The parts of ``make test-torch``, run in the environment of torch; CI runs a share of them."""

from __future__ import annotations

import sys

from tests.checks.parts import Part, one_rank, session

# What CI installs: a version that is there for the CPU alone, and what PyTorch's own tests need.
CI_WHEEL = "torch==2.13.0"
CI_PACKAGES = f"{CI_WHEEL} expecttest"
# Which share a commit gets is decided by its hash. None takes more than three minutes, with the installation.
SHARES = [
    ["torch, leaks", "torch, programs"],
    ["torch, jobs", "torch, 1 rank"],
    ["torch, 2 nodes x 2 ranks", "torch, 2 ranks"],
    ["exam of mpi 1", "exam of mpi 2", *(f"exam of mpidist {number}" for number in range(1, 5))],
]
# Those that take longest as jobs of their own.
_PROGRAMS = ["tests/torch/test_frameworks.py", "tests/torch/test_compiling.py"]
_LEAKS = "tests/torch/test_leaks.py"
_JOBS = ["tests/torch/test_jobs.py", "tests/torch/test_leaving.py", "tests/torch/test_horovod_page.py"]
# Tests of other rooms that skip what they have for torch and JAX where these are missing.
_ROOMS = (
    "tests/training/test_losses_with_gradients.py",
    "tests/strategies/test_results_are_apart.py",
    "tests/strategies/test_shared_inputs.py",
    "tests/acceptance/test_arrays_of_others.py",
    "tests/arrays/test_convert_devices.py",
    "tests/input/test_dataset_libraries.py",
    "tests/input/test_loaders.py",
    "tests/input/test_ownership.py",
    "tests/checkpoint/test_arrays_of_others.py",
    "tests/values/test_models_as_variables.py",
)


def everything() -> list[Part]:
    """Return all parts with torch."""
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
