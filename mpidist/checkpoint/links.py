"""Links: several keys for one thing, in a checkpoint or in the program, and how the one is restored to the other."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mpidist.checkpoint.leaves import Leaves, keys_above
from mpidist.checkpoint.manifest import Manifest


def follow(key: str, links: Mapping[str, str]) -> str:
    """Return the key under which a thing is held.

    >>> follow("model/last/kernel", {"model/last": "model/layers/1"})
    'model/layers/1/kernel'
    """
    while links:
        outer = next((outer for outer in sorted({key, *keys_above(key)}) if outer in links), None)
        if outer is None:
            return key
        key = links[outer] + key[len(outer) :]
    return key


@dataclass
class Aligned:
    """A checkpoint as the objects that are here would have saved it.

    Attributes:
        manifest: With the keys of the objects.
        sources: Keys of tensors in the checkpoint, where they are others.
        doubles: Pairs of keys of tensors in the checkpoint that are one thing here.
        problems: Values that differ, and are one thing here.
    """

    manifest: Manifest
    sources: dict[str, str] = field(default_factory=dict)
    doubles: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def source(self, key: str) -> str:
        """Return the key of a tensor in the checkpoint."""
        return self.sources.get(key, key)


def align(manifest: Manifest, leaves: Leaves) -> Aligned:
    """Return what a checkpoint has for objects; nothing is changed.

    What was one thing and is several here is there for each of them; what was several and is one here is there once.
    """
    tables: dict[str, dict[str, Any]] = {
        "tensors": dict(manifest.tensors),
        "values": dict(manifest.values),
        "containers": dict(manifest.containers),
        "classes": dict(manifest.classes),
        "iterators": dict.fromkeys(manifest.iterators),
    }
    aligned = Aligned(manifest)
    _take_apart(tables, manifest.links, leaves, aligned)
    _bring_together(tables, leaves, aligned)
    aligned.manifest = replace(
        manifest,
        tensors=tables["tensors"],
        values=tables["values"],
        containers=tables["containers"],
        classes=tables["classes"],
        iterators=tuple(tables["iterators"]),
    )
    return aligned


def _take_apart(tables: dict[str, dict[str, Any]], links: Mapping[str, str], leaves: Leaves, aligned: Aligned) -> None:
    """Add what the keys that are here lead to, and no other ones: in a ring there is no end of keys."""
    sources = {key: follow(key, links) for key in (*leaves.saved(), *leaves.containers, *leaves.objects)}
    sources = {key: source for key, source in sources.items() if source != key}
    names = {kind: sorted(table) for kind, table in tables.items()}

    def add(kind: str, key: str, name: str) -> None:
        if key not in tables[kind]:
            tables[kind][key] = tables[kind][name]
            if kind == "tensors":
                aligned.sources[key] = name

    for key, source in sources.items():
        # These take what they have no part for yet, too.
        is_open = key in leaves.deferring or key in leaves.containers
        for kind in tables:
            for name in (*_inside(names[kind], source), source) if is_open else (source,):
                if name in tables[kind]:
                    add(kind, key + name[len(source) :], name)
    objects: dict[str, list[str]] = {}
    for key in leaves.objects.keys() & sources.keys():
        objects.setdefault(sources[key], []).append(key)
    here = {*leaves.saved()}
    for source, keys in sorted(objects.items()):
        for name in _inside(names["tensors"], source):
            lacking = (key + name[len(source) :] for key in sorted(keys))
            # One that lacks it is enough for the value to wait.
            first = next((key for key in lacking if follow(key, leaves.links) not in here), None)
            if first is not None:
                add("tensors", first, name)


def _inside(names: list[str], outer: str) -> list[str]:
    """Return those of sorted keys that are of something in the object ``outer``."""
    return names[bisect_left(names, f"{outer}/") : bisect_left(names, f"{outer}0")]


def _bring_together(tables: dict[str, dict[str, Any]], leaves: Leaves, aligned: Aligned) -> None:
    if not leaves.links:
        return
    for kind, table in tables.items():
        for name in list(table):
            held = follow(name, leaves.links)
            if held == name:
                continue
            entry = table.pop(name)
            if kind == "tensors":
                source = aligned.sources.pop(name, name)
                if held not in table:
                    aligned.sources[held] = source
                elif aligned.source(held) != source:
                    aligned.doubles.append((aligned.source(held), source))
            elif kind in ("values", "classes") and table.get(held, entry) != entry:
                aligned.problems.append(f"{name!r} is {held!r} here, and another value in the checkpoint")
            table.setdefault(held, entry)
