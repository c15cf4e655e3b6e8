"""Imports among the files of the library, those for type checkers and those inside of functions too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from importlinter.api import read_configuration

from tests.house.source import Source

Graph = dict[str, set[str]]


def graph(sources: list[Source]) -> Graph:
    """Return for each module the modules that it imports; a package stands for its ``__init__``."""
    modules = {source.module for source in sources}
    return {source.module: {name for name in _imported(source, modules) if name != source.module} for source in sources}


def _imported(source: Source, modules: set[str]) -> Iterator[str]:
    for node in source.nodes(ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source.path}:{node.lineno} is a relative import"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found = {name if name in modules else node.module for name in names}
            yield from (name for name in found if name in modules)


def upward(checkout: Path, sources: list[Source]) -> list[str]:
    """Return the imports that go up the rooms, or between rooms that stand beside each other, by the contracts."""
    contracts = read_configuration(str(checkout / "pyproject.toml"))["contracts_options"]
    edges = [(one, other) for one, others in graph(sources).items() for other in sorted(others)]
    return sorted(
        {
            f"{one} -> {other}"
            for contract in contracts
            if contract["type"] == "layers"
            for container in contract["containers"]
            for one, other in edges
            if _goes_up(contract["layers"], container, one, other)
        }
    )


def _goes_up(layers: list[str], container: str, one: str, other: str) -> bool:
    # "a | b" are beside each other and independent, "a : b" beside each other and free; "(a)" may be missing.
    rooms = {
        f"{container}.{room.strip(' ()')}": (floor, "|" in layer)
        for floor, layer in enumerate(layers)
        for room in layer.replace("|", ":").split(":")
    }
    here, there = (next((room for room in rooms if f"{name}.".startswith(f"{room}.")), None) for name in (one, other))
    if here is None or there is None or here == there:
        return False
    (floor, are_independent), (other_floor, _) = rooms[here], rooms[there]
    return other_floor < floor or (other_floor == floor and are_independent)


def circles(edges: Graph) -> list[list[str]]:
    """Return the groups of modules that import one another, by whatever way, the largest first."""
    reached = {module: _reached(edges, module) for module in edges}
    groups = {frozenset(other for other in reached[one] if one in reached[other]) for one in edges}
    return sorted((sorted(group) for group in groups if len(group) > 1), key=len, reverse=True)


def _reached(edges: Graph, start: str) -> set[str]:
    found, left = {start}, [start]
    while left:
        new = edges[left.pop()] - found
        found |= new
        left += new
    return found
