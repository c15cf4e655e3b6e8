"""Settings of a lab, and the names and addresses that follow from them."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

LOGIN = "login"
# Every host has these for itself, as machines have; the rest of the file system is shared by all.
PRIVATE = ("/tmp", "/var/tmp")
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Settings:
    """What a lab is like.

    Attributes:
        name: Tells labs apart that are up at the same time; begins the names of their network devices.
        hosts: How many compute hosts: node0, node1, ...
        cpus: CPUs that each host claims to have; they need not exist.
        memory: MiB that each host claims to have.
        gpus: Device files on each host that Slurm hands out as GPUs.
        rate: What each host sends at most, such as 1gbit; None does not limit it.
        burst: How much it may send at once after a pause. On a slow link less than messages have, as 8k: what a pause
            has saved goes faster than any link.
        switches: How many switches the compute hosts are at, as many at each, one after the other. With several, each
            has one link, a trunk, to a switch in the middle: a tree.
        trunk: What each trunk carries at most, in each direction; None does not limit it.
        enforce_memory: Kill steps that take more memory than they asked for (needs cgroup v1).
        shared: Folders below /tmp that all hosts see, beside the checkout and the Python that runs this.
    """

    name: str = "mpidist"
    hosts: int = 4
    cpus: int = 4
    memory: int = 2000
    gpus: int = 2
    rate: str | None = None
    burst: str = "128k"
    switches: int = 1
    trunk: str | None = None
    enforce_memory: bool = False
    shared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (self.name.isalnum() and len(self.name) <= 8):
            raise ValueError(f"name is {self.name!r}; expected at most 8 letters and digits, such as lab2")
        if not 1 <= self.hosts <= 200:
            raise ValueError(f"hosts is {self.hosts}; expected 1 to 200")
        if not 1 <= self.switches <= self.hosts:
            raise ValueError(f"switches is {self.switches}; expected 1 to {self.hosts}, the number of hosts")
        if self.trunk is not None and self.switches == 1:
            raise ValueError(f"trunk is {self.trunk} and switches is 1; expected at least 2 switches")
        if not re.fullmatch(r"[1-9]\d*k", self.burst):
            raise ValueError(f"burst is {self.burst!r}; expected KiB, such as 8k")

    @property
    def burst_bytes(self) -> int:
        """The burst as a number."""
        return int(self.burst.removesuffix("k")) * 1024

    @property
    def folder(self) -> Path:
        """State and logs; every host sees it, so it must not lie below ``PRIVATE``."""
        return Path("/var/lib/mpidist-lab", self.name)

    @property
    def compute_hosts(self) -> list[str]:
        """Names of the hosts that run jobs."""
        return [f"node{index}" for index in range(self.hosts)]

    @property
    def all_hosts(self) -> list[str]:
        """The controller, which is the login host, and the compute hosts."""
        return [LOGIN, *self.compute_hosts]

    @property
    def bridge(self) -> str:
        """Name of the switch between the hosts, or in the middle of several."""
        return f"{self.name}-sw"

    @property
    def leaves(self) -> list[str]:
        """Names of the switches around that in the middle; none where that is the only one."""
        return [f"{self.bridge}{number}" for number in range(self.switches)] if self.switches > 1 else []

    def switch(self, host: str) -> str:
        """Return the name of the switch that a host is at."""
        if host == LOGIN or not self.leaves:
            return self.bridge
        return self.leaves[self.compute_hosts.index(host) * self.switches // self.hosts]

    def namespace(self, host: str) -> str:
        """Return the name of a host's network namespace."""
        return f"{self.name}-{host}"

    def port(self, host: str) -> str:
        """Return the name of the end of a host's cable at the switch; the kernel allows 15 characters."""
        return f"{self.name}-{'l' if host == LOGIN else host.removeprefix('node')}"

    def address(self, host: str) -> str:
        """Return the IP address of a host; labs have switches of their own, so all use the same ones."""
        return f"10.78.0.{250 if host == LOGIN else int(host.removeprefix('node')) + 1}"

    def kept_visible(self) -> list[str]:
        """Return the folders below ``PRIVATE`` that every host must see nevertheless."""
        wanted = {str(ROOT), str(Path(sys.prefix)), str(Path(sys.base_prefix)), *self.shared}
        paths = {str(Path(path).resolve()) for path in wanted}
        return sorted(path for path in paths if path.startswith(tuple(f"{private}/" for private in PRIVATE)))
