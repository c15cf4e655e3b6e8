"""The command line: `mpirun -n 2 python -m benchmarks [run]`, `... plot RESULTS.json`, `... compare A.json B.json`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# One thread per rank, as the ranks are the parallelism; the linear algebra libraries look once, when NumPy comes.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

from benchmarks import (  # noqa: E402
    cluster,
    cluster_jobs,
    compare,
    gpu,
    parameter_server,
    plot,
    reading,
    report,
    suite,
)
from benchmarks.models import MODELS  # noqa: E402
from benchmarks.results import load  # noqa: E402
from benchmarks.sizes import sizes_of_text  # noqa: E402

_COMMANDS_OF_THEIR_OWN = {
    "cluster": cluster,
    "cluster-jobs": cluster_jobs,
    "gpu": gpu,
    "input": reading,
    "parameter-server": parameter_server,
}
RESULTS = Path(__file__).with_name("results")


def _names(text: str, known: tuple[str, ...]) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is unknown; expected some of {','.join(known)}")
    return names


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = top.add_subparsers(dest="command")
    run = commands.add_parser("run", help="measure (the default); start it under mpirun or srun")
    models = tuple(MODELS)
    run.add_argument(
        "--operations",
        type=lambda text: _names(text, suite.OPERATIONS),
        default=list(suite.OPERATIONS),
        metavar="A,B",
        help=f"which of {','.join(suite.OPERATIONS)}; all by default",
    )
    run.add_argument(
        "--sizes",
        type=sizes_of_text,
        default=sizes_of_text("4,64,1K,16K,64K,256K,1M,4M,16M,64M"),
        metavar="A,B",
        help="sizes of the collectives, such as 4,256K,64M",
    )
    run.add_argument(
        "--models",
        type=lambda text: _names(text, models),
        default=list(models),
        metavar="A,B",
        help=f"gradient sets of batch: {','.join(models)}",
    )
    run.add_argument("--seconds", type=float, default=0.5, help="how long to measure one point, about (0.5)")
    run.add_argument("--steps", type=int, default=10_000, help="steps of the memory operation (10000)")
    run.add_argument("--algorithm", help="force one algorithm of mpidist by name")
    run.add_argument("--no-gloo", action="store_true", help="leave gloo out also where torch is installed")
    run.add_argument("--no-progress", action="store_true", help="no progress bar")
    run.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files (benchmarks/results)")
    run.add_argument("--name", help="name of the result files (RANKS-ranks)")
    plot_command = commands.add_parser("plot", help="draw a result file as PNG; needs matplotlib")
    plot_command.add_argument("results", type=Path, nargs="+", help="JSON files that run wrote; plots go beside them")
    compare_command = commands.add_parser("compare", help="compare two result files")
    compare_command.add_argument("first", type=Path)
    compare_command.add_argument("second", type=Path)
    table_command = commands.add_parser("table", help="print a result file as a markdown table")
    table_command.add_argument("results", type=Path)
    for name, module in _COMMANDS_OF_THEIR_OWN.items():
        commands.add_parser(name, help=(module.__doc__ or "").splitlines()[0], add_help=False)
    return top


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] in _COMMANDS_OF_THEIR_OWN:
        return _COMMANDS_OF_THEIR_OWN[arguments[0]].main(arguments[1:])
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["run", *arguments]
    options = parser().parse_args(arguments)
    if options.command == "run":
        return suite.run(options)
    if options.command == "compare":
        print(compare.compare(load(options.first), load(options.second)))
    elif options.command == "table":
        print(report.markdown_table(load(options.results)))
    else:
        for path in options.results:
            for written in plot.plot(load(path), path.parent, path.stem):
                print(f"# written: {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
