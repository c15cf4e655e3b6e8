"""The configuration files of Slurm, munge and the hosts, which all hosts share."""

from __future__ import annotations

import os
from pathlib import Path

from tests.cluster.lab.settings import LOGIN, Settings

# CgroupPlugin: slurmd 22.05 sets one up even where nothing uses it, and dies looking for the right one, since
#   `ip netns exec` mounts a /sys without cgroups; naming it stops the search.
# config_overrides: hosts may claim more CPUs than there are.
# cred_expire: a requeued job waits so long, 120 s by default.
# The times are short, so that tests of faults are: 30 s KillWait, 300 s SlurmdTimeout by default.
_SLURM = """\
ClusterName=lab
SlurmctldHost={login}({login_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/log/slurmctld.pid
SlurmdPidFile={folder}/log/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/{tracking}
TaskPlugin=task/{task}
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters={selects}
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=5
SlurmdTimeout=15
SlurmctldTimeout=10
MinJobAge=3600
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
AccountingStorageType=accounting_storage/none
{gres_types}
NodeName={nodes} CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 \
RealMemory={memory} {gres} State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
_CGROUP = """\
CgroupPlugin=cgroup/v1
ConstrainRAMSpace={enforce}
ConstrainSwapSpace=no
ConstrainCores=no
ConstrainDevices=no
"""


def write(settings: Settings) -> None:
    """Make the folders of a lab and write its files."""
    folder = settings.folder
    for name in ("etc", "state", "log", "dev", "processes", "scratch", "local"):
        (folder / name).mkdir(parents=True)
    for host in settings.compute_hosts:
        (folder / "spool" / host).mkdir(parents=True)
    etc = folder / "etc"
    nodes = f"node[0-{settings.hosts - 1}]"
    _write_munge_key(etc / "munge.key")
    lines = ["127.0.0.1 localhost", *(f"{settings.address(host)} {host}" for host in settings.all_hosts)]
    (etc / "hosts").write_text("\n".join(lines) + "\n")
    (etc / "cgroup.conf").write_text(_CGROUP.format(enforce="yes" if settings.enforce_memory else "no"))
    (etc / "gres.conf").write_text(_gres(settings, nodes))
    text = _SLURM.format(
        login=LOGIN,
        login_address=settings.address(LOGIN),
        folder=folder,
        tracking="cgroup" if settings.enforce_memory else "linuxproc",
        task="cgroup" if settings.enforce_memory else "none",
        selects="CR_Core_Memory" if settings.enforce_memory else "CR_Core",
        gres_types="GresTypes=gpu" if settings.gpus else "",
        gres=f"Gres=gpu:{settings.gpus}" if settings.gpus else "",
        nodes=nodes,
        cpus=settings.cpus,
        memory=settings.memory,
    )
    (etc / "slurm.conf").write_text(text)


def _write_munge_key(path: Path) -> None:
    with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as file:
        file.write(os.urandom(1024))


def _gres(settings: Settings, nodes: str) -> str:
    """Make the devices and return gres.conf: null devices, as Slurm takes nothing but character devices for GPUs."""
    if not settings.gpus:
        return ""
    devices = settings.folder / "dev"
    for index in range(settings.gpus):
        os.mknod(devices / f"nvidia{index}", 0o20666, os.makedev(1, 3))
    return f"NodeName={nodes} Name=gpu File={devices}/nvidia[0-{settings.gpus - 1}]\n"
