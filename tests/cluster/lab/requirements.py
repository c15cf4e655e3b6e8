"""What a lab needs of the machine: whether it is there, and installing Slurm where it is not."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

# Program or file -> Debian package. slurm-wlm does not depend on the PMIx library that its plugin loads.
_PMIX = Path(f"/usr/lib/{platform.machine()}-linux-gnu/pmix2/lib")
_PACKAGES = {"slurmctld": "slurm-wlm", "munged": "munge", str(_PMIX / "libpmix.so.2"): "libpmix2"}
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux", "mount": "mount"}


def _has(name: str) -> bool:
    return os.path.exists(name) if name.startswith("/") else shutil.which(name, path=_search_path()) is not None


def _search_path() -> str:
    return os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"


def missing() -> str | None:
    """Return why no lab can come up on this machine, None if one can; installs nothing."""
    if os.geteuid() != 0:
        return "virtual hosts need root: network and mount namespaces, tc"
    tools = sorted({package for tool, package in _TOOLS.items() if not _has(tool)})
    if tools:
        return f"programs are missing; type: apt-get install {' '.join(tools)}"
    packages = [package for name, package in _PACKAGES.items() if not _has(name)]
    if packages and shutil.which("apt-get") is None:
        return f"Slurm is missing ({', '.join(packages)}) and there is no apt-get to install it"
    namespaces = ["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "mount", "--make-rprivate", "/"]
    tried = subprocess.run(namespaces, capture_output=True, text=True)
    if tried.returncode != 0:
        return f"this machine does not let root make namespaces: {tried.stderr.strip()}"
    return None


def install() -> None:
    """Install what is missing with apt-get.

    Raises:
        RuntimeError: apt-get failed.
    """
    packages = [package for name, package in _PACKAGES.items() if not _has(name)]
    if packages:
        command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
        if _apt(command).returncode != 0:
            _apt(["apt-get", "update"])
            done = _apt(command)
            if done.returncode != 0:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}")
    # Slurm's PMIx plugin loads the unversioned name, which only the -dev package has.
    unversioned = _PMIX / "libpmix.so"
    if not unversioned.exists():
        unversioned.symlink_to("libpmix.so.2")


def _apt(command: list[str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
