"""Device strings: reading them, and their one canonical form.

A device is ``"cpu:0"`` or ``"gpu:1"``; TensorFlow's longer forms are read too. Numbers of CPU devices are
virtual: ``cpu:0`` and ``cpu:1`` are two replicas on the same processor.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_DEVICE = re.compile(
    r"^/?(?:job:(?P<job>[a-zA-Z_]\w*))?/?(?:replica:\d+)?/?(?:task:(?P<task>\d+))?"
    r"/?(?:device:)?(?P<kind>cpu|gpu)(?::(?P<index>\d+))?$",
    re.IGNORECASE,
)
# What TensorFlow calls a process that belongs to no cluster.
_THIS_PROCESS = ("localhost", 0)


class Device(NamedTuple):
    """A parsed device string; ``job`` and ``task`` are None for a device of this process."""

    kind: str
    number: int
    job: str | None = None
    task: int | None = None

    def __str__(self) -> str:
        if self.job is None:
            return f"{self.kind}:{self.number}"
        return f"/job:{self.job}/replica:0/task:{self.task}/device:{self.kind.upper()}:{self.number}"


def parse_device(text: str) -> Device:
    """Return the device that ``text`` names.

    Raises:
        TypeError: Not a string.
        ValueError: Not a device string.

    >>> str(parse_device("/job:worker/task:0/device:GPU:1"))
    '/job:worker/replica:0/task:0/device:GPU:1'
    >>> str(parse_device("CPU")), str(parse_device("/job:localhost/replica:0/task:0/device:CPU:1"))
    ('cpu:0', 'cpu:1')
    """
    if not isinstance(text, str):
        raise TypeError(f"device is {text!r} of type {type(text).__name__}; expected a string such as 'cpu:0'")
    match = _DEVICE.match(text)
    if match is None or (match["job"] is None) != (match["task"] is None):
        raise ValueError(f"device is {text!r}; expected 'cpu:0', 'gpu:1' or '/job:worker/task:0/device:GPU:1'")
    kind, number = match["kind"].lower(), int(match["index"] or 0)
    if match["task"] is None or (match["job"], int(match["task"])) == _THIS_PROCESS:
        return Device(kind, number)
    return Device(kind, number, match["job"], int(match["task"]))
