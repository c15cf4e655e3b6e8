"""Tuning files: one table per kind of host, MPI library and layout of ranks."""

from __future__ import annotations

import json
import logging
import os
import platform
from pathlib import Path
from typing import NamedTuple

from mpidist.collectives.mpi.exchange import first_does
from mpidist.collectives.mpi.waiting import Comm, Steps
from mpidist.collectives.node.node import Node
from mpidist.collectives.reduce.choice import place_of
from mpidist.collectives.reduce.registry import SHIPPED, Table, table_from_json, table_text, table_to_json
from mpidist.core.files import NotAFileError, check_no_link, replacing
from mpidist.core.settings import TUNING_FILE
from mpidist.topology import import_mpi

_log = logging.getLogger("mpidist")
# Files without a version hold a row of algorithms instead of the costs between nodes.
_VERSION = 2
_logged: set[str] = set()


class Setup(NamedTuple):
    """The hosts, MPI library and layout for which a table was measured."""

    host: str  # model of the CPU and number of cores
    mpi: str  # MPI library and its version
    layout: str  # nodes and ranks per node


def setup_of(node: Node) -> Setup:
    """Return the setup of a job, as if all hosts were like this one."""
    counts = {len(ranks) for ranks in node.ranks}
    nodes = len(node.ranks)
    per_node = str(min(counts)) if len(counts) == 1 else "uneven"
    library = import_mpi().Get_library_version().strip("\0").splitlines()[0].split(",")[0]
    return Setup(
        f"{_cpu_model()}, {os.cpu_count()} cores",
        " ".join(library.split()),
        f"{nodes} node{'s' if nodes > 1 else ''} x {per_node} rank{'' if per_node == '1' else 's'}",
    )


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    models = [line for line in path.read_text().splitlines() if line.startswith("model name")] if path.exists() else []
    return models[0].split(":", 1)[1].strip() if models else platform.machine()


def read(path: str | Path) -> dict[Setup, Table]:
    """Read and validate the tables of a file."""
    fix = "Use a file that 'python -m mpidist tune --out FILE' wrote"
    try:
        content = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}). {fix}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}). {fix}") from error
    if not isinstance(content, dict) or not isinstance(content.get("tables"), list):
        raise ValueError(f'{path} has no list "tables". {fix}')
    version = content.get("version", 1)
    if version not in (1, _VERSION):
        raise ValueError(f"{path} has version {json.dumps(version)}, of another mpidist. {fix} of this one")
    tables: dict[Setup, Table] = {}
    for number, entry in enumerate(content["tables"], 1):
        names = Setup._fields
        if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in names):
            raise ValueError(
                f"{path}, table {number}, is {json.dumps(entry)}. It must have strings {', '.join(names)} and the rows "
                "of a table"
            )
        setup = Setup(*(entry[name] for name in names))
        if version == 1 and "between_nodes" in entry:
            entry["between_nodes"] = SHIPPED.between_nodes._asdict()
            _log_once(
                f"mpidist: {path} is of an older mpidist and has no costs of messages between nodes, so the shipped "
                f"costs are used. Run 'python -m mpidist tune --out {path}' to measure them"
            )
        if setup in tables:
            raise ValueError(f"{path}, table {number}, is a second table for {', '.join(setup)}. Remove one")
        rows = {name: value for name, value in entry.items() if name not in names}
        tables[setup] = table_from_json(rows, f"{path}, table {number}")
    return tables


def read_if_there(path: str | Path) -> dict[Setup, Table]:
    """Return the tables of a file before it is written. Raises ValueError if it cannot be."""
    try:
        check_no_link(path)
    except NotAFileError as error:
        raise ValueError(f"{path} cannot be written: {error}") from error
    if Path(path).exists():
        return read(path)
    folder = Path(path).resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{path} cannot be written: {folder} is not a folder in which this user may write")
    return {}


def merge(path: str | Path, setup: Setup, table: Table) -> None:
    """Write a table to a file, replacing the table for the same setup, if any."""
    tables = {**read_if_there(path), setup: table}
    texts = []
    for where, rows in sorted(tables.items()):
        entry = {**where._asdict(), **table_to_json(rows)}
        lines = [f"      {json.dumps(name)}: {json.dumps(value)}" for name, value in entry.items()]
        texts.append("    {\n" + ",\n".join(lines) + "\n    }")
    try:
        with replacing(path) as descriptor, open(descriptor, "w", encoding="utf-8", closefd=False) as file:
            file.write(f'{{\n  "version": {_VERSION},\n  "tables": [\n' + ",\n".join(texts) + "\n  ]\n}\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error


def agreed_table(comm: Comm, node: Node, table: Table | None) -> Steps[Table]:
    """Return the table of a communicator (collective, by MPI_Ibcast).

    Only rank 0 reads ``MPIDIST_TUNING_FILE`` and the file, so an error in it is raised on all ranks. ``table`` is the
    argument of rank 0 and overrides the file.
    """
    if comm.Get_size() == 1:
        # A single rank runs no algorithm, and perhaps only rank 0 of the job can read the file.
        return table or SHIPPED
    return (yield from first_does(comm, lambda: _find_table(node, table)))


def _find_table(node: Node, argument: Table | None) -> Table:
    path = TUNING_FILE.read()
    setup = setup_of(node)
    table, origin = argument or SHIPPED, "the given table" if argument else "the shipped table"
    if argument is None and path is not None:
        try:
            tables = read(path)
        except ValueError as error:
            raise ValueError(f"{TUNING_FILE.name}: {error}") from error
        if setup in tables:
            table, origin = tables[setup], f"from {path}"
        else:
            _log_once(
                f"mpidist: {path} has no table for {', '.join(setup)}, so the shipped table is used. Run "
                f"'python -m mpidist tune --out {path}' under the same launcher to measure one"
            )
    _log_once(f"mpidist: all-reduce on {setup.layout}: {table_text(table, place_of(node))} ({origin})")
    return table


def _log_once(text: str) -> None:
    if _log.isEnabledFor(logging.INFO) and text not in _logged:
        _logged.add(text)
        _log.info("%s", text)
