"""The lab itself: hosts are apart from one another, faults do what they say, and nothing stays behind."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.cluster.lab import Lab, LabError, Settings

pytestmark = pytest.mark.cluster


def left_behind(name: str) -> list[str]:
    """Return what there still is of a lab: folder, network namespaces, interfaces, processes."""
    found = [str(path) for path in Path("/run/netns").glob(f"{name}-*")]
    found += [str(path) for path in Path("/sys/class/net").glob(f"{name}-*")]
    folder = Settings(name=name).folder
    found += [str(folder)] if folder.exists() else []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().decode().replace("\0", " ") if entry.name.isdigit() else ""
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [line] if f"{folder} " in line or f"{folder}/" in line else []
    return found


def test_hosts_are_apart(lab: Lab) -> None:
    script = """
        touch /tmp/of.$(hostname) /dev/shm/of.$(hostname)
        sleep 0.3
        echo $(hostname) $(ls /tmp /dev/shm | grep -c '^of') $(cat /etc/hostname) $$
    """
    done = lab.run("login", ["srun", "--nodes=4", "--ntasks-per-node=1", "sh", "-c", script])
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split()[:2] for line in done.stdout.splitlines())
    assert lines == [[f"node{index}", "2"] for index in range(4)]
    assert lab.run("node2", ["hostname"]).stdout == "node2\n"
    assert socket.gethostname() not in lab.settings.all_hosts
    assert not Path("/tmp/of.node0").exists()


def test_a_cut_cable_and_its_repair(lab: Lab) -> None:
    reach = ["bash", "-c", "exec 3<>/dev/tcp/node1/6818"]
    assert lab.run("node0", reach).returncode == 0
    lab.cut("node1")
    with pytest.raises(TimeoutError, match="did not end within 1 s on node0"):
        lab.run("node0", reach, timeout=1.0)
    lab.mend("node1")
    assert lab.run("node0", reach).returncode == 0


def test_a_command_that_hangs_ends_on_every_host(lab: Lab) -> None:
    with pytest.raises(TimeoutError, match="on node0 and node1"):
        lab.run("login", ["srun", "--nodes=2", "sh", "-c", "echo on node0 and node1; sleep 1000"], timeout=1.0)
    for host in ("node0", "node1"):
        assert "sleep 1000" not in lab.run(host, ["ps", "-eo", "args"]).stdout
    lab.wait_until_idle()


def test_down_leaves_nothing(can_have_labs: None) -> None:
    name = f"t{os.getpid() % 100000}"
    with Lab(Settings(name=name, hosts=1, rate="1gbit")) as spare:
        assert len(left_behind(name)) > 5
        with pytest.raises(LabError, match=f"--name {name} down"):
            Lab(spare.settings).up()
        assert spare.run("login", ["srun", "hostname"]).stdout == "node0\n"
        assert Lab.attach(name).settings == spare.settings
    assert left_behind(name) == []
    with pytest.raises(LabError, match=f"no lab {name} is up"):
        Lab.attach(name)


def test_the_command_line_takes_the_lab_down_after_its_command(can_have_labs: None) -> None:
    name = f"v{os.getpid() % 100000}"
    lab = ["python3", "-m", "tests.cluster.lab", "--name", name]
    command = [*lab, "run", "--hosts", "1", "--", "sh", "-c", "hostname; exit 3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("login\n", 3), done.stderr
    assert left_behind(name) == []
    assert subprocess.run([*lab, "down"]).returncode == 0
    done = subprocess.run([*lab, "on", "login", "true"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count(f"no lab {name} is up")) == (1, 1)
