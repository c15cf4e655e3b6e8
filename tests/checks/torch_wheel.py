"""Runs a command where pip has torch for this Python and the CPU alone, and otherwise says why not.

    python -m tests.checks.torch_wheel WHEEL COMMAND

Elsewhere torch brings CUDA's libraries, which are gigabytes.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

_NOT_THERE = "No matching distribution found"


def main(wheel: str, *command: str) -> int:
    """Run the command and return its status, or print why not."""
    reason = reason_against(wheel)
    if reason is None:
        return subprocess.run(command).returncode
    print(f"not tested: {reason}")
    return 0


def reason_against(wheel: str) -> str | None:
    """Return why a wheel is not to be installed, None where it is.

    Raises:
        RuntimeError: pip could not say.
    """
    asking = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary", ":all:"]
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    asked = subprocess.run(
        [*asking, "--quiet", "--report", "-", wheel], env=environment, capture_output=True, text=True
    )
    if asked.returncode == 0:
        return reason_in(json.loads(asked.stdout), wheel)
    if _NOT_THERE in asked.stderr:
        return f"pip has no wheel of {wheel} for Python {platform.python_version()} on {platform.machine()}"
    raise RuntimeError(f"pip does not tell whether it has {wheel}:\n{asked.stderr}")


def reason_in(report: dict[str, list[dict[str, dict[str, str]]]], wheel: str) -> str | None:
    """Return why what pip would install is not wanted.

    >>> reason_in({"install": [{"metadata": {"name": "nvidia-nccl-cu13"}}]}, "torch==2")
    "pip's wheel of torch==2 is one for CUDA, of gigabytes: it brings nvidia-nccl-cu13"
    """
    names = [package["metadata"]["name"] for package in report["install"]]
    of_cuda = [name for name in names if name.startswith("nvidia-")]
    return f"pip's wheel of {wheel} is one for CUDA, of gigabytes: it brings {', '.join(of_cuda)}" if of_cuda else None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
