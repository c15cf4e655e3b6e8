"""EvalResult: what one evaluation gave, and the file of JSON lines that all of them are written to."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpidist.arrays.convert import Array, to_array
from mpidist.arrays.device_ops import ops_of
from mpidist.core.files import open_regular
from mpidist.values import Variable

FILE = "eval/metrics.jsonl"


@dataclass(frozen=True)
class EvalResult:
    """What one evaluation gave.

    Args:
        checkpoint: The path of the checkpoint.
        metrics: What ``eval_fn`` returned, in types that JSON has.
        saved_at: When the checkpoint was written, in seconds of the epoch.
        seconds: How long the evaluation took.

    >>> EvalResult("out/ckpt-3", {"loss": 0.5}, 1700000000.0, 1.25).to_json()
    '{"checkpoint": "out/ckpt-3", "metrics": {"loss": 0.5}, "saved_at": 1700000000.0, "seconds": 1.25}'
    """

    checkpoint: str
    metrics: dict[str, Any]
    saved_at: float
    seconds: float

    def to_json(self) -> str:
        """Return it as one line; NaN and infinities, which JSON does not have, as "NaN", "Infinity", "-Infinity"."""
        return json.dumps({**self.__dict__, "metrics": _without_nan(self.metrics)}, allow_nan=False)


def plain_metrics(returned: object) -> dict[str, Any]:
    """Return what ``eval_fn`` returned as numbers, strings, None, lists and dicts.

    Raises:
        TypeError: It is no dict from names, or holds something else.
    """
    if not isinstance(returned, Mapping) or not all(isinstance(name, str) for name in returned):
        raise TypeError(
            f"eval_fn returned {returned!r} of type {type(returned).__name__}; expected a dict from names to numbers, "
            "such as {'accuracy': 0.97}"
        )
    return {name: _plain(name, value) for name, value in returned.items()}


def append(directory: Path, result: EvalResult) -> None:
    """Add a line to ``eval/metrics.jsonl`` in ``directory``.

    Raises:
        OSError: It cannot be written.
    """
    file = directory / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = open_regular(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with open(descriptor, "a", encoding="utf-8") as stream:
        stream.write(result.to_json() + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def _plain(name: str, value: Any) -> Any:
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}/{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{name}/{index}", item) for index, item in enumerate(value)]
    try:
        given = to_array(value.numpy() if isinstance(value, Variable) else value)
        array = ops_of(given).to_host(given)
        # NumPy takes the 16-bit floating-point types of other libraries as unknown ones.
        return (array.astype(np.float64) if array.dtype.kind == "V" else _checked(array)).tolist()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"eval_fn returned {value!r} of type {type(value).__name__} as {name!r}; expected numbers, strings, None, "
            "arrays of numbers, or lists and dicts of them"
        ) from error


def _checked(array: Array) -> Array:
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{array.dtype} is no dtype of real numbers")
    return array


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
