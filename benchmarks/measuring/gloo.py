"""Gloo through torch.distributed, for those who have PyTorch installed: the same work by another library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.measuring.inputs import Array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI

# What torch's DistributedDataParallel packs gradients into by default.
BUCKET_BYTES = 25 << 20


class Gloo:
    """The gloo process group of all ranks (collective); ``available`` is False where torch cannot be imported.

    It exists inside ``connected()`` only: its threads take time from whatever else is measured. Its ranks find each
    other through a TCP store on rank 0, over the loopback interface if there is one node.

    Args:
        comm: All ranks.
        wanted: False leaves gloo out without trying.
    """

    def __init__(self, comm: MPI.Intracomm, wanted: bool = True) -> None:
        self._comm = comm
        self.reason = "" if wanted else "left out as asked for"
        self.version = ""
        try:
            if wanted:
                import torch
                import torch.distributed

                self._torch: Any = torch
                self._dist: Any = torch.distributed
                self.version = torch.__version__
        except ImportError as error:
            self.reason = f"torch cannot be imported: {error}"
        self.reason = next((text for text in comm.allgather(self.reason) if text), "")
        self.available = not self.reason

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Have the process group while the block runs (collective)."""
        self._connect(self._comm)
        try:
            yield
        finally:
            self._dist.destroy_process_group()

    def _connect(self, comm: MPI.Intracomm) -> None:
        host = self._prepare(comm)
        is_first = comm.rank == 0
        server = self._dist.TCPStore(host, 0, comm.size, True, wait_for_workers=False) if is_first else None
        host, port = comm.bcast((host, server.port) if server else None)
        store = server or self._dist.TCPStore(host, port, comm.size, False)
        self._dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)

    def _prepare(self, comm: MPI.Intracomm) -> str:
        """Say in the environment where gloo is; return the address of this host."""
        from mpi4py import MPI

        self._torch.set_num_threads(1)
        host = MPI.Get_processor_name()
        hosts = comm.allgather(host)
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(hosts.count(host)))
        if len(set(hosts)) > 1:
            return host
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return "127.0.0.1"

    def all_reduce(self, array: Array) -> None:
        """Sum over all ranks, in place (gloo knows no other way)."""
        self._dist.all_reduce(self._torch.from_numpy(array))

    def reduce_scatter(self, out: Array, array: Array) -> None:
        """Sum over all ranks and leave this rank's equal part in ``out``."""
        parts = self._torch.from_numpy(array).chunk(array.size // out.size)
        self._dist.reduce_scatter(self._torch.from_numpy(out), list(parts))

    def all_gather(self, out: Array, array: Array) -> None:
        """Concatenate the arrays of all ranks into ``out``."""
        parts = self._torch.from_numpy(out).chunk(out.size // array.size)
        self._dist.all_gather(list(parts), self._torch.from_numpy(array))

    def broadcast(self, array: Array) -> None:
        """Replace the array by that of rank 0."""
        self._dist.broadcast(self._torch.from_numpy(array), 0)


class GlooBeside(Gloo):
    """A gloo process group beside torch.distributed's default one, which another backend has.

    Attributes:
        group: The process group, inside ``connected()``.
    """

    group: Any = None

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Have the process group while the block runs (collective)."""
        self._prepare(self._comm)
        self.group = self._dist.new_group(backend="gloo")
        try:
            yield
        finally:
            self._dist.destroy_process_group(self.group)
            self.group = None


class GlooBuckets:
    """Gradient arrays summed as DistributedDataParallel does it: in flat buckets of 25 MiB, last arrays first.

    Args:
        arrays: The gradients; ``reduce`` leaves their sums in ``outs``.
        outs: Arrays of the same shapes.
    """

    def __init__(self, arrays: Sequence[Array], outs: Sequence[Array]) -> None:
        import torch

        self._buckets: list[tuple[Any, list[tuple[Any, Any, Any]]]] = []
        members: list[int] = []
        for index in reversed(range(len(arrays))):
            members.append(index)
            if index == 0 or sum(arrays[i].nbytes for i in members) + arrays[index - 1].nbytes > BUCKET_BYTES:
                flat = torch.empty(sum(arrays[i].size for i in members))
                views = flat.split([arrays[i].size for i in members])
                parts = [
                    (torch.from_numpy(arrays[i]).view(-1), view, torch.from_numpy(outs[i]).view(-1))
                    for i, view in zip(members, views, strict=True)
                ]
                self._buckets.append((flat, parts))
                members = []

    def reduce(self) -> None:
        """Sum over all ranks; all buckets are under way together."""
        import torch.distributed as dist

        works = []
        for flat, parts in self._buckets:
            for source, view, _ in parts:
                view.copy_(source)
            works.append(dist.all_reduce(flat, async_op=True))
        for work, (_, parts) in zip(works, self._buckets, strict=True):
            work.wait()
            for _, view, target in parts:
                target.copy_(view)
