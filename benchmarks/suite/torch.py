"""Benchmarks of torch.distributed over mpidist: `mpirun -n 2 python -m benchmarks torch`, about three minutes.

Collectives and steps with DistributedDataParallel, beside gloo in the same job, bare mpi4py and the Communicator's own
calls. Between nodes gloo needs GLOO_SOCKET_IFNAME, such as eth0.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from benchmarks.bars.torch import verdicts
from benchmarks.measuring.gloo import GlooBeside
from benchmarks.measuring.machine import describe
from benchmarks.measuring.session import Session
from benchmarks.measuring.sizes import sizes_of_text
from benchmarks.measuring.wire import bits_per_second
from benchmarks.reports.files import RESULTS, Results
from benchmarks.reports.text import publish
from benchmarks.reports.torch import results_text
from mpidist.core.text import pip_install
from mpidist.topology import world_topology


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks torch", description=__doc__)
    top.add_argument(
        "--sizes",
        type=sizes_of_text,
        default=sizes_of_text("4,64,1K,4K,10K,16K,32K,64K,100K,256K,1M,4M,16M,64M"),
        metavar="A,B",
        help="sizes of the all-reduce, such as 4,256K,64M",
    )
    top.add_argument(
        "--other-sizes",
        type=sizes_of_text,
        default=sizes_of_text("1K,16K,256K,1M,16M,64M"),
        metavar="A,B",
        help="sizes of the other collectives",
    )
    top.add_argument("--operations", type=_list, help="some of all_reduce,all_gather,reduce_scatter,all_to_all; all")
    top.add_argument("--networks", type=_list, help="some of small,resnet50,transformer, may be empty; all")
    top.add_argument("--seconds", type=float, default=0.5, help="about how long one point is measured (0.5)")
    top.add_argument("--rate", help="speed of each node's link, such as 1gbit, for the floor")
    top.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files (out/benchmarks)")
    top.add_argument("--name", help="name of the result files (torch-RANKS-ranks)")
    return top


def main(arguments: list[str]) -> int:
    """Measure on every rank, print and write on rank 0 (collective).

    Returns:
        1 if a result was wrong, 2 without PyTorch.
    """
    options = parser().parse_args(arguments)
    if importlib.util.find_spec("torch") is None:
        print(f"python -m benchmarks torch: needs PyTorch; type: {pip_install('torch')}", file=sys.stderr)
        return 2
    session = Session.without_gloo(world_topology().world, options.seconds)
    gloo = GlooBeside(session.bare)
    session.gloo = gloo
    _measure(session, gloo, options)
    machine = describe(session.bare, gloo.version) | {"rate": options.rate}
    rate = None if options.rate is None else bits_per_second(options.rate)
    judged = verdicts(session.rows, session.figures, machine["nodes"], rate)
    results = Results(machine, session.rows, session.figures, judged, session.skipped)
    if session.rank == 0:
        publish(results, options.out, options.name or f"torch-{session.ranks}-ranks", results_text(results))
    session.close()
    return results.status


def _measure(session: Session, gloo: GlooBeside, options: argparse.Namespace) -> None:
    """Run the operations and the networks, over mpidist's process group (collective)."""
    import torch.distributed as dist

    from benchmarks.cases import torch_collectives, torch_steps
    from benchmarks.measuring.torch_models import NETWORKS

    operations = torch_collectives.COLLECTIVES if options.operations is None else options.operations
    networks = list(NETWORKS) if options.networks is None else options.networks
    sizes = {operation: options.sizes if operation == "all_reduce" else options.other_sizes for operation in operations}
    dist.init_process_group("mpidist")
    with session.progress_over(sum(map(len, sizes.values())) + len(networks)) as advance:
        for operation in operations:
            torch_collectives.run(session, gloo, operation, sizes[operation], advance)
        for name in networks:
            torch_steps.run(session, gloo, name, advance)
    dist.destroy_process_group()
