"""What goes over the wire: counters of a node's interface, and the least that an all-reduce needs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from benchmarks.measuring.sizes import size_text

# Of every frame of a full TCP stream on Ethernet: 1448 bytes of data in 1514 of the frame (Ethernet 14, IP 20, TCP
# with time stamps 32) and 24 more on the wire (preamble, checksum, gap).
_DATA_BYTES, _WIRE_BYTES, HEADER_BYTES = 1448, 1538, 66
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class Sent(NamedTuple):
    """What an interface has sent since the machine started."""

    nbytes: int
    packets: int

    @classmethod
    def by(cls, interface: str) -> Sent:
        """Return the counters of this node's interface."""
        statistics = Path("/sys/class/net", interface, "statistics")
        return cls(*(int((statistics / name).read_text()) for name in ("tx_bytes", "tx_packets")))

    def data_since(self, before: Sent) -> int:
        """Return how many bytes of data were sent since ``before``: 66 bytes of headers taken off for every packet.

        Packets without data, such as acknowledgements, count as none. Where the kernel hands the interface more than
        a frame at a time (segmentation offload), it counts one packet with one header, and so does this.
        """
        return self.nbytes - before.nbytes - HEADER_BYTES * (self.packets - before.packets)


def is_counted(interface: str) -> bool:
    """Whether this node has counters of ``interface``."""
    return Path("/sys/class/net", interface, "statistics", "tx_packets").exists()


def bits_per_second(rate: str) -> float:
    """Return the number behind a rate as tc writes it.

    >>> bits_per_second("1gbit")
    1000000000.0
    """
    match = re.fullmatch(r"([0-9.]+)(kbit|mbit|gbit)", rate)
    if match is None:
        raise ValueError(f"rate is {rate!r}; expected a number with kbit, mbit or gbit, such as 1gbit")
    return float(match[1]) * _UNITS[match[2]]


def least_bytes(nodes: int, size: int) -> float:
    """Return how many bytes of data each node must send at least in an all-reduce of ``size`` bytes.

    >>> least_bytes(4, 64 << 20) / (1 << 20)
    96.0
    """
    return 2 * (nodes - 1) / nodes * size


def floor_seconds(nodes: int, size: int, rate: float) -> float:
    """Return how long the wire alone needs for them, with the headers of TCP, IP and Ethernet.

    >>> round(floor_seconds(4, 64 << 20, 1e9), 3)
    0.855
    """
    return least_bytes(nodes, size) * 8 / rate * _WIRE_BYTES / _DATA_BYTES


def sent_name(by: str, variant: str, size: int) -> str:
    """Return the name of the figure that has the bytes sent.

    >>> sent_name("mpi", "block", 64 << 20)
    'mpi, block, 64 MiB, most by a node'
    """
    return f"{by}, {variant}, {size_text(size)}, most by a node"


def busy_name(by: str, variant: str, size: int) -> str:
    """Return the name of the figure that has the share of the processors' time.

    >>> busy_name("mpi", "block", 64 << 20)
    'mpi, block, 64 MiB, processors busy'
    """
    return f"{by}, {variant}, {size_text(size)}, processors busy"
