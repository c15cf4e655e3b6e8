"""The GPUs of a Slurm task, by the environment of the task alone."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mpidist.cluster_resolver.slurm_layout import SlurmLayout
from mpidist.core.numbers import whole_number

Environ = Mapping[str, str]
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ON_NODE = "SLURM_GPUS_ON_NODE"
# The GPUs of the node that Slurm shows to this task: all that the job has there, or those that it has bound to it.
_OF_STEP = "SLURM_STEP_GPUS"
# The content of CUDA_VISIBLE_DEVICES by a resolver of this process: GPUs of the task, not to be shared out again.
_left: str | None = None


def gpus_of_task(
    environ: Environ, layout: SlurmLayout, gpus_per_node: int | None, gpus_per_task: int | None
) -> list[str]:
    """Return the GPUs of this task, as CUDA_VISIBLE_DEVICES names them.

    Empty where none are counted.

    Args:
        environ: The environment to read.
        layout: The hosts of the tasks.
        gpus_per_node: GPUs of each node, instead of Slurm's number; 0, 1, ... where CUDA_VISIBLE_DEVICES shows another
            number of them.
        gpus_per_task: The number of GPUs for the task; all that are its own by default.

    Raises:
        ValueError: There are fewer than asked for, or a variable is malformed.
    """
    most_tasks = max(layout.tasks_of_hosts.values())
    on_node = _on_node(environ) if gpus_per_node is None else gpus_per_node
    if gpus_per_task is not None:
        _check_enough(environ, most_tasks, gpus_per_node, gpus_per_task, on_node)
    if not on_node:
        return []
    visible = _visible(environ, on_node)
    is_own = _are_own(environ, on_node)
    if gpus_per_node not in (None, len(visible)) and not is_own:
        visible = [str(gpu) for gpu in range(on_node)]
    tasks, place = (1, 0) if is_own else (most_tasks, layout.places[layout.rank][1])
    each = len(visible) // tasks if gpus_per_task is None else gpus_per_task
    if each * tasks > len(visible):
        raise ValueError(
            f"{_VISIBLE}={environ.get(_VISIBLE)!r} shows {len(visible)} GPUs to {tasks} task(s); expected "
            f"{each * tasks} with gpus_per_task={each}"
        )
    return visible[place * each : (place + 1) * each]


def leave_gpus(gpus: list[str]) -> None:
    """Hide all GPUs but these from this process."""
    global _left
    _left = os.environ[_VISIBLE] = ",".join(gpus)


def _on_node(environ: Environ) -> int:
    text = environ.get(_ON_NODE)
    try:
        return whole_number(text) if text else 0
    except ValueError:
        raise ValueError(f"{_ON_NODE}={text!r}; expected a whole number: type: unset {_ON_NODE}") from None


def _visible(environ: Environ, on_node: int) -> list[str]:
    text = environ.get(_VISIBLE)
    if text is None:
        return [str(gpu) for gpu in range(on_node)]
    names = [name.strip() for name in text.split(",")]
    # As CUDA reads it: devices after one that cannot be are hidden.
    end = next((place for place, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))
    return names[:end]


def _are_own(environ: Environ, on_node: int) -> bool:
    """Return whether the GPUs that this process sees are its task's alone.

    Otherwise all tasks of the node see them.
    """
    if _left is not None and environ.get(_VISIBLE) == _left:
        return True
    shown = environ.get(_OF_STEP)
    return bool(shown) and len(str(shown).split(",")) < on_node


def _check_enough(
    environ: Environ, most_tasks: int, gpus_per_node: int | None, gpus_per_task: int, on_node: int
) -> None:
    if gpus_per_node is None and _ON_NODE not in environ:
        raise ValueError(f"gpus_per_task is {gpus_per_task} and {_ON_NODE} is not set; expected gpus_per_node=")
    if gpus_per_task * most_tasks > on_node:
        raise ValueError(
            f"{most_tasks} tasks on a node with gpus_per_task={gpus_per_task} need {gpus_per_task * most_tasks} GPUs; "
            f"expected at most the {on_node} that a node has"
        )
