"""A fresh Debian in a folder, in which build steps of images run as in a container, and see nothing of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.packaging.release import run

# That of the image that the recipes begin with.
SUITE = "trixie"
# What programs of the root need of the kernel; the mounts end with the namespace.
_ENTER = """
cd "$0"
mount -t proc proc proc && mount --rbind /sys sys && mount --rbind /dev dev && mount -t tmpfs tmpfs dev/shm || exit
exec chroot . "$@"
"""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# By which programs reach packages where a machine has a way of its own to them.
_NETWORK = ("http_proxy", "https_proxy", "no_proxy", "PIP_INDEX_URL")


class CleanRoot:
    """A Debian that debootstrap makes; the test is skipped where it cannot.

    Args:
        folder: Where to make it; of the machine it gets how to reach packages alone.
        suite: Which Debian.
    """

    def __init__(self, folder: Path, suite: str = SUITE) -> None:
        missing = [name for name in ("debootstrap", "unshare", "chroot") if shutil.which(name) is None]
        if missing or os.geteuid() != 0:
            pytest.skip(f"needs root and debootstrap (missing: {', '.join(missing) or 'root'})")
        # With what the recipes install, so that only what pip fetches is fetched for each of them.
        command = ["debootstrap", "--variant=minbase", "--include=ca-certificates,python3-venv", suite, folder]
        made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if made.returncode != 0:
            pytest.skip(f"debootstrap {suite}: status {made.returncode}, {made.stdout[-500:]}")
        self.folder = folder
        shutil.copy("/etc/resolv.conf", folder / "etc")
        self.environment = {"PATH": _PATH, "HOME": "/root"}
        self.environment |= {name: os.environ[name] for name in _NETWORK if name in os.environ}
        if "PIP_CERT" in os.environ:
            self.environment["PIP_CERT"] = "/pip-cert.pem"
            shutil.copy(os.environ["PIP_CERT"], folder / "pip-cert.pem")

    def copy(self, folder: Path) -> CleanRoot:
        """Return one more, with what has been done in this one."""
        other = object.__new__(CleanRoot)
        run(["cp", "--archive", self.folder, folder])
        other.folder, other.environment = folder, dict(self.environment)
        return other

    def shell(self, script: str) -> str:
        """Run a script of sh there, and return what it printed."""
        enter = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", _ENTER, self.folder]
        return run([*enter, "sh", "-e", "-c", script], env=self.environment)
