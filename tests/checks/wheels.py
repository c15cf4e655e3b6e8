"""Runs a command where pip has packages for this Python and the CPU alone, and otherwise says why not.

    python -m tests.checks.wheels PACKAGES COMMAND

Elsewhere torch brings CUDA's libraries, which are gigabytes.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

_NOT_THERE = "No matching distribution found"


def main(packages: str, *command: str) -> int:
    """Run the command and return its status, or print why not."""
    reason = reason_against(packages)
    if reason is None:
        return subprocess.run(command).returncode
    print(f"not tested: {reason}")
    return 0


def reason_against(packages: str) -> str | None:
    """Return why packages are not to be installed, None where they are.

    Raises:
        RuntimeError: pip could not say.
    """
    asking = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary", ":all:"]
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    asked = subprocess.run(
        [*asking, "--quiet", "--report", "-", *packages.split()], env=environment, capture_output=True, text=True
    )
    if asked.returncode == 0:
        return reason_in(json.loads(asked.stdout), packages)
    if _NOT_THERE in asked.stderr:
        return f"pip has no wheels of {packages} for Python {platform.python_version()} on {platform.machine()}"
    raise RuntimeError(f"pip does not tell whether it has {packages}:\n{asked.stderr}")


def reason_in(report: dict[str, list[dict[str, dict[str, str]]]], packages: str) -> str | None:
    """Return why what pip would install is not wanted.

    >>> reason_in({"install": [{"metadata": {"name": "nvidia-nccl-cu13"}}]}, "torch==2")
    "pip's wheels of torch==2 are for CUDA, of gigabytes: they bring nvidia-nccl-cu13"
    """
    names = [package["metadata"]["name"] for package in report["install"]]
    of_cuda = ", ".join(name for name in names if name.startswith("nvidia-"))
    return f"pip's wheels of {packages} are for CUDA, of gigabytes: they bring {of_cuda}" if of_cuda else None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
