"""Lab: brings the cluster up and down, runs commands on its hosts, and makes faults."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from tests.cluster.lab import configuration, hosts, requirements
from tests.cluster.lab.settings import LOGIN, Settings

_UP_SECONDS = 30.0
_END_SECONDS = 3.0
_NAP_SECONDS = 0.1
# Marks what a command starts on any host: what daemons start for it inherits it, too.
_MARK = "MARK_OF_LAB_COMMAND"
_RANK_VARIABLES = (b"PMIX_RANK=", b"PMI_RANK=")


class LabError(RuntimeError):
    """The lab is not in the state that was expected, or does not come up."""


class Lab:
    """A cluster that :meth:`up` brings up; as a context manager it is up inside and down afterwards::

    with Lab(Settings(hosts=2)) as lab:
        lab.run("login", ["srun", "-N2", "hostname"]).stdout
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()

    @classmethod
    def attach(cls, name: str = Settings.name) -> Lab:
        """Return the lab of that name that is up (or half up).

        Raises:
            LabError: There is none.
        """
        path = Settings(name=name).folder / "settings.json"
        if not path.exists():
            raise LabError(f"no lab {name} is up; type: python -m tests.cluster.lab --name {name} up")
        record = json.loads(path.read_text())
        return cls(Settings(**{**record, "shared": tuple(record["shared"])}))

    @property
    def scratch(self) -> Path:
        """An empty folder at the start, which every host sees; pytest's lie in /tmp, of which each has its own."""
        return self.settings.folder / "scratch"

    def up(self) -> None:
        """Bring the cluster up and wait until every compute host is idle.

        Raises:
            LabError: It is up already, the machine cannot, or a host does not come; then nothing is left.
        """
        reason = requirements.missing()
        if reason is not None:
            raise LabError(f"no lab can come up: {reason}")
        if self.settings.folder.exists():
            name = self.settings.name
            raise LabError(f"lab {name} is up already; type: python -m tests.cluster.lab --name {name} down")
        requirements.install()
        try:
            self.settings.folder.mkdir(parents=True)
            (self.settings.folder / "settings.json").write_text(json.dumps(asdict(self.settings)))
            configuration.write(self.settings)
            self._start()
        except BaseException as error:
            logs = self._ends_of_logs()
            self.down()
            if isinstance(error, Exception):
                raise LabError(f"the lab did not come up: {error}\n{logs}") from error
            raise

    def _start(self) -> None:
        hosts.add_switches(self.settings)
        for host in self.settings.all_hosts:
            hosts.connect(self.settings, host)
            hosts.boot(self.settings, host)
        self.wait_until_idle()

    def wait_until_idle(self, seconds: float = _UP_SECONDS) -> None:
        """Wait until Slurm has every compute host as idle.

        Raises:
            LabError: It has not in time.
        """
        deadline = time.monotonic() + seconds
        question = ["sinfo", "--noheader", "--Node", "--partition=debug", "--states=idle", "--format=%N %T"]
        while True:
            done = self.run(LOGIN, question, timeout=30.0)
            # A host that no longer answers is still idle until its time is up: "idle*".
            idle = [line.split()[0] for line in done.stdout.splitlines() if line.endswith(" idle")]
            if len(idle) == self.settings.hosts:
                return
            if time.monotonic() > deadline:
                raise LabError(f"only {idle} of {self.settings.hosts} hosts are idle after {seconds:g} s")
            time.sleep(_NAP_SECONDS)

    def down(self) -> None:
        """End all hosts and remove everything; what is not there is not missed."""
        if not self.settings.folder.exists():
            return
        hosts.power_off(self.settings, self.settings.all_hosts)
        for host in self.settings.all_hosts:
            hosts.disconnect(self.settings, host)
        hosts.remove_switches(self.settings)
        self._remove_cgroups()
        shutil.rmtree(self.settings.folder)

    def _remove_cgroups(self) -> None:
        """Remove the groups that slurmd leaves behind where memory is enforced, the innermost first."""
        for group in Path("/sys/fs/cgroup").glob("*/slurm_*") if self.settings.enforce_memory else ():
            if group.name.removeprefix("slurm_") in self.settings.compute_hosts:
                for folder, _, _ in os.walk(group, topdown=False):
                    os.rmdir(folder)

    def _ends_of_logs(self) -> str:
        logs = sorted((self.settings.folder / "log").glob("*.log"))
        return "\n".join(f"{path.name}: {' | '.join(path.read_text().splitlines()[-4:])}" for path in logs)

    def __enter__(self) -> Lab:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    # Commands ---------------------------------------------------------------------------------------------

    def command(self, host: str, arguments: Sequence[str], folder: str | None = None) -> list[str]:
        """Return the command that runs ``arguments`` on a host, in the current folder or another."""
        return hosts.enter(self.settings, host, list(arguments), folder or os.getcwd())

    def run(
        self,
        host: str,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        folder: str | None = None,
        timeout: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host and return what it printed, whatever its status.

        Args:
            host: "login", "node0", ...
            arguments: The command.
            env: Its environment; that of this process by default.
            folder: Where it runs; it must be visible there.
            timeout: Seconds until it is ended, with everything that it has started on any host.

        Raises:
            TimeoutError: It did not end in time; the text has its output, with the stacks of Python ranks where
                PYTHONFAULTHANDLER is set.
        """
        mark = f"{_MARK}={uuid.uuid4().hex}"
        process = subprocess.Popen(
            self.command(host, arguments, folder),
            cwd="/",
            env={**(os.environ if env is None else env), _MARK: mark.partition("=")[2]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            out, err = _stacks_and_end(process, mark)
            text = f"{' '.join(arguments)} did not end within {timeout:g} s on {host}\n{out}\n{err}"
            raise TimeoutError(text) from None
        except BaseException:
            _stacks_and_end(process, mark)
            raise
        return subprocess.CompletedProcess(list(arguments), process.returncode, out, err)

    # Faults -----------------------------------------------------------------------------------------------

    def off(self, host: str) -> None:
        """Cut a host's power: all its processes end, and its cable is dead."""
        hosts.set_cable(self.settings, host, "down")
        hosts.power_off(self.settings, [host])

    def boot(self, host: str) -> None:
        """Start a host that is off."""
        hosts.set_cable(self.settings, host, "up")
        hosts.boot(self.settings, host)

    def cut(self, host: str) -> None:
        """Pull a host's network cable out."""
        hosts.set_cable(self.settings, host, "down")

    def mend(self, host: str) -> None:
        """Plug a host's network cable in again."""
        hosts.set_cable(self.settings, host, "up")

    def rate(self, host: str, rate: str) -> None:
        """Change what a host sends at most, such as 100mbit."""
        hosts.limit(self.settings, host, rate)


def _stacks_and_end(process: subprocess.Popen[str], mark: str) -> tuple[str, str]:
    """End a command with all that it has started on any host, and return what it printed.

    Ranks dump their stacks first (faulthandler answers SIGABRT). SIGTERM lets srun and salloc give their allocation
    back: nobody else would.
    """
    _signal_marked(mark, signal.SIGABRT, only_ranks=True)
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.communicate(timeout=_END_SECONDS)
            _signal_marked(mark, number)
        return process.communicate()
    finally:
        _signal_marked(mark, signal.SIGKILL)


def _signal_marked(mark: str, number: int, only_ranks: bool = False) -> None:
    """Send a signal to every process on this machine that carries ``mark``, whichever host it is on."""
    for entry in Path("/proc").iterdir():
        # Processes end between the listing and the question, and the kernel may guard some of another user's.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            is_rank = any(variable.startswith(_RANK_VARIABLES) for variable in variables)
            if mark.encode() in variables and (is_rank or not only_ranks):
                os.kill(int(entry.name), number)
