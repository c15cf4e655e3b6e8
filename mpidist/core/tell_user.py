"""What the library says to its user on stderr, whatever the program does with logging."""

from __future__ import annotations

import sys


def tell_user(text: str) -> None:
    """Print ``text`` on stderr under mpidist's name, at once."""
    print(f"mpidist: {text}", file=sys.stderr, flush=True)
