"""The records that doctor's checks read, and that ``doctor --json`` prints with these names."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from mpidist.topology.launchers import LauncherInfo

Pair = tuple[int, int]

ERROR = "error"
"""Jobs do not work, or not on all of these ranks."""
WARNING = "warning"
"""Jobs work, but slower or less reliably than they could."""


@dataclass(frozen=True)
class Finding:
    """A problem and its effect, and the command to type."""

    level: str  # ERROR or WARNING
    subject: str
    text: str
    command: str


@dataclass(frozen=True)
class MpiFacts:
    """The MPI library of a rank."""

    vendor: str  # a name of mpidist.topology.mpi_library
    name: str  # vendor and version
    path: str | None  # file of the library, if known
    thread_level: str  # such as "MPI_THREAD_MULTIPLE"
    size: int  # ranks of the world
    rank: int


@dataclass(frozen=True)
class CoreFacts:
    """The cores of a rank."""

    allowed: tuple[int, ...]
    machine: int  # number of cores of the machine
    quota: float | None = None  # number of cores whose time a container may use, if limited
    thread_settings: dict[str, str] = field(default_factory=dict)  # variables that limit threads of BLAS and OpenMP


@dataclass(frozen=True)
class SharedMemoryFacts:
    """Bytes of /dev/shm."""

    total: int
    free: int


@dataclass(frozen=True)
class NcclNet:
    """The network of NCCL between nodes."""

    name: str = ""  # InfiniBand, a plugin with its library, or TCP sockets
    lacks: str = ""  # why NCCL does not use a faster network of this machine
    command: str = ""  # makes NCCL use the faster network


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs of a rank."""

    has_driver: bool = False  # False if CUDA_VISIBLE_DEVICES hides every GPU, too
    visible: tuple[str, ...] = ()  # PCI bus ids of the GPUs that CuPy sees
    names: tuple[str, ...] = ()  # the name of a slice (MIG) ends with its profile, such as MIG 1g.10gb
    cores: tuple[tuple[int, ...], ...] = ()  # cores next to each GPU, empty if unknown
    problem: str = ""  # why CuPy cannot be used, and the command to type
    nccl: str = ""  # version
    nccl_problem: str = ""
    variable: str | None = None  # CUDA_VISIBLE_DEVICES
    net: NcclNet = NcclNet()


@dataclass(frozen=True)
class Interface:
    """A network interface that is up."""

    name: str  # such as eth0, or mlx5_0 for InfiniBand
    network: str = ""  # IPv4 address and length of its prefix, such as 10.0.0.1/24
    mbit_per_second: int | None = None
    is_infiniband: bool = False  # InfiniBand or RoCE


@dataclass(frozen=True)
class RankFacts:
    """The facts that one rank knows without messages."""

    host: str
    machine: str  # equal for ranks that share host, memory and processes
    launcher: LauncherInfo | None
    mpi: MpiFacts
    software: dict[str, str]  # versions by name
    cores: CoreFacts
    shared_memory: SharedMemoryFacts | None
    gpus: GpuFacts = GpuFacts()
    interfaces: tuple[Interface, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)  # MPIDIST_* variables
    wrong_settings: dict[str, str] = field(default_factory=dict)  # errors by variable
    unknown_settings: tuple[str, ...] = ()
    batch_system: str | None = None
    job_hosts: tuple[str, ...] = ()  # hosts of the batch job, if the system names them
    without_core: str = ""  # why the native core is missing
    without_core_between_nodes: str = ""  # why it is missing in jobs of several nodes
    loose_barriers: bool = False  # whether the launcher's barriers hold the ranks of one node only


@dataclass(frozen=True)
class Reach:
    """The result of messages between pairs of ranks."""

    seconds: float  # time limit of a message
    tested: int  # number of pairs, as far as their ranks could be asked
    failed: tuple[Pair, ...]
    hosts: dict[int, str]  # by rank, as far as any rank has received them
    size: int  # ranks of the world
    silent: tuple[int, ...] = ()  # ranks that rank 0 could not ask

    @property
    def ring(self) -> list[Pair]:
        """The pairs of neighbouring ranks, without pairs of silent ranks."""
        hops = {tuple(sorted((rank, (rank + 1) % self.size))) for rank in range(self.size)}
        return sorted((one, other) for one, other in hops if not {one, other} <= set(self.silent))


@dataclass(frozen=True)
class LinkSpeed:
    """The speed of messages between two ranks, one way."""

    ranks: Pair
    hosts: tuple[str, str]
    between_nodes: bool
    latency_seconds: float  # of 8 bytes
    bytes_per_second: float  # of large messages


@dataclass(frozen=True)
class CollectiveFacts:
    """The choices of mpidist's collectives on these ranks."""

    node_of_rank: tuple[int, ...]
    reads_neighbours: bool  # whether ranks of a node may read one another's memory
    place: str  # row of the table
    table: str  # that row
    table_origin: str
    table_error: str = ""
    gpu_table: str = ""  # row for arrays on GPUs; empty without GPUs
    mpi_takes_gpu_memory: bool | None = None  # None without GPUs


@dataclass(frozen=True)
class BurnFacts:
    """The result of ``--burn`` on one rank."""

    rates: dict[str, float] = field(default_factory=dict)  # floating-point operations, or bytes, per second, by load
    errors: list[str] = field(default_factory=list)  # such as a wrong checksum


@dataclass(frozen=True)
class JobFacts:
    """All facts of the job."""

    ranks: tuple[RankFacts | None, ...]  # None for silent ranks
    reach: Reach | None = None  # None for one rank
    links: tuple[LinkSpeed, ...] = ()
    in_use: dict[str, tuple[str, ...]] = field(default_factory=dict)  # interfaces of messages between nodes, by host
    collectives: CollectiveFacts | None = None
    burn: tuple[BurnFacts, ...] = ()  # by rank, with --burn

    @property
    def first(self) -> RankFacts:
        """The facts of rank 0, which writes the report."""
        facts = self.ranks[0]
        assert facts is not None
        return facts

    @cached_property
    def known(self) -> dict[int, RankFacts]:
        """The facts by rank, without silent ranks."""
        return {rank: facts for rank, facts in enumerate(self.ranks) if facts is not None}

    @cached_property
    def machines(self) -> dict[str, list[int]]:
        """The ranks of each machine, machines in the order of their lowest ranks."""
        machines: dict[str, list[int]] = {}
        for rank, facts in self.known.items():
            machines.setdefault(facts.machine, []).append(rank)
        return machines

    def host(self, rank: int) -> str | None:
        """Return the host of a rank. None if unknown."""
        facts = self.ranks[rank]
        if facts is not None:
            return facts.host
        if self.reach is not None and rank in self.reach.hosts:
            return self.reach.hosts[rank]
        return self._silent_host

    @cached_property
    def _silent_host(self) -> str | None:
        """The only host of the batch job that no rank has reported."""
        named = {facts.host.partition(".")[0] for facts in self.known.values()}
        named |= {host.partition(".")[0] for host in (self.reach.hosts.values() if self.reach else ())}
        left = [host for host in self.first.job_hosts if host.partition(".")[0] not in named]
        return left[0] if len(left) == 1 else None
