"""Find new checkpoints, evaluate them on this rank, and keep the results in a file."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mpidist.arrays.convert import to_array
from mpidist.arrays.device_ops import ops_of
from mpidist.checkpoint.directory import checkpoints_in, read_manifest
from mpidist.checkpoint.format import DamagedCheckpointError, Manifest
from mpidist.core.concurrency import Deadline, wait_until
from mpidist.core.context import outside
from mpidist.core.files import open_regular
from mpidist.estimator.specs import EvalResult, EvalSpec
from mpidist.values import Variable

FILE = "eval/metrics.jsonl"
_log = logging.getLogger("mpidist")
_LOOK_SECONDS = 0.5
# A look reads the manifest of every checkpoint. With many checkpoints, looks take at most this part of the time.
_MOST_OF_THE_TIME = 0.05
Id = tuple[str, int]
"""Name and sequence number of a checkpoint."""


class Evaluations:
    """The evaluations of the checkpoints of one directory. ``results`` has one for each so far."""

    def __init__(self, spec: EvalSpec, directory: Path) -> None:
        self._spec = spec
        self._directory = directory
        self._next_look = time.monotonic()
        self._next_evaluation = self._next_look + spec.start_delay_secs
        self._evaluated: tuple[int, float] | None = None
        self._logged: set[str] = set()
        waiting = f"for a first checkpoint in {directory}; it goes on waiting while the others train"
        self._first = Deadline(lambda waited: f"the evaluator has waited {waited:.0f} s {waiting}")
        self.results: list[EvalResult] = []

    def evaluate_if_due(self) -> EvalResult | None:
        """Evaluate the newest checkpoint if it is new, unless it is too early."""
        now = time.monotonic()
        if now < max(self._next_look, self._next_evaluation):
            return None
        newest = self._newest()
        looked = time.monotonic() - now
        self._next_look = now + max(_LOOK_SECONDS, looked / _MOST_OF_THE_TIME)
        if newest is None:
            self._first.check()
        return None if newest is None or self._is_known(newest[1]) else self._evaluate(*newest)

    def evaluate_last(self, told: Id | None) -> None:
        """Evaluate the newest checkpoint after the training, unless that was done.

        Wait until this rank sees the checkpoint ``told``, the newest one of the chief.

        Raises:
            FileNotFoundError: There is no checkpoint, or this rank does not see it within ``MPIDIST_TIMEOUT``.
        """
        if told is not None:
            self._await(told)
        result = None
        while result is None:
            newest = self._newest()
            if newest is None:
                raise FileNotFoundError(
                    f"the training is over, and there is no checkpoint in {self._directory} to evaluate; expected "
                    "train_fn to save one: mpidist.CheckpointManager(checkpoint, context.checkpoint_dir, 5).save()"
                )
            if self._is_known(newest[1]):
                return
            result = self._evaluate(*newest)

    def newest_id(self) -> Id | None:
        """Return name and sequence of the newest checkpoint here, or None."""
        newest = self._newest()
        return None if newest is None else (newest[0].name, newest[1].sequence)

    def _newest(self) -> tuple[Path, Manifest] | None:
        found = checkpoints_in(self._directory)
        for path, reason in found.unusable.items():
            if path not in self._logged:
                self._logged.add(path)
                _log.warning("mpidist: checkpoint %s is not evaluated: %s", path, reason)
        return found.checkpoints[-1] if found.checkpoints else None

    def _is_known(self, manifest: Manifest) -> bool:
        return self._evaluated == (manifest.sequence, manifest.saved_at)

    def _evaluate(self, path: Path, manifest: Manifest) -> EvalResult | None:
        """Evaluate a checkpoint. Return None if it was removed during the evaluation."""
        begin = time.monotonic()
        self._next_evaluation = begin + self._spec.throttle_secs
        steps = {} if self._spec.steps is None else {"steps": self._spec.steps}
        try:
            with outside():
                metrics = self._spec.eval_fn(str(path), **steps)
        except (OSError, DamagedCheckpointError) as error:
            if _is_still_there(path, manifest):
                raise
            _log.info("mpidist: checkpoint %s was removed while it was evaluated (%s)", path, error)
            self._next_look = self._next_evaluation = begin
            return None
        result = EvalResult(str(path), plain_metrics(metrics), manifest.saved_at, time.monotonic() - begin)
        append(self._directory, result)
        self._evaluated = manifest.sequence, manifest.saved_at
        self.results.append(result)
        if self._spec.on_result is not None:
            self._spec.on_result(result)
        return result

    def _await(self, told: Id) -> None:
        """Wait until this rank sees the chief's checkpoint, because file systems may be slow."""
        name, sequence = told
        path = self._directory / name
        deadline = Deadline(
            lambda waited: f"the evaluator has waited {waited:.0f} s to see {path}, which the chief saved last",
            lambda waited: FileNotFoundError(
                f"{path}, which the chief saved last, is not seen on host {os.uname().nodename}, where the evaluator "
                f"runs, after {waited:.0f} s; expected a checkpoint_dir that all nodes share"
            ),
        )

        def is_seen() -> bool:
            found = checkpoints_in(self._directory).checkpoints
            return (name, sequence) in [(path.name, manifest.sequence) for path, manifest in found]

        wait_until(is_seen, deadline, _LOOK_SECONDS / 5)


def _is_still_there(path: Path, manifest: Manifest) -> bool:
    try:
        now = read_manifest(path)
    except FileNotFoundError:
        return False
    except DamagedCheckpointError:
        return True
    return (now.sequence, now.saved_at) == (manifest.sequence, manifest.saved_at)


# Results ----------------------------------------------------------------------------------------------------------


def plain_metrics(returned: object) -> dict[str, object]:
    """Convert the result of ``eval_fn`` to numbers, strings, None, lists and dicts."""
    if not isinstance(returned, Mapping) or not all(isinstance(name, str) for name in returned):
        raise TypeError(
            f"eval_fn returned {returned!r} of type {type(returned).__name__}; expected a dict from names to numbers, "
            "such as {'accuracy': 0.97}"
        )
    return {name: _plain(name, value) for name, value in returned.items()}


def append(directory: Path, result: EvalResult) -> None:
    """Add a line to ``eval/metrics.jsonl`` in ``directory``."""
    file = directory / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = open_regular(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with open(descriptor, "a", encoding="utf-8") as stream:
        stream.write(result.to_json() + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def _plain(name: str, value: object) -> object:
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
        if array.dtype.kind == "V":
            # The 16-bit floating-point types of other libraries.
            array = array.astype(np.float64)
        elif array.dtype.kind not in "biuf":
            raise TypeError(f"{array.dtype} is no dtype of real numbers")
        return array.tolist()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"eval_fn returned {value!r} of type {type(value).__name__} as {name!r}; expected numbers, strings, None, "
            "arrays of numbers, or lists and dicts of them"
        ) from error
