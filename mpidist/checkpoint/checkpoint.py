"""Checkpoint: saves and restores variables, optimizers and metrics, on any number of ranks and replicas."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.checkpoint import storage
from mpidist.checkpoint.agreement import chief_does
from mpidist.checkpoint.leaves import Leaves, collect, restore_variable
from mpidist.checkpoint.naming import checkpoints_in, numbered
from mpidist.checkpoint.status import LoadStatus
from mpidist.checkpoint.storage import Manifest
from mpidist.core.context import (
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    outside,
)
from mpidist.core.protocols import StrategyLike


class Checkpoint:
    """Named objects that are saved and restored together (tf.train.Checkpoint).

    Objects are variables, optimizers, metrics, NumPy arrays (filled in place), numbers, strings and None, and dicts,
    lists and tuples of them. They are attributes of the checkpoint: ``checkpoint.epoch += 1`` changes the number
    that is saved next, and after ``restore`` it is the one that was saved.

    A checkpoint is a directory with ``data.safetensors`` and ``manifest.json``. It holds one value per variable,
    so it can be restored on another number of ranks and replicas: ON_READ variables are saved as the aggregate over
    all replicas, and the restored sum is shared out. Needs ``pip install "mpidist[checkpoint]"``.

    Args:
        objects: What to save, by name.

    Raises:
        TypeError: Something that a checkpoint cannot hold.
        ValueError: A name that is a method of this class, or an ON_READ variable without aggregation.

    >>> import tempfile
    >>> from mpidist import Variable
    >>> v = Variable([1.0, 2.0])
    >>> checkpoint = Checkpoint(v=v, epoch=3)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = checkpoint.save(directory + "/ckpt")
    ...     v.assign([0.0, 0.0])
    ...     checkpoint.epoch = 0
    ...     status = checkpoint.restore(path).assert_consumed()
    <Variable 'Variable' shape=(2,) dtype=float64 ON_WRITE/NONE>
    >>> v.numpy(), checkpoint.epoch
    (array([1., 2.]), 3)
    """

    _objects: dict[str, Any]

    def __init__(self, **objects: Any) -> None:
        for name in objects:
            if name.startswith("_") or hasattr(type(self), name):
                raise ValueError(
                    f"a checkpoint object cannot be called {name!r}, as a method of Checkpoint is or because of its "
                    f"underscore; choose another name: Checkpoint(my_{name.strip('_')}=...)"
                )
        object.__setattr__(self, "_objects", objects)
        object.__setattr__(self, "_save_counter", 0)
        object.__setattr__(self, "_sequences", {})
        collect(objects)

    def __getattr__(self, name: str) -> Any:
        objects = self.__dict__.get("_objects", {})
        if name not in objects:
            raise AttributeError(f"the checkpoint has no object {name!r}; it has {sorted(objects)}")
        return objects[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._objects:
            raise AttributeError(
                f"the checkpoint has no object {name!r}, it has {sorted(self._objects)}; "
                f"give it to the constructor: Checkpoint({name}=...)"
            )
        collect({name: value})
        self._objects[name] = value

    @property
    def save_counter(self) -> int:
        """Number of saves so far, those before ``restore`` included."""
        counter: int = self.__dict__["_save_counter"]
        return counter

    def save(self, prefix: str | os.PathLike[str]) -> str:
        """Write a numbered checkpoint: ``save("out/ckpt")`` gives ``out/ckpt-1``, then ``out/ckpt-2``.

        Collective over the ranks of the strategy whose variables are saved: call it on every rank, in the same
        order. ON_READ variables are aggregated over all replicas; the first rank writes; all return once the
        checkpoint is on the disk. It is written under another name and renamed, so a crash leaves no half
        checkpoint under its name; one of the same name is replaced. Under the default strategy, OneDeviceStrategy
        and MirroredStrategy of one process each process is for itself: in a job of several ranks call it on one
        of them, or with a prefix of each one's own.

        Args:
            prefix: Directory and name; the directory is made where it is missing.

        Returns:
            The path, on every rank.

        Raises:
            ImportError: safetensors is not installed.
            OSError: It could not be written; on the first rank. The others raise PeerError.
            RuntimeError: Called inside ``strategy.run``.
            ValueError: Variables of several strategies, or a prefix without a name.
        """
        leaves = collect(self._objects)
        strategy = _strategy_of(leaves, "save()")
        number = self.save_counter + 1
        path = numbered(prefix, number)
        with _entered(strategy):
            # Reading an ON_READ variable takes all ranks, keeping what was read only the chief.
            arrays = {key: variable.value() for key, variable in leaves.variables.items()}
            arrays.update(leaves.arrays)

            def write() -> str:
                storage.write(path, self._manifest(leaves, arrays, path, number), arrays)
                return str(path)

            written: str = chief_does(strategy, f"saving checkpoint {path}", write)
        object.__setattr__(self, "_save_counter", number)
        return written

    def restore(self, path: str | os.PathLike[str]) -> LoadStatus:
        """Give the objects the values of a checkpoint.

        Collective over the ranks of the strategy whose variables are restored: call it on every rank. The first
        rank reads and broadcasts, so only it has to see the file, and a file is read once, not once per rank.
        Slots of an optimizer that has not made them yet are kept for when it does.

        Args:
            path: What ``save`` returned. That of the first rank counts.

        Returns:
            A status that says whether everything matched; ``restore(path).assert_consumed()`` insists on it.

        Raises:
            FileNotFoundError: No checkpoint is there; on the first rank. The others raise PeerError for this and
                whatever else goes wrong there.
            ValueError: A damaged checkpoint, shapes or dtypes that differ, or a checkpoint that has nothing of
                what is asked for. The objects keep their values.
            RuntimeError: Called inside ``strategy.run``.
        """
        if path is None:
            raise ValueError(
                "path is None, as latest_checkpoint() returns where there is no checkpoint; expected the path of one: "
                "start from scratch, or use restore_latest(directory), which returns None then"
            )
        status = self._restore(lambda: Path(path), f"restoring checkpoint {os.fspath(path)}")
        assert status is not None
        return status

    def restore_latest(self, directory: str | os.PathLike[str]) -> LoadStatus | None:
        """Restore the checkpoint of ``directory`` that was saved last; None where there is none. Extension.

        Collective as ``restore``; the first rank looks for all, so ranks cannot find different ones.
        """

        def find() -> Path | None:
            found = checkpoints_in(Path(directory))
            return found[-1][1] if found else None

        return self._restore(find, f"restoring the latest checkpoint of {os.fspath(directory)}")

    def _restore(self, find: Callable[[], Path | None], doing: str) -> LoadStatus | None:
        leaves = collect(self._objects)
        strategy = _strategy_of(leaves, "restore()")
        arrays: dict[str, Array] = {}

        def read() -> Any:
            path = find()
            if path is None:
                return None
            manifest = storage.read_manifest(path)
            arrays.update(storage.read_arrays(path, manifest))
            return str(path), manifest.to_json()

        with _entered(strategy):
            answer = chief_does(strategy, doing, read)
            if answer is None:
                return None
            path, content = answer
            manifest = Manifest.from_json(content, path)
            _check_fit(leaves, manifest, path)
            status = _fill(strategy, leaves, manifest, path, arrays)
        object.__setattr__(self, "_save_counter", manifest.number)
        return status

    def _manifest(self, leaves: Leaves, arrays: dict[str, Array], path: Path, number: int) -> Manifest:
        tensors = {}
        for key, array in arrays.items():
            variable = leaves.variables.get(key)
            how = (None, None) if variable is None else (variable.synchronization.name, variable.aggregation.name)
            tensors[key] = storage.describe(array, *how)
        return Manifest(self._next_sequence(path.parent), number, tensors, leaves.plain_values())

    def _next_sequence(self, directory: Path) -> int:
        sequences: dict[Path, int] = self.__dict__["_sequences"]
        if directory not in sequences:
            found = checkpoints_in(directory)
            sequences[directory] = found[-1][0] if found else 0
        sequences[directory] += 1
        return sequences[directory]


def _strategy_of(leaves: Leaves, method: str) -> StrategyLike:
    """Return the strategy that the checkpoint is saved or restored under, after checking the context."""
    if has_strategy() and get_replica_context() is not None:
        raise RuntimeError(f"Checkpoint.{method} was called inside strategy.run(); call it outside, on every rank")
    with outside():
        default = get_strategy()
    strategies = {v.distribute_strategy for v in leaves.variables.values()} - {default}
    if has_strategy():
        strategies.add(get_strategy())
    if len(strategies) > 1:
        names = sorted(type(strategy).__name__ for strategy in strategies)
        raise ValueError(
            f"Checkpoint.{method} involves the strategies {names}; expected variables of one strategy, the current "
            "one: make a checkpoint for each"
        )
    return strategies.pop() if strategies else default


def _entered(strategy: StrategyLike) -> AbstractContextManager[Any]:
    is_inside = in_cross_replica_context() and get_strategy() is strategy
    return nullcontext() if is_inside else strategy.scope()


def _check_fit(leaves: Leaves, manifest: Manifest, path: str) -> None:
    """Raise unless the checkpoint can fill the objects; every rank comes to the same conclusion."""
    problems = []
    targets: dict[str, Any] = {**leaves.variables, **leaves.arrays}
    for key, target in targets.items():
        tensor = manifest.tensors.get(key)
        if tensor is None and key in manifest.values:
            problems.append(f"{key!r} is {manifest.values[key]!r} in the checkpoint and an array here")
        elif tensor is not None and (tensor.shape, tensor.dtype) != (target.shape, target.dtype.name):
            problems.append(
                f"{key!r} has shape {tensor.shape} and dtype {tensor.dtype} in the checkpoint, and shape "
                f"{target.shape} and dtype {target.dtype.name} here"
            )
    for key in sorted(leaves.places.keys() & manifest.tensors.keys()):
        problems.append(f"{key!r} is an array in the checkpoint and a value here")
    if problems:
        raise ValueError(f"checkpoint {path} does not fit the objects: " + "; ".join(problems))
    here = {*leaves, *leaves.deferring}
    if here and not any(_belongs(key, here) for key in (*manifest.tensors, *manifest.values)):
        raise ValueError(
            f"checkpoint {path} has nothing of what is asked for: it holds {sorted(manifest.tensors)} and "
            f"{sorted(manifest.values)}, the objects are {sorted(here)}; expected the names that it was saved under"
        )


def _belongs(key: str, names: set[str]) -> bool:
    return key in names or any(key.startswith(f"{name}/") for name in names)


def _fill(
    strategy: StrategyLike, leaves: Leaves, manifest: Manifest, path: str, arrays: dict[str, Array]
) -> LoadStatus:
    """Broadcast what the first rank has read, and put it where it belongs (collective)."""
    deferred: dict[str, dict[str, Array]] = {key: {} for key in leaves.deferring}
    unused = []
    for key, tensor in sorted(manifest.tensors.items()):
        owner = next((name for name in leaves.deferring if key.startswith(f"{name}/")), None)
        if key not in leaves.variables and key not in leaves.arrays and owner is None:
            unused.append(key)
            continue
        mine = arrays[key] if key in arrays else np.empty(tensor.shape, storage.dtype_of(tensor))
        value = np.asarray(strategy.extended._broadcast_from_first(mine))
        if key in leaves.variables:
            restore_variable(leaves.variables[key], value)
        elif key in leaves.arrays:
            np.copyto(leaves.arrays[key], value)
        elif owner is not None:
            deferred[owner][key.removeprefix(f"{owner}/")] = np.array(value)
    for name, owner_object in leaves.deferring.items():
        owner_object._checkpoint_defer(deferred[name])
    for key, value in manifest.values.items():
        if key in leaves.places:
            container, place = leaves.places[key]
            container[place] = value
        else:
            unused.append(key)
    missing = [key for key in leaves if key not in manifest.tensors and key not in manifest.values]
    return LoadStatus(path, missing, unused, deferred)
