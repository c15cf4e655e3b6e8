"""``doctor --burn SECONDS``: loads all ranks, and compares their speed and results."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpidist.cli.doctor.facts import ERROR, WARNING, BurnFacts, Finding, JobFacts
from mpidist.cli.json_output import speed_text, table_lines
from mpidist.collectives.communicator import Communicator
from mpidist.core.text import groups_of, names_text, numbered_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

Array = NDArray[np.floating]

# One matrix has 2 MiB. The copied arrays do not fit into a core's share of the caches.
_ROWS, _COPIED, _REDUCED, _WRITTEN = 512, (32 << 20) // 8, (16 << 20) // 8, (16 << 20) // 8
_PRODUCT, _COPY, _REDUCE, _FILE = "product", "memory", "all-reduce", "write, read"
_SLOW, _MOST_NODES = 0.9, 12


class _Load(NamedTuple):
    name: str
    run: Callable[[], Array]  # one step, with the result to check
    expected: int  # its checksum
    amount: float  # operations or bytes of one step


def checksum(result: Array) -> int:
    """Return the sum of an array's bits as integers, which every wrong bit changes."""
    return int(result.view(np.uint64).sum(dtype=np.uint64))


def run_loads(comm: MPI.Intracomm, seconds: float, folder: str | None) -> BurnFacts:
    """Run each load for a quarter of the seconds (collective). Return this rank's figures."""
    found = BurnFacts()
    with Communicator(comm) as ours:
        for load in (_product(), _copy(), _all_reduce(ours)):
            _measure(found, load, seconds / 4, comm if load.name == _REDUCE else None)
            comm.Barrier()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            _measure(found, _write_and_read(file), seconds / 4)
    except OSError as error:
        found.rates[_FILE] = 0.0
        found.errors.append(f"cannot write and read a file in {folder or tempfile.gettempdir()}: {error.strerror}")
    return found


def _measure(found: BurnFacts, load: _Load, seconds: float, comm: MPI.Intracomm | None = None) -> None:
    """Run a load, and note its rate and whether all results are right. With ``comm``, rank 0 decides on the end."""
    load.run()  # touches the memory
    count, is_right, goes_on, start, elapsed = 0, True, True, time.perf_counter(), 0.0
    while goes_on:
        is_right &= checksum(load.run()) == load.expected
        count += 1
        elapsed = time.perf_counter() - start
        goes_on = elapsed < seconds
        if comm is not None:
            goes_on = comm.bcast(goes_on)
    found.rates[load.name] = load.amount * count / elapsed
    if not is_right:
        found.errors.append(f"computed a different checksum in {load.name}")


# All values are small whole numbers, so every order of additions gives the same bits.


def _product() -> _Load:
    rows, columns = np.arange(_ROWS) % 7.0, np.arange(_ROWS) % 5.0
    left, right = np.repeat(rows[:, None], _ROWS, axis=1), np.repeat(columns[None], _ROWS, axis=0)
    return _Load(_PRODUCT, lambda: left @ right, checksum(_ROWS * np.outer(rows, columns)), 2.0 * _ROWS**3)


def _copy() -> _Load:
    source, target = np.arange(_COPIED) % 1000.0, np.empty(_COPIED)
    # Read and written, then read by the checksum.
    return _Load(_COPY, lambda: np.positive(source, out=target), checksum(source), 3.0 * source.nbytes)


def _all_reduce(comm: Communicator) -> _Load:
    common = np.arange(_REDUCED) % 1000.0
    value, total = common + comm.rank, comm.size * common + sum(range(comm.size))
    return _Load(_REDUCE, lambda: comm.all_reduce("SUM", value), checksum(total), 1.0 * value.nbytes)


def _write_and_read(file: IO[bytes]) -> _Load:
    content, found = np.arange(_WRITTEN) % 1000.0, np.empty(_WRITTEN)

    def run() -> Array:
        file.seek(0)
        file.write(content.data)
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # to read from the disk, not from memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        file.readinto(found.data.cast("B"))  # type: ignore[attr-defined]
        return found

    return _Load(_FILE, run, checksum(content), 2.0 * content.nbytes)


# Comparison -----------------------------------------------------------------------------------------------------


def check_burn(job: JobFacts) -> list[Finding]:
    """Check checksums, and compare nodes and ranks with the medians."""
    errors = groups_of((rank, text) for rank, facts in enumerate(job.burn) for text in facts.errors)
    slow = _slow(job)
    hosts = {job.known[rank].host for _, ranks in errors for rank in ranks}
    hosts.update(host for found in slow.values() for host, _ in found)
    command = f"--exclude={hostlist(sorted(hosts))}   # for sbatch, salloc or srun of Slurm"
    texts = []
    for text, ranks in errors:
        places = names_text(dict.fromkeys(job.known[rank].host for rank in ranks))
        texts.append((ERROR, f"{numbered_ranks(ranks).capitalize()} on {places} {text}."))
    for name, found in slow.items():
        names = names_text((text for _, text in found), most=8)
        texts.append((WARNING, f"More than 10 % below the median in {name}: {names}."))
    return [Finding(level, "burn", text, command) for level, text in texts]


def _of_nodes(job: JobFacts) -> dict[str, dict[str, float]]:
    """Return the mean rate of each node's ranks, by load and machine."""
    return {
        name: {node: fmean(job.burn[rank].rates[name] for rank in ranks) for node, ranks in job.machines.items()}
        for name in (job.burn[0].rates if job.burn else ())
    }


def _slow(job: JobFacts) -> dict[str, list[tuple[str, str]]]:
    """Return host and text of slow nodes and of other nodes' slow ranks, by load."""
    slow: dict[str, list[tuple[str, str]]] = {}
    for name, of_node in _of_nodes(job).items():
        usual, usual_rank = median(of_node.values()), median(facts.rates[name] for facts in job.burn)
        for node, ranks in job.machines.items():
            host = job.known[ranks[0]].host
            if of_node[node] < _SLOW * usual:
                slow.setdefault(name, []).append((host, f"{host} by {1 - of_node[node] / usual:.0%}"))
                continue
            for rank in ranks:
                rate = job.burn[rank].rates[name]
                if rate < _SLOW * usual_rank:
                    text = f"rank {rank} on {host} by {1 - rate / usual_rank:.0%}"
                    slow.setdefault(name, []).append((host, text))
    return slow


def burn_lines(job: JobFacts) -> list[str]:
    """Return the table of the nodes' figures, the slowest first, and the medians."""
    of_nodes = _of_nodes(job)
    if not of_nodes:
        return []
    usual = {name: median(rates.values()) for name, rates in of_nodes.items()}

    def row(label: str, rates: Iterable[float]) -> list[str]:
        product, *others = rates
        return [label, f"{product / 1e9:.3g} GFLOP/s", *map(speed_text, others)]

    nodes = sorted(job.machines, key=lambda node: min(of_nodes[name][node] / (usual[name] or 1.0) for name in usual))
    rows = [["node", *usual], row("median", usual.values())]
    for node in nodes[:_MOST_NODES]:
        rows.append(row(job.known[job.machines[node][0]].host, (rates[node] for rates in of_nodes.values())))
    lines = table_lines(rows)
    lines += [f"and {len(nodes) - _MOST_NODES} nodes more, see --json"] * (len(nodes) > _MOST_NODES)
    return [f"{'' if number else 'each rank':<12}{line}" for number, line in enumerate(lines)]


def hostlist(hosts: Sequence[str]) -> str:
    """Return hosts in Slurm's form.

    >>> hostlist(["gpu07", "login", "node1.hpc", "node3", "node4"])
    'gpu07,login,node[1,3-4]'
    """
    numbers: dict[str, list[str]] = {}
    for host in hosts:
        name, prefix = host.partition(".")[0], host.partition(".")[0].rstrip("0123456789")
        numbers.setdefault(prefix, []).append(name.removeprefix(prefix))
    texts = []
    for prefix, found in numbers.items():
        runs = [[found[0], found[0]]]
        for number in found[1:]:
            if len(number) == len(runs[-1][1]) and int(number) == int(runs[-1][1]) + 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        text = ",".join(first if first == last else f"{first}-{last}" for first, last in runs)
        texts.append(f"{prefix}[{text}]" if len(found) > 1 else f"{prefix}{text}")
    return ",".join(texts)
