"""The facts that doctor's checks are made of: plain records, which pickle and become JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from mpidist.topology.launchers import LauncherInfo


@dataclass(frozen=True)
class MpiFacts:
    """The MPI library of a rank.

    Attributes:
        vendor: As ``mpidist.topology.mpi_library`` names it.
        name: Vendor and version.
        path: Its file; None where the system does not tell.
        thread_level: "MPI_THREAD_MULTIPLE" and so on.
        size: Ranks of the world.
        rank: Of this process in it.
    """

    vendor: str
    name: str
    path: str | None
    thread_level: str
    size: int
    rank: int


@dataclass(frozen=True)
class CoreFacts:
    """The cores of a rank.

    Attributes:
        allowed: Those that it may run on.
        machine: How many the machine has.
        quota: How many it may use the time of, where its container limits that.
        thread_settings: Variables that limit the threads of BLAS and OpenMP.
    """

    allowed: tuple[int, ...]
    machine: int
    quota: float | None = None
    thread_settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SharedMemoryFacts:
    """Size and free space of /dev/shm in bytes."""

    total: int
    free: int


@dataclass(frozen=True)
class NcclNet:
    """The network that NCCL takes between nodes.

    Attributes:
        name: InfiniBand, a plugin with its library, or TCP sockets; empty without NCCL.
        lacks: Why it does not take a faster one that is there; empty where it takes the fastest.
        command: The command that makes NCCL take it.
    """

    name: str = ""
    lacks: str = ""
    command: str = ""


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs of a rank.

    Attributes:
        has_driver: Whether the machine has an NVIDIA driver, and CUDA_VISIBLE_DEVICES does not hide every GPU.
        visible: PCI bus ids of those that CuPy sees.
        names: Their names; that of a slice (MIG) ends with its profile, such as MIG 1g.10gb.
        cores: The cores next to each, of its socket or NUMA node; empty where the kernel does not say.
        problem: Why CuPy cannot be used, and the command to type; empty where it can, and without a driver.
        nccl: Version of NCCL; empty where there is none.
        nccl_problem: Why NCCL cannot be used; empty where it can, and where CuPy cannot.
        variable: CUDA_VISIBLE_DEVICES; None where it is not set.
        net: The network of NCCL.
    """

    has_driver: bool = False
    visible: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    cores: tuple[tuple[int, ...], ...] = ()
    problem: str = ""
    nccl: str = ""
    nccl_problem: str = ""
    variable: str | None = None
    net: NcclNet = NcclNet()


@dataclass(frozen=True)
class Interface:
    """A network interface that is up.

    Attributes:
        name: Such as eth0, or mlx5_0 for InfiniBand.
        network: Address and length of its prefix, such as 10.0.0.1/24; empty without IPv4.
        mbit_per_second: Its speed; None where the system does not say.
        is_infiniband: Whether it is a device of InfiniBand (or RoCE), which programs use past the kernel.
    """

    name: str
    network: str = ""
    mbit_per_second: int | None = None
    is_infiniband: bool = False


@dataclass(frozen=True)
class RankFacts:
    """The facts that one rank knows of itself.

    Attributes:
        host: Name of its host.
        machine: Equal for the ranks that share host, memory and processes.
        launcher: The facts of its launcher; None without one.
        mpi: Its MPI library.
        software: Versions by name.
        cores, shared_memory, gpus, interfaces: Of its machine, as it sees them.
        settings: The ``MPIDIST_*`` variables that it has.
        wrong_settings: The errors of their values, by variable.
        unknown_settings: Those that mean nothing.
        batch_system: In whose job it is; None outside of one.
        job_hosts: The hosts of the job, where the batch system names them.
        without_core: Why it has no native core; empty where it has one.
        without_core_between_nodes: Why it has none in a job of several nodes; empty where it has one.
        loose_barriers: Whether the launcher's barriers let ranks go before those of other nodes have come.
    """

    host: str
    machine: str
    launcher: LauncherInfo | None
    mpi: MpiFacts
    software: dict[str, str]
    cores: CoreFacts
    shared_memory: SharedMemoryFacts | None
    gpus: GpuFacts = GpuFacts()
    interfaces: tuple[Interface, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    wrong_settings: dict[str, str] = field(default_factory=dict)
    unknown_settings: tuple[str, ...] = ()
    batch_system: str | None = None
    job_hosts: tuple[str, ...] = ()
    without_core: str = ""
    without_core_between_nodes: str = ""
    loose_barriers: bool = False


@dataclass(frozen=True)
class Reach:
    """The result of messages between pairs of ranks.

    Attributes:
        seconds: How long a message was waited for.
        tested: How many pairs were to exchange a message, as far as their ranks could be asked.
        failed: Pairs of which one did not hear from the other.
        hosts: Names of hosts by rank, as far as any rank has heard them.
        size: Ranks of the world.
        silent: Ranks that rank 0 could not ask.
    """

    seconds: float
    tested: int
    failed: tuple[tuple[int, int], ...]
    hosts: dict[int, str]
    size: int
    silent: tuple[int, ...] = ()

    @property
    def ring(self) -> list[tuple[int, int]]:
        """The hops of the ring of all ranks that could be asked about. The lower rank of each comes first."""
        hops = {tuple(sorted((rank, (rank + 1) % self.size))) for rank in range(self.size)}
        return sorted((one, other) for one, other in hops if not {one, other} <= set(self.silent))


@dataclass(frozen=True)
class LinkSpeed:
    """The speed of messages between two ranks.

    Attributes:
        ranks: Which.
        hosts: Theirs.
        between_nodes: Whether they are on different nodes.
        latency_seconds: One way, of 8 bytes.
        bytes_per_second: One way, of large messages.
    """

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    between_nodes: bool
    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class CollectiveFacts:
    """The facts of mpidist's collectives on these ranks.

    Attributes:
        node_of_rank: Node of every rank, as mpidist counts them.
        reads_neighbours: Whether ranks of a node may read one another's memory.
        place: The row of the table that counts.
        table: The table at that place, as text.
        table_origin: Where it comes from.
        table_error: The error of the tuning file; empty where there is none.
        gpu_table: The row for arrays on GPUs, as text; empty without GPUs.
        mpi_takes_gpu_memory: Whether MPI is given pointers to GPU memory; None without GPUs.
    """

    node_of_rank: tuple[int, ...]
    reads_neighbours: bool
    place: str
    table: str
    table_origin: str
    table_error: str = ""
    gpu_table: str = ""
    mpi_takes_gpu_memory: bool | None = None


@dataclass(frozen=True)
class JobFacts:
    """All facts of the job.

    Attributes:
        ranks: By rank; None for a rank that could not be asked.
        reach: None where there is one rank only.
        links: Between some ranks; none where the ranks do not all reach one another.
        in_use: By host, the network interfaces that the messages between nodes took.
        collectives: None where it did not come to that.
    """

    ranks: tuple[RankFacts | None, ...]
    reach: Reach | None = None
    links: tuple[LinkSpeed, ...] = ()
    in_use: dict[str, tuple[str, ...]] = field(default_factory=dict)
    collectives: CollectiveFacts | None = None

    @property
    def first(self) -> RankFacts:
        """The facts of rank 0, which writes the report."""
        facts = self.ranks[0]
        assert facts is not None
        return facts

    @cached_property
    def known(self) -> dict[int, RankFacts]:
        """The facts by rank, of the ranks that could be asked."""
        return {rank: facts for rank, facts in enumerate(self.ranks) if facts is not None}

    @cached_property
    def machines(self) -> dict[str, list[int]]:
        """The ranks of each machine, machines in the order of their lowest ranks."""
        machines: dict[str, list[int]] = {}
        for rank, facts in self.known.items():
            machines.setdefault(facts.machine, []).append(rank)
        return machines

    def host(self, rank: int) -> str | None:
        """Return the host of a rank, None where nobody knows it."""
        facts = self.ranks[rank]
        if facts is not None:
            return facts.host
        if self.reach is not None and rank in self.reach.hosts:
            return self.reach.hosts[rank]
        # The others are there.
        return self._unheard_host

    @cached_property
    def _unheard_host(self) -> str | None:
        """The only host of the job that nobody has heard of."""
        named = {facts.host.partition(".")[0] for facts in self.known.values()}
        named |= {host.partition(".")[0] for host in (self.reach.hosts.values() if self.reach else ())}
        left = [host for host in self.first.job_hosts if host.partition(".")[0] not in named]
        return left[0] if len(left) == 1 else None
