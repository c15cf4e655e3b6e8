"""PyTorch's own tests of a backend, distributed_test.py of the wheel, over mpidist.

    python -m tests.torch.exam [--backend mpidist] [--ranks 4] [--only PATTERN] [--part K/N] [--all] [--update]

They are run by mpirun, in the process groups ``mpidist`` (without PyTorch's rules of what which backend can do, which
go by names) or ``mpi`` (with its rules). Tests that pass are listed in passing_BACKEND.txt, for torch 2.14 and newer
in passing_BACKEND_2.14.txt; it is an error if one of these does not pass. ``--part 1/4`` takes the first quarter of
them; ``--all`` runs the others, too, and ``--update`` writes the list anew.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Tests that need no run to know that they fail, and why.
_CANNOT = {
    "cuda|nccl|gpu": "they need GPUs",
    "monitored_barrier": "torch 2.13 refuses it for groups that are not gloo, and later they want gloo's words",
    "accumulate_gradients": "they have no model for backends of other names than mpi, gloo and nccl",
    "SyncBatchNorm_process_group": "it needs torchvision",
    "batch_isend_irecv_(mixed|op)": "they need GPUs, and have no rule that says so",
}
_TAKES_BACKENDS = tuple(map(int, importlib.metadata.version("torch").split(".")[:2])) >= (2, 14)
_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="mpidist", choices=("mpidist", "mpi"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--only", default="", help="run those alone whose name this regular expression fits, passing or not"
    )
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="run the K-th of N parts of them")
    parser.add_argument("--all", action="store_true", help="run the tests that are not known to pass, too")
    parser.add_argument("--update", action="store_true", help="write the list of those that pass anew; runs all")
    args = parser.parse_args()
    listed = _HERE / f"passing_{args.backend}{'_2.14' if _TAKES_BACKENDS else ''}.txt"
    passing = listed.read_text().split() if listed.exists() else []
    wants_all = args.all or args.update or args.only
    names = [name for name in (_all_names(args.backend) if wants_all else passing) if re.search(args.only, name)]
    number, parts = args.part
    names = names[number - 1 :: parts]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = _run_all(names, args.backend, args.ranks, Path(folder))
    passed = [name for name in names if results.get(name) == "passed"]
    failed = [name for name in names if not results.get(name, "").startswith(("passed", "skipped"))]
    lost = [name for name in passing if name in names and name not in passed]
    print(
        f"{len(passed)} of PyTorch's tests passed as {args.backend} on {args.ranks} ranks in "
        f"{time.monotonic() - began:.0f} s, {len(names) - len(passed) - len(failed)} were skipped, {len(failed)} failed"
    )
    for name in failed:
        print(f"  {name}: {results.get(name)}")
    for name in lost:
        print(f"{name} is listed in {listed.name} and does not pass: {results.get(name)}", file=sys.stderr)
    if args.update:
        listed.write_text("".join(f"{name}\n" for name in sorted(passed)))
    return 1 if lost and not args.update else 0


def _part(text: str) -> tuple[int, int]:
    number, parts = map(int, text.split("/"))
    if not 1 <= number <= parts:
        raise ValueError(text)
    return number, parts


def _all_names(backend: str) -> list[str]:
    code = (
        "import unittest; from torch.testing._internal.distributed.distributed_test import DistributedTest as D; "
        "[print(n) for n in unittest.TestLoader().getTestCaseNames(D._DistTestBase) "
        f"if {backend == 'mpidist'} or not getattr(getattr(D._DistTestBase, n), '__unittest_skip__', False)]"
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=_environment(backend, 4, folder), capture_output=True, text=True, check=True)
    names = [line for line in done.stdout.split() if line.startswith("test_")]
    if backend == "mpidist":
        names = [name for name in names if not any(re.search(pattern, name) for pattern in _CANNOT)]
    return names


def _run_all(names: list[str], backend: str, ranks: int, folder: Path) -> dict[str, str]:
    """Return the result of each test; jobs are started until all have one."""
    results: dict[str, str] = {}
    for part in ("barrier", "test_dir", "init_dir"):
        (folder / part).mkdir()
    todo, written = folder / "names", folder / "results"
    mpirun = os.environ.get("MPIRUN") or shutil.which("mpirun") or "mpirun"
    while left := [name for name in names if name not in results]:
        todo.write_text("\n".join(left))
        written.write_text("")
        job = subprocess.run(
            [mpirun, "-n", str(ranks), sys.executable, "-m", "tests.torch.exam_rank", str(todo), str(written)],
            cwd=_ROOT,
            env=_environment(backend, ranks, str(folder)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        results |= _read(written, job.stdout + job.stderr)
        print(f"{len(results)} of {len(names)} have a result", flush=True)
        if not set(left) & set(results):
            raise RuntimeError(f"no test was run:\n{job.stdout}\n{job.stderr}")
    return results


def _read(written: Path, output: str) -> dict[str, str]:
    results: dict[str, str] = {}
    for line in written.read_text().splitlines():
        entry = json.loads(line)
        name, result = entry["name"], entry["result"]
        if result == "failed":
            # Ranks that fail after the first do so because of it.
            if not results.get(name, "").startswith("failed"):
                print(f"--- {name}, rank {entry['rank']}:\n{entry['error']}", flush=True)
                results[name] = "failed: " + (entry["error"].strip().splitlines() or [""])[-1][:200]
        else:
            results[name] = result
    for name, result in results.items():
        if result == "began":
            print(f"--- {name} ended with the job:\n{output[-6000:]}", flush=True)
            results[name] = "failed: it hung, or ended the job"
    return results


def _environment(backend: str, ranks: int, folder: str) -> dict[str, str]:
    return {
        **os.environ,
        "BACKEND": backend,
        "WORLD_SIZE": str(ranks),
        "TEMP_DIR": folder,
        "INIT_METHOD": f"file://{folder}/init_dir/shared",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }


if __name__ == "__main__":
    sys.exit(main())
