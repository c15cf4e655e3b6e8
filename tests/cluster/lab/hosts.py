"""One virtual host: its network, its power switch, and commands that run on it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.lab.settings import LOGIN, PRIVATE, Settings

_SCRIPT = Path(__file__).with_name("host.sh")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DEADLINE_SECONDS = 10.0
# The most that TCP hands over at once, and what is around it.
_USUAL_GSO_BYTES, _HEADERS_BYTES = 65536, 128
_NAP_SECONDS = 0.02
# Hosts that this process has started: it must reap them.
_started: dict[int, subprocess.Popen[bytes]] = {}


def command(*arguments: str) -> None:
    """Run a program of the system.

    Raises:
        RuntimeError: It failed; with what it said.
    """
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip() or f'status {done.returncode}'}")


def add_switches(settings: Settings) -> None:
    """Make the switches, and the trunks between them."""
    for switch in (settings.bridge, *settings.leaves):
        command("ip", "link", "add", switch, "type", "bridge")
        command("ip", "link", "set", switch, "up")
    for leaf in settings.leaves:
        # A trunk has an end at each switch, and each end sends what goes to the other one.
        ends = {f"{leaf}u": leaf, f"{leaf}d": settings.bridge}
        up, down = ends
        command("ip", "link", "add", up, "type", "veth", "peer", "name", down)
        for end, switch in ends.items():
            command("ip", "link", "set", end, "master", switch, "up")
            if settings.trunk is not None:
                command("tc", "qdisc", "replace", "dev", end, *_shaping(settings, settings.trunk))


def remove_switches(settings: Settings) -> None:
    """Take the switches and trunks away, as far as they are there."""
    for device in (*(f"{leaf}u" for leaf in settings.leaves), *settings.leaves, settings.bridge):
        if Path("/sys/class/net", device).exists():
            command("ip", "link", "del", device)


def connect(settings: Settings, host: str) -> None:
    """Give a host its network: eth0 inside, the other end of the cable at the switch."""
    namespace, port = settings.namespace(host), settings.port(host)
    command("ip", "netns", "add", namespace)
    command("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    command("ip", "link", "set", port, "master", settings.switch(host), "up")
    command("ip", "-n", namespace, "addr", "add", f"{settings.address(host)}/24", "dev", "eth0")
    command("ip", "-n", namespace, "link", "set", "lo", "up")
    command("ip", "-n", namespace, "link", "set", "eth0", "up")
    if settings.rate is not None:
        limit(settings, host, settings.rate)


def limit(settings: Settings, host: str, rate: str) -> None:
    """Set what a host sends at most, such as 100mbit."""
    inside = ("ip", "netns", "exec", settings.namespace(host))
    # What TCP hands over at once and is larger than the burst is cut into packets, each of which waits for a timer of
    # its own: with many hosts that costs more than their ranks do.
    largest = min(_USUAL_GSO_BYTES, settings.burst_bytes - _HEADERS_BYTES)
    command(*inside, "ip", "link", "set", "eth0", "gso_max_size", str(largest))
    command(*inside, "tc", "qdisc", "replace", "dev", "eth0", *_shaping(settings, rate))


def _shaping(settings: Settings, rate: str) -> tuple[str, ...]:
    return ("root", "tbf", "rate", rate, "burst", settings.burst, "latency", "20ms")


def set_cable(settings: Settings, host: str, state: str) -> None:
    """Plug a host's cable in ("up") or pull it out ("down")."""
    command("ip", "link", "set", settings.port(host), state)


def disconnect(settings: Settings, host: str) -> None:
    """Take a host's network away, as far as it is there."""
    if Path("/sys/class/net", settings.port(host)).exists():
        command("ip", "link", "del", settings.port(host))
    if Path("/run/netns", settings.namespace(host)).exists():
        command("ip", "netns", "del", settings.namespace(host))


def boot(settings: Settings, host: str) -> None:
    """Start a host.

    Raises:
        RuntimeError: It is running already, or ended at once.
    """
    if first_process(settings, host) is not None:
        raise RuntimeError(f"{host} is running already")
    namespaces = ("unshare", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
    role = LOGIN if host == LOGIN else "node"
    script = ("bash", str(_SCRIPT), str(settings.folder), host, role)
    env = {
        "PATH": _SYSTEM_PATH,
        "HOME": "/root",
        "PRIVATE": " ".join(PRIVATE),
        "SHARED": " ".join(settings.kept_visible()),
        "ENFORCE_MEMORY": "1" if settings.enforce_memory else "",
    }
    with (settings.folder / "log" / f"host.{host}.log").open("ab") as log:
        outer = subprocess.Popen(
            ["ip", "netns", "exec", settings.namespace(host), *namespaces, *script],
            cwd="/",
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    _started[outer.pid] = outer
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not (children := _children(outer.pid)):
        if outer.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{host} did not start; see {log.name}")
        time.sleep(_NAP_SECONDS)
    pids = [outer.pid, children[0]]
    record = " ".join(f"{pid} {_start_time(pid)}" for pid in pids)
    (settings.folder / "processes" / host).write_text(record)


def power_off(settings: Settings, names: Sequence[str]) -> None:
    """Cut the power of hosts: all their processes end; nothing happens to one that is off.

    Raises:
        RuntimeError: A host does not end.
    """
    for host in names:
        first = first_process(settings, host)
        if first is not None:
            os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + _DEADLINE_SECONDS
    for host in names:
        record = settings.folder / "processes" / host
        if record.exists():
            outer, start, *_ = (int(word) for word in record.read_text().split())
            while _runs(outer, start):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"process {outer} of {host} does not end")
                time.sleep(_NAP_SECONDS)
            record.unlink()


def _runs(pid: int, start: int) -> bool:
    """Whether a process that started then is still there; reaps one that this process had started."""
    if pid in _started and _started[pid].poll() is not None:
        del _started[pid]
    return _start_time(pid) == start


def first_process(settings: Settings, host: str) -> int | None:
    """Return the PID of a host's first process as this machine sees it, None if the host is off."""
    record = settings.folder / "processes" / host
    if not record.exists():
        return None
    _, _, pid, start = (int(word) for word in record.read_text().split())
    # A PID may have come to be another process's; its start time has not.
    return pid if _start_time(pid) == start else None


def enter(settings: Settings, host: str, arguments: list[str], folder: str) -> list[str]:
    """Return the command that runs ``arguments`` in ``folder`` on a host.

    Raises:
        RuntimeError: The host is off.
    """
    pid = first_process(settings, host)
    if pid is None:
        raise RuntimeError(f"{host} is off; expected one of {', '.join(settings.all_hosts)} that runs")
    into = ["nsenter", "--target", str(pid), "--net", "--uts", "--ipc", "--pid", "--mount"]
    return [*into, "sh", "-c", 'cd "$0" && exec "$@"', folder, *arguments]


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since this machine did; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name before it may hold spaces and brackets; the 22nd field is the 20th after it.
    return int(text.rpartition(")")[2].split()[19])
