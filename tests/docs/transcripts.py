"""What the pages say that commands print, and where it comes from."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

from tests.docs.pages import blocks


class Transcript(NamedTuple):
    """A block of text in a page.

    Attributes:
        page: Its path in the checkout.
        first: The line that it begins with.
    """

    page: str
    first: str

    @property
    def lines(self) -> list[str]:
        """All lines of it."""
        texts = [block.text.splitlines() for block in blocks(self.page) if block.kind == "text"]
        return next(lines for lines in texts if lines[0] == self.first)


_TRAINING = Transcript("docs/get_started.md", "multi_worker: 2 replica(s) in sync, 2 rank(s)")
_REPORT = Transcript("docs/tracing.md", "mpidist: collectives of 2 ranks, means over ranks, in 1.9 s")
_DOCTOR = Transcript("docs/doctor.md", "reach       ring: 4 of 4 hops; pairs: 6 of 6")
_PREDICTION = Transcript(
    "docs/scaling.md", "nodes  ranks    size  algorithm           slice     time  busbw(GB/s)  sent(MiB/node)"
)
_MISMATCH = Transcript(
    "README.md",
    "mpidist.core.errors.MismatchError: the ranks made different calls at the same point; "
    "expected the same operation, ...",
)
_DIFFERENT = "import mpidist, numpy\ncomm = mpidist.Communicator()\ncomm.all_reduce('SUM', numpy.zeros(5 - comm.rank))"
# The command that prints it, in a checkout with the program of the start page in train.py, and which lines are to come:
# others are those of one program, or name hosts.
PRINTED_BY = {
    _TRAINING: ("mpirun -n 2 python examples/train.py --out out", [0, 1, 2, 4, 5]),
    _MISMATCH: (f"printf {shlex.quote(_DIFFERENT)} > train.py; mpirun -n 2 python train.py || true", [0, 1, 3]),
    _REPORT: ("MPIDIST_REPORT=1 mpirun -n 2 python train.py", [0, 1]),
    _PREDICTION: (
        "python -m benchmarks predict --nodes 2,16,128,1250 --ranks-per-node 8 --sizes 4K,1M,64M --latency 15us "
        "--overhead 3us --meeting 3us --bandwidth 25gbit --reduce 10 --copy 10 --compute 180ms --model bert_base "
        "--bucket 25M --first-bucket 1M",
        list(range(19)),
    ),
    _DOCTOR: ("MPIDIST_RANKS_PER_NODE=2 mpirun -n 4 python -m mpidist doctor", [0, 2, 3, 4]),
}
_WAITS = "mpidist: ranks 0,3 of 4 have waited 60 s for the other ranks in all_reduce SUM of float64(5,), "
_RECEIVES = "mpidist: rank 0 of 4 waits for recv from rank 1 with tag 0 of float64(5,), at train.py:41 (step):"
_LATE = (
    "mpidist: rank 5 (node03) is 11.8 ms late in 92% of steps, in compute, since step 1,200: 18% of the job's time. "
    "Next: `python -m mpidist doctor --burn 30` on node03"
)
_NAN = (
    "NonFiniteError: the result of all_reduce SUM of float32(784, 128), float32(128,) has NaN or infinity. These "
    "contributions have such values:"
)
EXCEPTED = {
    Transcript("README.md", "launcher    srun, which started 4 ranks; the MPI world has 4"): (
        "needs hosts: tests/cluster/test_slurm_scripts.py"
    ),
    Transcript("README.md", "4 replicas: loss 0.00002, w [ 1. -2.  3.]"): "compared by tests/test_readme.py",
    Transcript("docs/doctor.md", "mpidist 0.1.0 doctor: 6 ranks, 3 hosts"): "needs hosts: tests/cluster/test_doctor.py",
    Transcript("docs/doctor.md", "each rank   node    product       memory     all-reduce  write, read"): (
        "needs a slow host: tests/cluster/test_doctor.py"
    ),
    Transcript("docs/hangs.md", _WAITS + "collective number 17:"): "a job that hangs: tests/collectives/test_hangs.py",
    Transcript("docs/hangs.md", _RECEIVES): "a job that hangs: tests/collectives/test_point_to_point.py",
    Transcript("docs/hangs.md", "communicator 1 of ranks 0-3"): "after a kill: tests/collectives/test_flight_record.py",
    Transcript("docs/stragglers.md", _LATE): "a late rank: tests/collectives/test_stragglers.py",
    Transcript("docs/stragglers.md", _NAN): "a NaN: tests/collectives/test_nan_check.py",
    Transcript("docs/top.md", "job of 4 ranks on node7: train.py"): "a job that hangs: tests/cli/test_top.py",
    Transcript("docs/horovod.md", "import horovod.torch as hvd"): "needs Horovod: it becomes the program below it",
}
_FIGURE = re.compile(r"\b[0-9a-f]{16}\b|\d[\d.,]*(e-\d+)?( (B|KiB|MiB|GiB|GB/s|MB/s|ns|us|ms|s)\b|%)?")


def without_figures(line: str) -> str:
    """Return a line with ``N`` for figures, which are those of one machine, up to ``...``."""
    return " ".join(_FIGURE.sub("N", line).split()).removesuffix(" ...")
