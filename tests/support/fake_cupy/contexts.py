"""The contexts of the pretended GPUs: hundreds of MiB each, and refused on a device of which somebody else has one.

Since CUDA 12 cudaSetDevice makes one, and so does nearly every other call, on the device that is current in its thread:
0 in a new one. One that mpidist made, where nothing was ever computed, is an error at the end of the test.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

_HERE = str(Path(__file__).parent)
_TESTS = str(Path(__file__).parents[2])
_LIBRARY = str(Path(__file__).parents[3] / "mpidist")
_LINES_TOLD = 4


class Contexts:
    """Which devices have one, who made it and whether it was needed."""

    def __init__(self) -> None:
        self._makers: dict[int, str | None] = {}
        self._needed: set[int] = set()

    @property
    def devices(self) -> set[int]:
        """The devices that have one."""
        return set(self._makers)

    def make(self, device: int) -> None:
        """Make one unless there is one."""
        if device not in self._makers:
            self._makers[device] = _lines_of_library()

    def need(self, device: int) -> None:
        """Note that a device has memory or streams of this process."""
        self._needed.add(device)

    def check(self) -> None:
        """Raise where mpidist made one for nothing."""
        idle = [
            f"gpu:{device} by {maker}"
            for device, maker in self._makers.items()
            if maker is not None and device not in self._needed
        ]
        if idle:
            raise RuntimeError(
                f"contexts were made on devices with which this process has nothing to do: {'; '.join(idle)}"
            )


def _lines_of_library() -> str | None:
    """Return the lines of mpidist that are being run, None where it is the program's own call or its strategy's GPU."""
    frame: FrameType | None = sys._getframe()
    lines = []
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_LIBRARY):
            if (path.rpartition("/")[2], frame.f_code.co_name) == ("placement.py", "settle"):
                return None
            lines.append(f"{path.removeprefix(_LIBRARY + '/')}:{frame.f_lineno}")
        elif path.startswith(_TESTS) and not path.startswith(_HERE):
            break
        frame = frame.f_back
    return f"{', '.join(lines[:_LINES_TOLD])} in {threading.current_thread().name}" if lines else None
