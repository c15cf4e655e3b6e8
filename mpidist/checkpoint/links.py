"""Links: several keys for one thing, in a checkpoint or in the program, and how the one is restored to the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mpidist.checkpoint.leaves import Leaves, is_within, keys_above
from mpidist.checkpoint.manifest import Manifest


def follow(key: str, links: Mapping[str, str]) -> str:
    """Return the key under which a thing is held.

    >>> follow("model/last/kernel", {"model/last": "model/layers/1"})
    'model/layers/1/kernel'
    """
    while True:
        outer = next((outer for outer in sorted({key, *keys_above(key)}) if outer in links), None)
        if outer is None:
            return key
        key = links[outer] + key[len(outer) :]


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
    here = {*leaves.saved(), *leaves.containers, *leaves.objects}
    queue, known = sorted(links.items()), dict(links)
    for key, to in queue:
        if key in leaves.links or not any(is_within(name, key) for name in here):
            continue
        for kind, table in tables.items():
            for name in [name for name in table if is_within(name, to)]:
                table.setdefault(key + name[len(to) :], table[name])
                if kind == "tensors":
                    aligned.sources[key + name[len(to) :]] = aligned.source(name)
        for name, further in list(known.items()):
            linked = key + name[len(to) :]
            if is_within(name, to) and linked not in known:
                known[linked] = further
                queue.append((linked, further))


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
