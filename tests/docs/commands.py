"""The commands of all pages: those that run here, and why others do not."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

from tests.docs.pages import PAGES, Block, blocks
from tests.docs.programs import ELSEWHERE, programs_of
from tests.docs.shell import run_command
from tests.support.ranks.jobs import ROOT

# What a line begins with, behind variables that are set for it alone, and why it is not run. Its words are checked.
EXCEPTED = {
    r"(srun|salloc|sbatch|\$lab) ": "needs Slurm: tests/cluster has it, and runs the scripts of slurm/",
    r"lab=": "stands for what follows it there, which needs Slurm",
    r"python -m tests\.cluster\.lab ": "needs root: tests/cluster",
    r"module ": "the modules of a site",
    r"source ": "the environment of a reader",
    r"(python3 -m |\S+/)?pip ": "asks PyPI, or builds a release: tests/packaging installs what `make dist` makes",
    r"python3? -m venv ": "is for what pip then installs there: tests/packaging",
    r"(python3 -c \"import sysconfig|\. ~/venv/)": "needs the environment above: tests/packaging/test_clean_root.py",
    r"(docker|apptainer|spack|rattler-build) ": "is not on every machine: tests/packaging tries the recipes",
    r"brew ": "is for macOS",
    r"python -m mpidist launch --hostfile ": "needs several machines: tests/cli/test_launch.py has one",
    r"reframe ": "is not on every machine: tests/types has its program",
    r"unshare ": "needs rights that containers withhold",
    r"(git|tar|cp) ": "is about folders of the reader's",
    r"make ": "takes minutes, in environments of its own",
    r"mpich/bin/": "needs another MPI: `make test-mpich`",
    r"mpirun -n 2 python -m benchmarks( torch)?$": "measures for minutes: tests/benchmarks has it in short",
    r"python -m benchmarks predict .*--compare": "ends with 1, as some predictions are off, which the page says",
    r"python -m benchmarks predict .*--simgrid": "takes SimGrid and minutes: tests/benchmarks/predicting is shorter",
    r"python -m benchmarks (gpu|input)": "measures for minutes: tests/benchmarks has it in short",
    r"python -m tests\.chaos ": "takes minutes: tests/chaos has the short form",
    r"mpirun -n 4 python examples/train\.py --device gpu$": "needs GPUs: tests/examples has it on a stand-in",
}
_VARIABLES = r"(?:\w+=(?:\"[^\"]*\"|\S+) )*"
_START_PAGE = "docs/index.md"
# Files of the reader's, besides train.py.
_FILES = {
    "docs/benchmarks.md": dict.fromkeys(
        (
            *("before.json", "after.json", "out/benchmarks/2-ranks.json"),
            *("a1.json", "a2.json", "a3.json", "b1.json", "b2.json", "b3.json"),
        ),
        ROOT / "benchmarks/results/2-ranks.json",
    )
}
_FILES["docs/scaling.md"] = {"tuning.json": ROOT / "benchmarks/results/lab-2-tuning-100mbit.json"}


class Command(NamedTuple):
    """A line of a block.

    Attributes:
        block: Where it stands.
        line: Without its comment, continued lines put together.
    """

    block: Block
    line: str

    def __str__(self) -> str:
        return f"{self.block}: {self.line}"

    @property
    def reasons(self) -> list[str]:
        """What of the table speaks against running it; one at most."""
        return [pattern for pattern in EXCEPTED if re.match(_VARIABLES + pattern, self.line)]


def commands_of(page: str | Path) -> list[Command]:
    """Return all commands of a page."""
    found = []
    for block in blocks(page):
        if block.kind == "sh":
            text = re.sub(r" +# .*", "", block.text.replace("\\\n", ""))
            found += [Command(block, re.sub(r"\s+", " ", line).strip()) for line in text.splitlines() if line.strip()]
    return found


def pages_with_commands() -> list[str]:
    """Return the pages that have commands, but for those that have tests of their own."""
    pages = [str(page.relative_to(ROOT)) for page in PAGES]
    return [page for page in pages if page not in ELSEWHERE and commands_of(page)]


def run_all(page: str, folder: Path) -> None:
    """Run the commands of a page that can be run, block by block, in a folder that looks like a checkout."""
    checkout(page, folder)
    runnable = runnable_of(page)
    for block in dict.fromkeys(command.block for command in runnable):
        program = folder / "train.py"
        # An example is not written over what its reader has.
        program.unlink() if "mpidist example" in block.text else program.write_text(_train(page))
        # The doctor's status says whether it has found something, such as more ranks than cores.
        may_be_1 = " || [ $? = 1 ]"
        lines = [f"{line}{may_be_1 * ('doctor' in line)}" for at, line in runnable if at == block]
        done = run_command("\n".join(["set -ex -o pipefail", *lines]), folder, timeout=110)
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"


def runnable_of(page: str) -> list[Command]:
    """Return the commands of a page that are run."""
    return [command for command in commands_of(page) if not command.reasons]


def checkout(page: str, folder: Path) -> None:
    """Make a checkout of links with a reader's files, so that what commands write lands in ``folder``."""
    for name in ("examples", "mpidist", "tests"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "benchmarks", folder / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    for name, path in _FILES.get(page, {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / name)
    for name in ("train.py", "program.py"):
        (folder / name).write_text(_train(page))


def _train(page: str) -> str:
    """Return the program that a page speaks of: its own, or that of the start page."""
    own = [program.text for program in programs_of(page) if program.library is None]
    return (own or [programs_of(_START_PAGE)[0].text])[0]
