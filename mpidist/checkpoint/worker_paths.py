"""Paths for programs that write files on every rank, and keep those of the first.

Checkpoint needs none of this: one rank writes for all. It is here for other files of a program, by the names that Keras
has (keras.src.distribute.distributed_file_utils).
"""

from __future__ import annotations

import os
import shutil

from mpidist.checkpoint.agreement import extended_of
from mpidist.core.context import StrategyLike, get_strategy


def write_dirpath(dirpath: str | os.PathLike[str], strategy: StrategyLike | None = None) -> str:
    """Return the directory in which this rank is to write files of ``dirpath``.

    It is ``dirpath`` itself on the rank that writes checkpoints, and in a program of one process; on the others it is a
    directory in it, made here, that ``remove_temp_dirpath`` removes.

    Args:
        dirpath: The directory.
        strategy: Whose ranks write; the current one by default.

    >>> write_dirpath("out")
    'out'
    """
    path = _temporary_path(dirpath, strategy)
    if path is None:
        return os.fspath(dirpath)
    os.makedirs(path, exist_ok=True)
    return path


def write_filepath(filepath: str | os.PathLike[str], strategy: StrategyLike | None = None) -> str:
    """Return the file that this rank is to write in place of ``filepath``: see :func:`write_dirpath`.

    >>> write_filepath("out/model.npz")
    'out/model.npz'
    """
    directory, name = os.path.split(os.fspath(filepath))
    return os.path.join(write_dirpath(directory, strategy), name)


def remove_temp_dirpath(dirpath: str | os.PathLike[str], strategy: StrategyLike | None = None) -> None:
    """Remove this rank's temporary directory; nothing on the rank whose files stay.

    Args:
        dirpath: The argument of ``write_dirpath``, or its result.
        strategy: Whose ranks write; the current one by default.
    """
    path = _temporary_path(dirpath, strategy)
    if path is not None and os.path.isdir(path):
        shutil.rmtree(path)


def remove_temp_dir_with_filepath(filepath: str | os.PathLike[str], strategy: StrategyLike | None = None) -> None:
    """Remove the temporary directory of a file that ``write_filepath`` was given, or returned."""
    remove_temp_dirpath(os.path.dirname(os.fspath(filepath)), strategy)


def _temporary_path(dirpath: str | os.PathLike[str], strategy: StrategyLike | None) -> str | None:
    """Return this rank's temporary directory, in ``dirpath`` or that itself; None where it needs none."""
    extended = extended_of(strategy if strategy is not None else get_strategy())
    if not extended.spans_ranks or extended.should_checkpoint:
        return None
    path, name = os.fspath(dirpath), f"workertemp_{extended.input_workers().worker_id}"
    return path if os.path.basename(path) == name else os.path.join(path, name)
