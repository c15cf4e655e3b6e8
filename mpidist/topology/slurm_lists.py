"""Slurm's two compressed notations: lists of hosts, and tasks per node."""

from __future__ import annotations

import re
from itertools import product
from math import prod

MOST_TASKS = 1 << 22
"""The most tasks of one job: several times the cores of the largest machines."""
_MOST_HOSTS = 1 << 16  # of one list in Slurm itself, too
_MOST_SHOWN = 200
# Where Slurm has nothing to tell it writes "(null)": no name of a host has round brackets.
_PART = re.compile(r"[^\[\](),\s]*(?:\[[^\[\],\s][^\[\]\s]*\][^\[\](),\s]*)*")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the hosts of a list such as ``SLURM_JOB_NODELIST``, in its order. Zero padding is kept.

    Raises:
        ValueError: A bracket that is not closed or inside another one, a part that is empty or no range of numbers, or
            more than 65,536 hosts.

    >>> expand_hostlist("n[08-10],m5,o[3-4,6]")
    ['n08', 'n09', 'n10', 'm5', 'o3', 'o4', 'o6']
    >>> expand_hostlist("rack[0-1]n[1-2]-ib")
    ['rack0n1-ib', 'rack0n2-ib', 'rack1n1-ib', 'rack1n2-ib']
    """
    hosts: list[str] = []
    position = 0
    while position <= len(hostlist):
        match = _PART.match(hostlist, position)
        if match is None or not match[0]:
            raise _bad(hostlist, position, "the name of a host")
        hosts += _expand_part(hostlist, match[0])
        if len(hosts) > _MOST_HOSTS:
            raise _too_many(hostlist, match[0])
        position = match.end()
        if position < len(hostlist) and hostlist[position] != ",":
            raise _bad(hostlist, position, "a comma or the end; brackets are closed and hold no others")
        position += 1
    return hosts


def _bad(hostlist: str, position: int, expected: str) -> ValueError:
    found = _shown(hostlist[position:]) if position < len(hostlist) else "the end"
    return ValueError(
        f"the list of hosts {_shown(hostlist)} has {found} where {expected} was expected; an example: 'n[01-03],m5'"
    )


def _too_many(hostlist: str, part: str) -> ValueError:
    return ValueError(
        f"the list of hosts {_shown(hostlist)} has more than {_MOST_HOSTS} of them, up to {_shown(part)}; expected at "
        "most as many"
    )


def _shown(text: str) -> str:
    """Return a text in quotes, one that is longer than a few lines cut."""
    return repr(text) if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]!r}... ({len(text)} characters)"


def _expand_part(hostlist: str, part: str) -> list[str]:
    """Return the names of one part, which has any number of brackets."""
    texts, brackets = re.split(r"\[[^\]]*\]", part), re.findall(r"\[([^\]]*)\]", part)
    choices: list[list[str]] = []
    for bracket in brackets:
        choices.append(_expand_bracket(hostlist, bracket))
        if prod(map(len, choices)) > _MOST_HOSTS:
            raise _too_many(hostlist, part)
    names = []
    for numbers in product(*choices):
        names.append(texts[0] + "".join(number + text for number, text in zip(numbers, texts[1:], strict=True)))
    return names


def _expand_bracket(hostlist: str, bracket: str) -> list[str]:
    numbers: list[str] = []
    for item in bracket.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise ValueError(
                f"the list of hosts {_shown(hostlist)} has {_shown(item)} in the bracket "
                f"{_shown('[' + bracket + ']')}; expected a number or a range of numbers such as 08-10"
            )
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise ValueError(
                f"the list of hosts {_shown(hostlist)} has the range {item!r}; expected the smaller one first"
            )
        if len(numbers) + int(high) - int(low) >= _MOST_HOSTS:
            raise _too_many(hostlist, item)
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Return the number of tasks of each node from a list such as ``SLURM_STEP_TASKS_PER_NODE``.

    Raises:
        ValueError: It is not of that form.

    >>> expand_tasks_per_node("3(x2),2,1")
    [3, 3, 2, 1]
    """
    tasks: list[int] = []
    total = 0
    for item in tasks_per_node.split(","):
        match = _TASKS.fullmatch(item)
        repeat = 0 if match is None else int(match[2] or 1)
        if match is None or repeat < 1:
            raise ValueError(
                f"the list of tasks per node {_shown(tasks_per_node)} has {_shown(item)}; expected numbers with or "
                "without a repetition, such as 3(x2),2,1"
            )
        total += int(match[1]) * repeat
        if len(tasks) + repeat > _MOST_HOSTS or total > MOST_TASKS:
            raise ValueError(
                f"the list of tasks per node {_shown(tasks_per_node)} has more than {_MOST_HOSTS} nodes or "
                f"{MOST_TASKS} tasks, up to {_shown(item)}; expected at most as many"
            )
        tasks += [int(match[1])] * repeat
    return tasks
