"""The forms in which torch's callers hand over tensors and options.

C++ gives lists and an options object; Python may leave the options out, or give a tensor by itself with a root or an
operation, as the methods of ProcessGroup allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from mpidist.torch.foreign import Foreign

if TYPE_CHECKING:
    from torch import Tensor


def listed(tensors: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors as a sequence, also if one is given by itself."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def nested(lists: Sequence[Foreign]) -> Sequence[Sequence[Tensor]]:
    """Return the list of tensors in a list, also if it is given by itself."""
    return [lists] if lists and isinstance(lists[0], torch.Tensor) else lists


def options_of(kind: Foreign, given: Foreign, timeout: timedelta | None = None, **fields: Foreign) -> Foreign:
    """Return the options of a call.

    Args:
        kind: torch's class for them.
        given: In their place: them, None, or the value of the first of ``fields`` that is not None.
        timeout: Of the call.
        fields: Names and values of single options.
    """
    if isinstance(given, kind):
        return given
    options = kind()
    for name, value in fields.items():
        if value is None and given is not None:
            value, given = given, None
        if value is not None:
            setattr(options, name, value)
    if timeout is not None:
        options.timeout = timeout
    return options
