"""SimGrid: the platform on which a trace is replayed, and the replay (Debian's package simgrid).

The platform is a cluster: each node has a link out and one in, which its ranks share. Messages take what the model's
parameters say and nothing else: SimGrid's factors for TCP on gigabit Ethernet are off (its model CM02), since latency
and bandwidth are measured between programs. What is left to SimGrid is who waits for whom, and who shares which link.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from benchmarks.measuring.jobs import run_job
from benchmarks.predicting.trace import Schedule, lines_of

_MODEL = (
    *("--cfg=network/model:CM02", "--cfg=network/crosstraffic:0"),
    # The time that the simulator itself takes is none of the ranks'.
    *("--cfg=smpi/cpu-threshold:-1", "--cfg=smpi/host-speed:1Gf"),
    # Ten thousand ranks shall fit: KiB of stack, and no page behind it that the kernel would have to count.
    *("--cfg=contexts/stack-size:256", "--cfg=contexts/guard-size:0"),
    "--log=xbt_cfg.thresh:warning",
)
_PLATFORM = """<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <zone id="world" routing="Full">
    <cluster id="nodes" prefix="node" suffix="" radical="0-{last}" speed="1Gf" core="{cores}"
             bw="{bandwidth:.9g}Bps" lat="{latency:.9g}s" sharing_policy="SPLITDUPLEX"/>
  </zone>
</platform>
"""


def problem() -> str | None:
    """Return why nothing can be replayed here, None where it can."""
    return None if shutil.which("smpirun") else "there is no smpirun; type: apt-get install simgrid"


def write(folder: Path, schedule: Schedule, nodes: int, cores: int, *, latency: float, bandwidth: float) -> list[str]:
    """Write trace, platform and list of hosts into a folder; return the command that replays them.

    Args:
        folder: Is made.
        schedule: Of ranks in blocks, as many on each node.
        nodes: Their number.
        cores: Of a node.
        latency: Seconds from one node to another.
        bandwidth: Bytes per second out of a node, and into it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / "trace.txt"
    with trace.open("w") as file:
        file.writelines(f"{line}\n" for line in lines_of(schedule))
    # A message crosses two links.
    platform = _PLATFORM.format(last=nodes - 1, cores=cores, bandwidth=bandwidth, latency=latency / 2)
    (folder / "platform.xml").write_text(platform)
    (folder / "hosts").write_text("".join(f"node{node}\n" * (len(schedule) // nodes) for node in range(nodes)))
    (folder / "traces").write_text(f"{trace.resolve()}\n")
    files = ["-platform", str(folder / "platform.xml"), "-hostfile", str(folder / "hosts")]
    return ["smpirun", "-no-privatize", "-np", str(len(schedule)), *files, "-replay", str(folder / "traces"), *_MODEL]


def replay(command: list[str], seconds: float) -> float:
    """Run the command of :func:`write`; return the seconds that SimGrid says its ranks take.

    Raises:
        SystemExit: It ran longer than ``seconds``, or did not come to its end.
    """
    wrong, printed = run_job(command, seconds)
    found = re.search(r"Simulation time ([0-9.e+-]+)", printed)
    if wrong or found is None:
        # It may have a line for each of ten thousand ranks.
        raise SystemExit(f"{' '.join(command)}: {(wrong or printed)[:1000]}")
    return float(found[1])
