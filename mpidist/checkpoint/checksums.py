"""The CRC-32 of a whole from those of its parts, which several ranks read."""

from __future__ import annotations

_POLYNOMIAL = 0xEDB88320
# 1 and x as polynomials over the numbers 0 and 1: as zlib's CRC-32, the highest power is the lowest bit.
_ONE, _X = 1 << 31, 1 << 30


def joined(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two texts, one after the other (zlib's crc32_combine).

    Args:
        first: The CRC-32 of the first.
        second: The CRC-32 of the second.
        length: Bytes of the second.

    >>> import zlib
    >>> joined(zlib.crc32(b"each byte "), zlib.crc32(b"once"), 4) == zlib.crc32(b"each byte once")
    True
    """
    return _product(_power_of_x(8 * length), first) ^ second


def _product(one: int, other: int) -> int:
    """Return the product of two polynomials modulo that of CRC-32."""
    product = 0
    while one:
        if one & _ONE:
            product ^= other
        one = one << 1 & 0xFFFFFFFF
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product


def _power_of_x(exponent: int) -> int:
    power, square = _ONE, _X
    while exponent:
        if exponent & 1:
            power = _product(power, square)
        square = _product(square, square)
        exponent >>= 1
    return power
